"""The model, the optimizer and the loader within the wrappers of libraries."""

from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9m.engine.hashing.shards import has_base
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.trainer.lightning_private import find_fabric_loader

# They iterate, move and divide batches in ways of their own.
_WRAPPING = ("accelerate", "lightning", "lightning_fabric")
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "_FabricModule")


def find_controllable(loader: object) -> DataLoader[Any] | None:
    """Return the loader that ``LoaderControl`` can place at any batch; None if there is none.

    Loaders of Fabric and Accelerate move the batches of a loader that they hold.
    """
    inner = loader
    if has_base(loader, "DataLoaderShard"):
        inner = getattr(loader, "base_dataloader", loader)  # a class of the program has none
    elif has_base(loader, "_FabricDataLoader"):
        inner = find_fabric_loader(loader)
    elif type(loader).__module__.partition(".")[0] in _WRAPPING:
        return None
    if not isinstance(inner, DataLoader) or isinstance(inner.dataset, IterableDataset):
        return None
    return inner


def unwrap_model(model: Any) -> torch.nn.Module:
    """Return the model within the wrappers of DDP, FSDP and Fabric, whose prefixes names then lack.

    Raises:
        SettingError: For a model of DeepSpeed, or several models.
    """
    if not isinstance(model, torch.nn.Module):
        raise SettingError(
            f"The model is {type(model).__name__}; allowed: a torch.nn.Module. Pass several "
            "models as one torch.nn.ModuleList or ModuleDict."
        )
    # By name, because importing Fabric takes seconds. Wrappers may be nested: Fabric wraps DDP.
    while type(model).__name__ in _WRAPPERS:
        model = model.module
    inner: torch.nn.Module = model
    if _is_of_deepspeed(inner) or any(hasattr(weight, "ds_id") for weight in inner.parameters()):
        raise SettingError(_describe_deepspeed("model", inner))
    return inner


def _is_of_deepspeed(made: object) -> bool:
    return type(made).__module__.partition(".")[0] == "deepspeed"


def _describe_deepspeed(part: str, made: object) -> str:
    return (
        f"The {part} is {type(made).__name__} with DeepSpeed, which keeps the states of "
        "optimizers, and with ZeRO stage 3 the weights, in partitions that the parameters do "
        "not show: a ledger would not show every difference. Use DDP or FSDP."
    )


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer within the wrappers of Fabric and Accelerate.

    Raises:
        SettingError: For an optimizer of DeepSpeed, and what is not an optimizer.
    """
    if _is_of_deepspeed(optimizer):
        raise SettingError(_describe_deepspeed("optimizer", optimizer))
    inner = getattr(optimizer, "optimizer", None)
    unwrapped: Any = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    # Not by its class: some libraries have their own.
    if not hasattr(unwrapped, "param_groups"):
        raise SettingError(
            f"An optimizer is {type(unwrapped).__name__}; allowed: a torch.optim.Optimizer, or a "
            "list of them."
        )
    return cast(torch.optim.Optimizer, unwrapped)
