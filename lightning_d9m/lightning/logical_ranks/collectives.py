"""Collectives that a step of a logical rank calls, all of which are refused."""

import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from torch import distributed

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.errors import SettingError

_COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
}
# What each collective of torch calls first. It is looked up again in each call, so that replacing
# it also reaches collectives that the user's module has imported by name.
_FIRST_CALL = "_rank_not_in_group"
# The functional collectives, which return new tensors, and what all of them call before they start.
_FUNCTIONAL = "torch.distributed._functional_collectives"
_FUNCTIONAL_CALLS = ("_resolve_group_name", "_resolve_group")


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
    if not distributed.is_available():
        return
    watch_functions(patches, current, distributed, _COLLECTIVES)
    module = distributed.distributed_c10d
    if first := getattr(module, _FIRST_CALL, None):

        @wraps(first)
        def check_group(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_name  # noqa: SLF001 - no other is as fast
            rank = current()
            if rank is not None and caller in _COLLECTIVES:
                refuse_collective(f"torch.distributed.{caller}", rank)
            return first(*args, **kwargs)

        patches.replace(module, _FIRST_CALL, check_group)
    functional = import_module(_FUNCTIONAL)
    for name in _FUNCTIONAL_CALLS:
        if resolve := getattr(functional, name, None):
            patches.replace(functional, name, _watch_functional(resolve, current))


def _watch_functional(
    resolve: Callable[..., Any], current: Callable[[], int | None]
) -> Callable[..., Any]:
    @wraps(resolve)
    def resolve_group(*args: Any, **kwargs: Any) -> Any:
        rank = current()
        if rank is not None:
            caller = sys._getframe(1).f_code.co_name  # noqa: SLF001 - as above
            refuse_collective(f"{_FUNCTIONAL}.{caller}", rank)
        return resolve(*args, **kwargs)

    return resolve_group


def watch_functions(
    patches: AttributePatches,
    current: Callable[[], int | None],
    module: ModuleType,
    names: set[str],
) -> None:
    """Refuse functions of a module, of those names that it has, if a step calls them."""
    for name in sorted(names):
        function = getattr(module, name, None)
        if function is not None:
            title = f"{module.__name__}.{name}"
            watched = partial(_call, title, function, current)
            patches.replace(module, name, wraps(function)(watched))


def _call(
    title: str,
    function: Callable[..., Any],
    current: Callable[[], int | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    rank = current()
    if rank is not None:
        refuse_collective(title, rank)
    return function(*args, **kwargs)
