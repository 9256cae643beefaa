"""Launch of a kernel that computes an input's gradient, one program for each block of inputs."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
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

_MOST_READS = 128  # by one thread in one launch
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
    """Return a divisor for ``geometry.divide_index``: the number, a factor and a shift.

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

    Every kernel takes these arguments, with its own between ``outputs`` and ``strides``, and before
    ``elements`` and ``RANKS_D``:

    - The tensors: first the gradient of the outputs.
    - ``result``: The gradient of the inputs, dense.
    - ``sizes``: Channels, depth, height and width of the inputs, as divisors.
    - ``outputs``: Depth, height and width of the outputs.
    - The numbers of the sides: a tuple for each of these dimensions.
    - ``strides`` of each tensor: batch, channel, depth, height, width.
    - ``elements``: The number of inputs.
    - ``BLOCK``: The number of inputs of a program.
    - ``WIDE``: Whether an offset may exceed 32 bits.
    - ``DIMS``: The number of spatial dimensions.
    - ``CHANNELS_LAST``: Whether the channels are the result's last dimension in memory.
    - ``RANKS_D``, ``RANKS_H``, ``RANKS_W``: The most outputs that an input reads along depth,
      height and width.

    Args:
        kernel: The Triton kernel.
        tensors: The gradient of the output, and tensors of its shape.
        shape: The shape of the input; from 1 element if there is a batch.
        sides: One for each spatial dimension.
        neutral: The numbers of a dimension of size 1, for dimensions that are not there.
        memory_format: The memory format of the result.
        extra: More numbers, or tensors, that the kernel takes.
        wide: Whether the kernel needs 64 bits for more than offsets and products of two sizes.
        **constants: More compile-time constants of the kernel.
    """
    dims = len(sides)
    # Without a batch torch takes the channels for the batch: seldom, and an order by itself.
    given = memory_format if len(shape) == dims + 2 else torch.contiguous_format
    result = allocate(shape, tensors[0], given)
    if result.numel():
        _launch(
            kernel,
            [view_as_volumes(tensor, dims) for tensor in tensors],
            result,
            shape[-dims - 1 :],
            sides,
            neutral=neutral,
            extra=extra,
            WIDE=wide,
            CHANNELS_LAST=given != torch.contiguous_format,
            **constants,
        )
    return result.contiguous(memory_format=memory_format)


def launch_gradient_of_lines(
    kernel: Any,
    gradient: Tensor,
    sizes: Sequence[int],
    sides: Sequence[Side],
    *,
    neutral: tuple[Any, ...],
    memory_format: torch.memory_format,
    extra: Sequence[Any] = (),
    **constants: Any,
) -> Tensor:
    """Launch a kernel of one gradient, along one dimension after the other if that is faster.

    One launch reads each output once for each input that it contributes to; where few inputs
    contribute to many outputs, such as an edge to its copies, few threads would read them all. The
    sums are the same ones in the same order, so both ways give the same bits.
    The kernel adds the last dimension first; the arguments are as in :func:`launch_gradient`.
    """
    shape = (*gradient.shape[: -len(sizes)], *sizes)
    if prod(side.reads for side in sides) <= _MOST_READS or not prod(shape):
        return launch_gradient(
            kernel,
            [gradient],
            shape,
            sides,
            neutral=neutral,
            memory_format=memory_format,
            extra=extra,
            **constants,
        )
    is_half = gradient.dtype in (torch.float16, torch.bfloat16)
    rows = (gradient.float() if is_half else gradient).contiguous()
    for back in range(1, len(sizes) + 1):
        *outer, outputs = rows.shape[: rows.dim() - back + 1]
        inner = rows.shape[rows.dim() - back + 1 :]
        result = allocate((*outer, sizes[-back], *inner), rows, torch.contiguous_format)
        # The elements behind the dimension are its channels, which come last in memory.
        lines = rows.view(prod(outer), outputs, prod(inner)).movedim(1, 2)
        _launch(
            kernel,
            [view_as_volumes(lines, 1)],
            result,
            (prod(inner), sizes[-back]),
            sides[-back:][:1],
            neutral=neutral,
            extra=extra,
            WIDE=False,
            CHANNELS_LAST=True,
            **constants,
        )
        rows = result
    if rows.dtype == gradient.dtype and memory_format == torch.contiguous_format:
        return rows
    return allocate(shape, gradient, memory_format).copy_(rows)


def _launch(
    kernel: Any,
    volumes: Sequence[Tensor],
    result: Tensor,
    sizes: Sequence[int],
    sides: Sequence[Side],
    *,
    neutral: tuple[Any, ...],
    extra: Sequence[Any] = (),
    **constants: Any,
) -> None:
    missing = 4 - len(sizes)
    channels, *given = sizes
    inputs, outputs = [1] * missing + given, volumes[0].shape[2:]
    reads = [1] * missing + [side.reads for side in sides]
    if result.is_complex():
        volumes = [torch.view_as_real(volume.resolve_conj()) for volume in volumes]
        result = torch.view_as_real(result)
    constants["WIDE"] |= needs_int64(*volumes, result) or any(
        (size + _SLACK) * (other + _SLACK) > INT32_LIMIT
        for size, other in zip(inputs, outputs, strict=True)
    )
    launch_blocks(
        kernel,
        result,
        *volumes,
        result,
        tuple(map(as_divisor, (channels, *inputs))),
        tuple(outputs),
        (*[neutral] * missing, *(side.numbers for side in sides)),
        *(volume.stride()[:5] for volume in volumes),
        *extra,
        DIMS=len(sides),
        RANKS_D=reads[0],
        RANKS_H=reads[1],
        RANKS_W=reads[2],
        **constants,
    )
