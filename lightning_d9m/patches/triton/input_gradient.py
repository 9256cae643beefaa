"""Launch of a kernel that computes an input's gradient, one program for each block of inputs."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9m.patches.triton.launch import (
    INT32_LIMIT,
    allocate,
    launch_blocks,
    needs_int64,
    view_as_volumes,
)

_SLACK = 8  # by which a kernel may pass a size when it multiplies two of them


class Side(NamedTuple):
    """The numbers that describe one spatial dimension to a kernel.

    Attributes:
        numbers: Numbers that the kernel takes.
        reads: The most outputs that read one input.
    """

    numbers: tuple[Any, ...]
    reads: int


@lru_cache(4096)
def as_divisor(number: int) -> tuple[int, int, int]:
    """Return a divisor for ``geometry.divide``: the number, a factor and a shift.

    For ``0 <= n < 2**31`` and ``0 < number < 2**31`` the quotient is ``n * factor >> shift``
    (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994). The
    factor has 32 bits; it is given as the signed number with the same bits.
    """
    shift = 31 + (number - 1).bit_length()
    factor = -(-(1 << shift) // number)
    return number, factor - (factor >> 31 << 32), shift


def launch_gradient(
    kernel: Any,
    tensors: Sequence[Tensor],
    shape: Sequence[int],
    sides: Sequence[Side],
    *,
    neutral: tuple[Any, ...],
    memory_format: torch.memory_format,
    extra: Sequence[Any] = (),
    wide: bool = False,
    **constants: Any,
) -> Tensor:
    """Launch a kernel that writes the gradient of an input.

    The kernel takes the tensors, the result, the sizes of the input (channels, depth, height,
    width; as divisors), the sizes of the output (depth, height, width), the numbers of the sides (a
    tuple for each of these), the strides of each tensor (of five dimensions), more numbers, and the
    number of inputs.

    Args:
        kernel: The Triton kernel.
        tensors: The gradient of the output, and tensors of its shape.
        shape: The shape of the input; from 1 element if there is a batch.
        sides: One for each spatial dimension.
        neutral: The numbers of a dimension of size 1, for dimensions that are not there.
        memory_format: The memory format of the result.
        extra: More numbers that the kernel takes.
        wide: Whether the kernel needs 64 bits for more than offsets and products of two sizes.
        **constants: More compile-time constants of the kernel.
    """
    dims, first = len(sides), tensors[0]
    # Without a batch torch takes the channels for the batch: seldom, and an order by itself.
    given = memory_format if len(shape) == dims + 2 else torch.contiguous_format
    result = allocate(shape, first, given)
    if not result.numel():
        return result
    volumes = [view_as_volumes(tensor, dims) for tensor in tensors]
    missing = 3 - dims
    inputs, outputs = [1] * missing + list(shape[-dims:]), volumes[0].shape[2:]
    wide = (
        wide
        or needs_int64(*tensors, result)
        or any(
            (size + _SLACK) * (other + _SLACK) > INT32_LIMIT
            for size, other in zip(inputs, outputs, strict=True)
        )
    )
    reads = [1] * missing + [side.reads for side in sides]
    launch_blocks(
        kernel,
        result,
        *volumes,
        result,
        tuple(map(as_divisor, (shape[-dims - 1], *inputs))),
        tuple(outputs),
        (*[neutral] * missing, *(side.numbers for side in sides)),
        *(volume.stride() for volume in volumes),
        *extra,
        WIDE=wide,
        DIMS=dims,
        CHANNELS_LAST=given != torch.contiguous_format,
        RANKS_D=reads[0],
        RANKS_H=reads[1],
        RANKS_W=reads[2],
        **constants,
    )
    return result.contiguous(memory_format=memory_format)
