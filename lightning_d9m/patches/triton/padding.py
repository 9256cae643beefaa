# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0917 - Triton's compiler reads these signatures
"""Gradients of padding: each input reads its copies.

They are added as by the torch ops of ``kernels/padding.py``: along the last dimension first. Of a
reflection, the middle and the copy before it come first, in any order, then the copy behind it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9m.patches.triton.geometry import find_block, find_coordinates, make_zeros
from lightning_d9m.patches.triton.input_gradient import (
    Side,
    launch_gradient,
    launch_gradient_of_lines,
)


@triton.jit
def _find_copy(place, rank, outputs, inputs, numbers, REFLECTED: tl.constexpr):
    """Return the output that is an input's copy of a given rank, and whether there is one."""
    left = numbers[0]
    if REFLECTED:
        output = place + left
        before = left - place
        behind = left + 2 * (inputs - 1) - place
        output = tl.where(rank == 0, output, tl.where(rank == 1, before, behind))
        inside = (rank == 0) | ((rank == 1) & (place > 0)) | ((rank == 2) & (place < inputs - 1))  # noqa: PLR2004 - a rank
        inside = inside & (output >= 0) & (output < outputs)
    else:
        output = tl.where(place == 0, 0, tl.maximum(place + left, 0)) + rank
        last = tl.where(place == inputs - 1, outputs - 1, tl.minimum(place + left, outputs - 1))
        inside = output <= last
    return output, inside


@triton.jit(do_not_specialize=["sizes", "outputs", "sides", "strides", "elements"])
def add_copies(
    gradient,
    result,
    sizes,
    outputs,
    sides,
    strides,
    elements,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    DIMS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    REFLECTED: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS_D: tl.constexpr,
    RANKS_H: tl.constexpr,
    RANKS_W: tl.constexpr,
):
    """Write for each input the sum of the gradients of its copies.

    ``launch_gradient`` describes the other arguments.
    ``elements`` is the number of inputs, times ``PARTS``: 2 for complex numbers, else 1.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    places = offsets // PARTS
    batch, channel, depth, height, width = find_coordinates(places, sizes, DIMS, CHANNELS_LAST)
    plane = batch * strides[0] + channel * strides[1] + offsets % PARTS
    total = make_zeros(gradient, BLOCK)
    for rank_d in range(RANKS_D):
        d, in_d = _find_copy(depth, rank_d, outputs[0], sizes[1][0], sides[0], REFLECTED)
        total_h = make_zeros(gradient, BLOCK)
        for rank_h in range(RANKS_H):
            h, in_h = _find_copy(height, rank_h, outputs[1], sizes[2][0], sides[1], REFLECTED)
            total_w = make_zeros(gradient, BLOCK)
            for rank_w in range(RANKS_W):
                w, in_w = _find_copy(width, rank_w, outputs[2], sizes[3][0], sides[2], REFLECTED)
                place = plane + d * strides[2] + h * strides[3] + w * strides[4]
                inside = exists & in_d & in_h & in_w
                total_w += tl.load(gradient + place, mask=inside, other=0).to(total.dtype)
            total_h += total_w
        total += total_h
    tl.store(result + offsets, total.to(result.dtype.element_ty), mask=exists)


def reflected(grad_output: Tensor, self: Tensor, paddings: Sequence[tuple[int, int]]) -> Tensor:
    """Return the gradient of padding by reflection."""
    sides = [Side((left,), 3 if max(left, right) > 0 else 1) for left, right in paddings]
    return launch_gradient(
        add_copies,
        [grad_output],
        self.shape,
        sides,
        neutral=(0,),
        memory_format=torch.contiguous_format,
        REFLECTED=True,
        PARTS=1 + self.is_complex(),
    )


def replicated(grad_output: Tensor, self: Tensor, paddings: Sequence[tuple[int, int]]) -> Tensor:
    """Return the gradient of padding with copies of the edges."""
    sizes = self.shape[-len(paddings) :]
    sides = []
    for size, (left, right) in zip(sizes, paddings, strict=True):
        outputs = left + size + right
        # An input that is alone, or from which the padding cuts off all others, has all copies.
        has_all = size == 1 or left + size <= 1
        sides.append(Side((left,), outputs if has_all else max(left + 1, right + 1, 1)))
    return launch_gradient_of_lines(
        add_copies,
        grad_output,
        sizes,
        sides,
        neutral=(0,),
        memory_format=torch.contiguous_format,
        REFLECTED=False,
        PARTS=1 + self.is_complex(),
    )
