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
    if not distributed.is_available():
        return
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
    watch_functions(patches, current, distributed, ("send", "recv"), "torch.distributed.")
    for name in torch._C._dispatch_get_all_op_names():  # noqa: SLF001 - torch lists them nowhere else
        namespace, _, op = name.partition(".")[0].partition("::")
        if namespace in _NAMESPACES and op not in _LOCAL_OPS:
            title = f"ops.{namespace}.{op}"
            packet = attrgetter(title)(torch)
            for each in (packet, *(getattr(packet, name) for name in packet.overloads())):
                # Both classes look up this function in each call.
                watch_functions(patches, current, each, ["_op"], f"torch.{title}")


def watch_functions(
    patches: AttributePatches,
    current: Callable[[], int | None],
    owner: Any,
    names: Iterable[str],
    title: str,
) -> None:
    """Refuse functions of an owner, or the one that a title names, if a step calls them."""
    for name in names:
        function = getattr(owner, name, None)
        if function is not None:
            full = title + name if title.endswith(".") else title
            patches.replace(owner, name, partial(_call, full, function, current))


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
