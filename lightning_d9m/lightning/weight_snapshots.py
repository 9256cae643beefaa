"""Weights of every epoch, kept in files for ``d9m audit model``, which sets the variable."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.hashing.model_tensors import plain_name

WEIGHTS_VARIABLE = "LIGHTNING_D9M_KEEP_WEIGHTS"


def keep_weights(trainer: Any, module: Any, fit: str, moment: str, epoch: int) -> None:
    """Save all parameters as ``<fit>-<moment>-<epoch>.pt``, if the variable names a folder.

    Rank 0 saves; of a sharded parameter its own shard.

    Args:
        trainer: The Trainer.
        module: The module whose parameters are saved.
        fit: Name of the fit's ledger folder.
        moment: ``"initial"``, ``"epoch"`` or ``"final"``.
        epoch: Counted from 0.
    """
    chosen = os.environ.get(WEIGHTS_VARIABLE)
    if not chosen or not trainer.is_global_zero:
        return
    folder = Path(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {plain_name(name): _local(value) for name, value in module.named_parameters()}
    torch.save(weights, weights_path(folder, fit, moment, epoch))


def weights_path(folder: Path, fit: str, moment: str, epoch: int) -> Path:
    """Return the file that holds the weights of one moment."""
    return folder / f"{fit}-{moment}-{epoch:06d}.pt"


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read weights that were kept; nothing but tensors is loaded."""
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def _local(parameter: Any) -> Tensor:
    tensor: Tensor = parameter.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).cpu()
