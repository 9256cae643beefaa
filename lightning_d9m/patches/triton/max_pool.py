# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202, D417, N803, PLR0913, PLR0917 - Triton's compiler reads these signatures
"""Gradients of max pooling as one launch: each input reads the windows that may have chosen it.

The windows of an input are computed from its coordinates and visited in ascending order, as the
torch ops of ``kernels/max_pool.py`` visit them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.patches.primitives.pooling_windows import Window, count_adaptive_windows
from lightning_d9m.patches.triton.geometry import (
    find_adaptive_window,
    find_block,
    find_coordinates,
    find_fractional_window,
    find_strided_window,
    make_zeros,
)
from lightning_d9m.patches.triton.input_gradient import Side, as_divisor, launch_gradient

_ONE = as_divisor(1)
_NEUTRAL = (1, _ONE, 0, 1)
STRIDED, ADAPTIVE, FRACTIONAL = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def _find_window(place, rank, outputs, inputs, window, KIND: tl.constexpr, DILATED: tl.constexpr):
    if KIND == STRIDED:
        found = find_strided_window(place, rank, outputs, window, DILATED)
    elif KIND == ADAPTIVE:
        found = find_adaptive_window(place, rank, outputs, inputs)
    else:
        found = find_fractional_window(place, rank, outputs, window)
    return found


@triton.jit(
    do_not_specialize=["sizes", "outputs", "windows", "strides", "index_strides", "elements"]
)
def add_chosen(
    gradient,
    indices,
    result,
    sizes,
    outputs,
    windows,
    strides,
    index_strides,
    elements,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    DIMS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    KIND: tl.constexpr,
    DILATED: tl.constexpr,
    RANKS_D: tl.constexpr,
    RANKS_H: tl.constexpr,
    RANKS_W: tl.constexpr,
):
    """Write for each input the sum of the gradients of the windows whose index names it.

    ``launch_gradient`` describes the other arguments.

    Args:
        indices: For each output the flat position of the chosen input in its plane; int64.
        windows: For each spatial dimension what the functions of geometry.py take.
        index_strides: Of ``indices``.
        KIND: The kind of pooling.
        DILATED: Whether windows of a fixed stride are dilated.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    batch, channel, depth, height, width = find_coordinates(offsets, sizes, DIMS, CHANNELS_LAST)
    wanted = ((depth * sizes[2][0] + height) * sizes[3][0] + width).to(tl.int64)
    plane = batch * strides[0] + channel * strides[1]
    index_plane = batch * index_strides[0] + channel * index_strides[1]
    total = make_zeros(gradient, BLOCK)
    for rank_d in range(RANKS_D):
        d, in_d = _find_window(depth, rank_d, outputs[0], sizes[1], windows[0], KIND, DILATED)
        for rank_h in range(RANKS_H):
            h, in_h = _find_window(height, rank_h, outputs[1], sizes[2], windows[1], KIND, DILATED)
            for rank_w in range(RANKS_W):
                w, in_w = _find_window(
                    width, rank_w, outputs[2], sizes[3], windows[2], KIND, DILATED
                )
                place = d * index_strides[2] + h * index_strides[3] + w * index_strides[4]
                inside = exists & in_d & in_h & in_w
                chosen = tl.load(indices + (index_plane + place), mask=inside, other=-1)
                place = plane + d * strides[2] + h * strides[3] + w * strides[4]
                total += tl.load(gradient + place, mask=chosen == wanted, other=0).to(total.dtype)
    tl.store(result + offsets, total.to(result.dtype.element_ty), mask=exists)


def strided(
    grad_output: Tensor, self: Tensor, indices: Tensor, windows: Sequence[Window]
) -> Tensor:
    """Return the gradient of a max pooling with a fixed stride."""
    dilated = any(window.dilation > 1 for window in windows)
    sides = [
        Side(
            (one.size, as_divisor(one.stride), one.padding, one.dilation),
            one.size if dilated else -(-one.size // one.stride),
        )
        for one in windows
    ]
    return _launch(grad_output, self, indices, sides, STRIDED, dilated=dilated)


def adaptive(grad_output: Tensor, self: Tensor, indices: Tensor, dims: int) -> Tensor:
    """Return the gradient of an adaptive max pooling."""
    sides = [
        Side(_NEUTRAL, count_adaptive_windows(*sizes))
        for sizes in zip(self.shape[-dims:], grad_output.shape[-dims:], strict=True)
    ]
    keeps_format = dims == 2  # noqa: PLR2004 - as torch's kernels
    return _launch(grad_output, self, indices, sides, ADAPTIVE, keeps_format=keeps_format)


def fractional(
    grad_output: Tensor, self: Tensor, indices: Tensor, kernel_size: Sequence[int]
) -> Tensor:
    """Return the gradient of a fractional max pooling."""
    dims = len(kernel_size)
    sides = []
    for inputs, outputs, size in zip(
        self.shape[-dims:], grad_output.shape[-dims:], kernel_size, strict=True
    ):
        span = max(inputs - size, 1)
        # A window that contains an input starts near one of size + 4 neighbors.
        reads = (size + 3) * (outputs - 1) // span + 1
        sides.append(Side((size, as_divisor(span), 0, 1), reads))
    return _launch(grad_output, self, indices, sides, FRACTIONAL, keeps_format=False)


def _launch(
    grad_output: Tensor,
    self: Tensor,
    indices: Tensor,
    sides: Sequence[Side],
    kind: tl.constexpr,
    *,
    dilated: bool = False,
    keeps_format: bool = True,
) -> Tensor:
    return launch_gradient(
        add_chosen,
        [grad_output, indices],
        self.shape,
        sides,
        neutral=_NEUTRAL,
        memory_format=suggest_memory_format(self) if keeps_format else torch.contiguous_format,
        KIND=kind,
        DILATED=dilated,
    )
