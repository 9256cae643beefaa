"""Lightning's collectives on our wire: reductions in rank order, gathering with gradients."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.communicator import Communicator


def reduce_over_ranks(tensor: Tensor, reduce_op: Any, wire: Communicator) -> Tensor:
    """Reduce a tensor over all ranks, in rank order.

    Args:
        tensor: The same shape and dtype on every rank.
        reduce_op: A name or a ``torch.distributed.ReduceOp``; None is the sum.
        wire: What crosses the ranks.
    """
    given = "sum" if reduce_op is None else reduce_op
    name = (given if isinstance(given, str) else given.name).lower()
    return _combine(wire.gather_equal(tensor, f"{name}-reduction").unbind(), name)


def gather_with_gradients(tensor: Tensor, wire: Communicator) -> Tensor:
    """Stack every rank's tensor to (world, ...) and carry gradients back."""
    return cast(Tensor, _Gather.apply(tensor, wire))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """`all_gather` whose gradient is the sum of what all ranks sent back for this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wire: Communicator) -> Tensor:
        ctx.wire = wire
        return wire.gather_equal(tensor, "all_gather")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        wire: Communicator = ctx.wire
        everyone = wire.gather_equal(gradients[0], "the gradient of all_gather")
        return _combine([part[wire.rank] for part in everyone.unbind()], "sum"), None


def _combine(parts: Sequence[Tensor], name: str) -> Tensor:
    """Reduce tensors in the order in which they are given."""
    result: Tensor = parts[0]
    for part in parts[1:]:
        if name in {"mean", "avg", "sum"}:
            result = result + part
        elif name == "product":
            result = result * part
        elif name == "max":
            result = torch.maximum(result, part)
        elif name == "min":
            result = torch.minimum(result, part)
        else:
            raise SettingError(
                f"reduce_op={name!r} is not known: pass 'mean', 'sum', 'min', 'max' or 'product'."
            )
    return (result / len(parts)).to(parts[0].dtype) if name in {"mean", "avg"} else result


def refuse_group(group: Any) -> None:
    """Refuse a group of ranks."""
    if group is not None:
        raise SettingError(f"group={group!r}: this strategy knows one group, all ranks. Pass None.")
