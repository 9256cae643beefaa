"""Settings of a program that logical ranks do not support."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn

from torch import distributed, nn
from torch.optim import LBFGS

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.lightning_private import has_layer_sync

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


def refuse_collective(name: str, logical_rank: int) -> NoReturn:
    """Raise a ``SettingError`` about a collective in the step of a logical rank."""
    raise SettingError(
        f"{name} is called in the step of logical rank {logical_rank}: the logical ranks of a "
        "process run one after the other, so they cannot wait for each other. Log values with "
        "self.log, and call collectives in hooks between steps."
    )


def watch_collectives(patches: AttributePatches, current: Callable[[], int | None]) -> None:
    """Refuse the collectives of ``torch.distributed`` that a step calls.

    Args:
        patches: Undoes it.
        current: Returns the logical rank whose step runs, or None.
    """
    if distributed.is_available():
        for name in _COLLECTIVES:
            function = getattr(distributed, name)
            watched = partial(_call_collective, name, function, current)
            patches.replace(distributed, name, wraps(function)(watched))


def _call_collective(
    name: str,
    function: Callable[..., Any],
    current: Callable[[], int | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    rank = current()
    if rank is not None:
        refuse_collective(f"torch.distributed.{name}", rank)
    return function(*args, **kwargs)


def check_trainer(trainer: Any, strategy: Any, *, session: object) -> None:
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
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise SettingError(
                f"{name!r} is a SyncBatchNorm, which needs the activations of all logical ranks at "
                "once: use BatchNorm, GroupNorm or LayerNorm, or train without logical_ranks."
            )
    if has_layer_sync(strategy):
        raise SettingError(
            "sync_batchnorm is True, which needs the activations of all logical ranks at once: "
            "leave it out, or train without logical_ranks."
        )
    if trainer.state.fn != "fit":
        return
    if trainer.accumulate_grad_batches != 1:
        count = trainer.accumulate_grad_batches
        raise SettingError(
            f"accumulate_grad_batches is {count}, and logical ranks accumulate gradients "
            f"themselves: leave it out, and set logical_ranks to "
            f"{strategy.logical_ranks * count} for the same number of samples per step."
        )
    if not module.automatic_optimization:
        raise SettingError(
            f"{type(module).__name__} has automatic_optimization=False, and the steps of logical "
            "ranks are those of Lightning's automatic optimization: use it, or train without "
            "logical_ranks."
        )
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, LBFGS):
            raise SettingError(
                "LBFGS runs the training step several times for one batch, which logical ranks do "
                "not support: use another optimizer, or train without logical_ranks."
            )
