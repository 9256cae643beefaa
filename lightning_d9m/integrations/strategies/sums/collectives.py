"""Collectives of logical ranks: those in a step are refused, and tensors of any layout are sent."""

import sys
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map_only

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.engine.ranks.groups import broadcast_tensors
from lightning_d9m.engine.state.parts import TENSOR
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
    module: Any = distributed.distributed_c10d
    first = getattr(module, _FIRST_CALL)

    @wraps(first)
    def check_group(*args: Any, **kwargs: Any) -> Any:
        rank = current()
        if rank is not None:
            caller = sys._getframe(1).f_code.co_name  # noqa: SLF001 - no other is as fast
            # `get_rank` and `get_world_size` communicate with nobody, and many programs call them
            # in a step, for example to print on rank 0 alone.
            if not caller.startswith(_QUERIES):
                refuse_collective(f"torch.distributed.{caller}", rank)
        return first(*args, **kwargs)

    # The private function is replaced, and not each collective: `from torch.distributed import
    # all_reduce` in the program has made a name that no replacement of the module would reach.
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


@torch.no_grad()
def send_tensors(tensors: list[Tensor], processes: Any) -> None:
    """Overwrite tensors with those of process 0, also sparse and expanded ones."""
    # A single process has no process group, in which a broadcast would fail.
    if processes.world_size == 1:
        return
    dense: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in tensors:
        is_expanded = tensor.layout is torch.strided and tensor.numel() > 1 and 0 in tensor.stride()
        (dense if tensor.layout is torch.strided and not is_expanded else others).append(tensor)
    if dense:
        # The usual case: one message for all dense tensors of a device.
        broadcast_tensors(dense)
    if others:
        for tensor, first in zip(others, processes.gather_values(others)[0], strict=True):
            # Only where it differs: torch refuses to write to a tensor of which several elements
            # have one address.
            if not TENSOR.matches(tensor, moved := first.to(tensor.device)):
                TENSOR.write(tensor, moved)


def move_tensors(value: Any, module: nn.Module) -> Any:
    """Return a value whose tensors are on the device of a module, if that is an accelerator."""
    device: Any = getattr(module, "device", torch.device("cpu"))
    # The value itself, and not a copy: `tree_map_only` would make new lists and dicts, and the
    # program may have kept a reference to its own.
    if device.type == "cpu":
        return value
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
