"""Settings, and collectives in steps, that logical ranks do not support."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import distributed

from lightning_d9m.attribute_patches import AttributePatches
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


# What each collective of torch calls first. It is looked up again in each call, so that replacing
# it also reaches collectives that the user's module has imported by name.
_FIRST_CALL = "_rank_not_in_group"
# Functions that call it, too, and begin so, ask for ranks and sizes.
_QUERIES = ("_", "get_")
# The namespaces of ops that communicate: the functional collectives, and those that they wrap.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
_LOCAL_OPS = {"check_for_nan", "wait_tensor"}  # which wait for no process that has not begun


def refuse_collective(name: str, logical_rank: int) -> NoReturn:
    """Raise a ``SettingError`` about a collective in the step of a logical rank."""
    raise SettingError(
        f"{name} is called in the step of logical rank {logical_rank}: the logical ranks of a "
        "process run one after the other, so they cannot wait for each other. Log values with "
        "self.log, and call collectives in hooks between steps."
    )


def watch_collectives(patches: AttributePatches, current: Callable[[], int | None]) -> None:
    """Refuse the collectives of ``torch.distributed`` that a step calls.

    ``current`` returns the logical rank whose step runs, or None.
    """
    module: Any = distributed.distributed_c10d
    first = getattr(module, _FIRST_CALL)

    @wraps(first)
    def check_group(*args: Any, **kwargs: Any) -> Any:
        rank = current()
        if rank is not None:
            caller = sys._getframe(1).f_code.co_name  # noqa: SLF001 - no other is as fast
            if not caller.startswith(_QUERIES):
                refuse_collective(f"torch.distributed.{caller}", rank)
        return first(*args, **kwargs)

    patches.replace(module, _FIRST_CALL, check_group)
    # These first check the other rank, of which there may be none.
    for name in ("send", "recv"):
        watch_function(patches, current, distributed, name, f"torch.distributed.{name}")
    for name in torch._C._dispatch_get_all_op_names():  # noqa: SLF001 - torch lists them nowhere else
        namespace, _, op = name.partition(".")[0].partition("::")
        if namespace in _NAMESPACES and op not in _LOCAL_OPS:
            title = f"ops.{namespace}.{op}"
            packet = attrgetter(title)(torch)
            for each in (packet, *(getattr(packet, name) for name in packet.overloads())):
                # Both classes look up this function in each call.
                watch_function(patches, current, each, "_op", f"torch.{title}")


def watch_function(
    patches: AttributePatches, current: Callable[[], int | None], owner: Any, name: str, title: str
) -> None:
    """Refuse a function of an owner, which the title names, if a step calls it."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        rank = current()
        if rank is not None:
            refuse_collective(title, rank)
        return function(*args, **kwargs)

    patches.replace(owner, name, call)
