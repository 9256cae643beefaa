"""Snapshots of the weights of every epoch, for ``d9m audit model``, which sets the variable."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_d9m.hashing.training_state import plain_name

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

WEIGHTS_VARIABLE = "LIGHTNING_D9M_KEEP_WEIGHTS"


def save_weight_snapshot(
    trainer: "Trainer", module: "LightningModule", fit: str, moment: str, epoch: int
) -> None:
    """Save all parameters as ``<fit>-<moment>-<epoch>.pt``, if the variable names a folder.

    Only rank 0 saves; of a sharded parameter it saves its own shard.

    ``fit`` is the name of the fit's ledger folder; the moment is that of a record.
    """
    chosen = os.environ.get(WEIGHTS_VARIABLE)
    if not chosen or not trainer.is_global_zero:
        return
    folder = Path(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {plain_name(name): _to_local(value) for name, value in module.named_parameters()}
    torch.save(weights, weight_snapshot_path(folder, fit, moment, epoch))


def weight_snapshot_path(folder: Path, fit: str, moment: str, epoch: int) -> Path:
    """Return the file of one snapshot."""
    return folder / f"{fit}-{moment}-{epoch:06d}.pt"


def load_weight_snapshot(path: Path) -> dict[str, Tensor]:
    """Read a snapshot, with ``weights_only=True``."""
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def _to_local(parameter: Any) -> Tensor:
    tensor: Tensor = parameter.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).cpu()
