"""Gradients of ops whose forward pass is a fixed weighted sum along each dimension, as gathers.

Average pooling and interpolation send each input to a few neighboring outputs. Their gradient,
usually a scatter with atomics, is then a gather: each input reads the outputs it went to, in
ascending order. A gather table lists these outputs for one dimension. ``embedding_bag`` in mode
sum reads them: one thread adds each run from left to right and touches the listed elements only,
so an infinity or a NaN does not spread (in a matrix product it would meet the zeros).
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.errors import D9mError
from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype, sum_bags


class GatherTable(NamedTuple):
    """For each input along one dimension, the outputs it contributed to.

    Attributes:
        outputs: The outputs of input 0, of input 1, ...; int64 of shape ``[entries]``.
        offsets: Start of each input's run in ``outputs``; int64 of shape ``[inputs]``.
        weight: The factor of each entry, or None if all are 1; shape ``[entries]``.
        divisor: The divisor of each output's mean, or None; int64 of shape ``[outputs]``.
    """

    outputs: Tensor
    offsets: Tensor
    weight: Tensor | None = None
    divisor: Tensor | None = None


@cache
def cached_on_device(
    device: torch.device, build: Callable[..., GatherTable], *sizes: Hashable
) -> GatherTable:
    """Build a table on the host, once for each set of sizes, and copy it to a device.

    Sizes seldom change during a training, so a layer pays for this at its first step only. Nothing
    is evicted: a table is only as long as a side, a CUDA graph reads the memory at each replay, and
    other streams may still read it.

    Raises:
        D9mError: A CUDA graph is being captured, of which the copy from the host cannot be a part.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise D9mError(
            "A CUDA graph is being captured, and a deterministic replacement has to copy a table "
            f"for the sizes {sizes} to {device} first. Run the same step once before the capture."
        )
    parts = build(*sizes)
    return GatherTable._make(None if part is None else part.to(device) for part in parts)


def build_gather_table(
    inputs: Tensor,
    outputs: Tensor,
    input_size: int,
    *,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
) -> GatherTable:
    """Turn a list of contributions into a gather table.

    Args:
        inputs: The input of each contribution, int64 of shape ``[entries]``.
        outputs: Its output, ascending, int64 of shape ``[entries]``.
        input_size: Number of inputs.
        weight: The factor of each contribution; shape ``[entries]``.
        divisor: The divisor of each output's mean; shape ``[outputs]``.
    """
    sorted_inputs, order = torch.sort(inputs, stable=True)
    bounds = torch.arange(input_size, dtype=torch.int64, device="cpu")
    offsets = torch.searchsorted(sorted_inputs, bounds)
    return GatherTable(outputs[order], offsets, None if weight is None else weight[order], divisor)


def gather_through(gradient: Tensor, tables: Sequence[GatherTable]) -> Tensor:
    """Propagate a gradient from the outputs back to the inputs, along the last dimensions.

    Args:
        gradient: Real or complex, of shape ``[..., *outputs]``.
        tables: One for each of the last dimensions.

    Returns:
        The gradient of shape ``[..., *inputs]``, not necessarily contiguous; half and bfloat16 are
        returned as float32. Each input is a sum in ascending order of the outputs, last dimension
        first.
    """
    if gradient.is_complex():
        parts = (gather_through(part, tables) for part in (gradient.real, gradient.imag))
        return torch.complex(*parts)
    result = gradient
    dtype = accumulation_dtype(gradient.dtype)
    if not gradient.numel():
        inputs = [len(table.offsets) for table in tables]
        return gradient.new_zeros((*gradient.shape[: -len(tables)], *inputs))
    for dim in range(-1, -len(tables) - 1, -1):
        table = tables[dim]
        rows = result.movedim(dim, 0)
        # One copy both converts the dtype and makes each row contiguous.
        copied = torch.empty(rows.shape, dtype=dtype, device=rows.device).copy_(rows)
        sums = sum_bags(copied.flatten(1), table.outputs, table.offsets, table.weight)
        result = sums.view(-1, *rows.shape[1:]).movedim(0, dim)
    return result


def cast_like(result: Tensor, like: Tensor, *, keep_format: bool) -> Tensor:
    """Return a result in the dtype of a tensor, contiguous or in that tensor's memory format."""
    memory_format = suggest_memory_format(like) if keep_format else torch.contiguous_format
    return torch.empty(
        result.shape, dtype=like.dtype, device=like.device, memory_format=memory_format
    ).copy_(result)
