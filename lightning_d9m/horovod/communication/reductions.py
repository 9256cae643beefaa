"""Lightning's collectives: reductions in rank order, and a gather that carries gradients."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.communication.communicator import Communicator


def reduce_over_ranks(tensor: Tensor, reduce_op: Any, communicator: Communicator) -> Tensor:
    """Reduce a tensor over all ranks, in rank order.

    It has the same shape and dtype on every rank. ``reduce_op`` is a name or a
    ``torch.distributed.ReduceOp``; None is the sum.
    """
    given = "sum" if reduce_op is None else reduce_op
    name = (given if isinstance(given, str) else given.name).lower()
    return _combine(communicator.gather_equal(tensor, f"{name}-reduction").unbind(), name)


def gather_with_gradients(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Stack every rank's tensor to (world, ...) and propagate gradients."""
    return cast(Tensor, _Gather.apply(tensor, communicator))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """`all_gather` whose gradient is the sum of all ranks' gradients of this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return communicator.gather_equal(tensor, "all_gather")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        communicator: Communicator = ctx.communicator
        gathered = communicator.gather_equal(gradients[0], "the gradient of all_gather")
        return _combine([part[communicator.rank] for part in gathered.unbind()], "sum"), None


def _combine(parts: Sequence[Tensor], name: str) -> Tensor:
    """Reduce tensors in the given order."""
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
    """Raise unless the group is None."""
    if group is not None:
        raise SettingError(
            f"group={group!r} is not supported: this strategy has one group, all ranks. Pass None."
        )
