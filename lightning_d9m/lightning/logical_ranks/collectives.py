"""Collectives that a step of a logical rank calls, all of which are refused."""

import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from operator import attrgetter
from typing import Any, NoReturn

import torch
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
    if not distributed.is_available():
        return
    watch_functions(patches, current, distributed, _COLLECTIVES, "torch.distributed.")
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
    for name in torch._C._dispatch_get_all_op_names():  # noqa: SLF001 - torch lists them nowhere else
        namespace, _, op = name.partition(".")[0].partition("::")
        if namespace in _NAMESPACES and op not in _LOCAL_OPS:
            _watch_op(patches, current, f"torch.ops.{namespace}.{op}")


def _watch_op(patches: AttributePatches, current: Callable[[], int | None], title: str) -> None:
    """Refuse an op, called with or without the name of its overload."""
    packet = attrgetter(title.removeprefix("torch."))(torch)
    for op in (packet, *(getattr(packet, name) for name in packet.overloads())):
        # Both classes look up this function in each call.
        if function := getattr(op, "_op", None):
            patches.replace(op, "_op", partial(_call, title, function, current))


def watch_functions(
    patches: AttributePatches,
    current: Callable[[], int | None],
    owner: object,
    names: Iterable[str],
    prefix: str = "",
) -> None:
    """Refuse functions or methods, of those names that the owner has, if a step calls them."""
    for name in sorted(names):
        function = getattr(owner, name, None)
        if function is not None:
            watched = partial(_call, prefix + name, function, current)
            patches.replace(owner, name, wraps(function)(watched))


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
