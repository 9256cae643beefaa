"""Settings that logical ranks do not support."""

import os
from typing import Any

from lightning_d9m.control.env_settings import variable_of
from lightning_d9m.errors import SettingError
from lightning_d9m.hashing.shards import has_base
from lightning_d9m.lightning.trainer_attributes import Trainer

_VARIABLE = variable_of("logical_ranks")
# Modules, parameters and optimizers that are refused, by the name of a class, and the reason.
_REFUSED = {
    "SyncBatchNorm": "needs the activations of all logical ranks at once: use GroupNorm, LayerNorm "
    "or BatchNorm without sync_batchnorm=True",
    **dict.fromkeys(
        ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"),
        "reduces or divides parameters itself, and logical ranks sum whole gradients: leave it out",
    ),
    "DTensor": "is divided among processes, and logical ranks need whole parameters in each "
    "process: leave out fully_shard and parallelize_module",
    "ZeroRedundancyOptimizer": "divides the work of an optimizer among the processes, and with "
    "logical ranks each process runs the whole optimizer: use the optimizer that it wraps",
}


def refuse_unread_variable(strategy: Any) -> None:
    """Refuse a number of logical ranks in the environment that a strategy does not read.

    Raises:
        SettingError: If the variable is set, and the strategy is not one with logical ranks.
    """
    value = os.environ.get(_VARIABLE)
    if value and not hasattr(strategy, "logical_ranks"):
        raise SettingError(
            f"{_VARIABLE} is {value!r}, but the Trainer has the strategy "
            f"{type(strategy).__name__}, which trains without logical ranks: use "
            "strategy='ddp_d9m' or strategy='horovod_d9m', or unset the variable."
        )


def check_trainer(trainer: Trainer, strategy: Any, session: object) -> None:
    """Refuse what logical ranks do not support, at every number of processes.

    Raises:
        SettingError: With the setting, and what to do.
    """
    if session is None:
        raise SettingError(
            f"The strategy has logical_ranks={strategy.logical_ranks}, and the Trainer has no "
            "DeterminismCallback, which seeds the logical ranks: add "
            "callbacks=[DeterminismCallback()]."
        )
    module: Any = trainer.lightning_module
    optimizers = {f"optimizer {number}": each for number, each in enumerate(trainer.optimizers)}
    parts = dict(module.named_modules()) | dict(module.named_parameters()) | optimizers
    for name, part in parts.items():
        for kind, reason in _REFUSED.items():
            if has_base(part, kind):
                raise SettingError(
                    f"{name!r} is a {kind}, which {reason}, or train without logical_ranks."
                )
    if trainer.state.fn == "fit" and not module.automatic_optimization:
        raise SettingError(
            f"{type(module).__name__} has automatic_optimization=False, and the steps of logical "
            "ranks are those of Lightning's automatic optimization: leave that attribute out and "
            "let training_step return the loss, or train without logical_ranks."
        )
