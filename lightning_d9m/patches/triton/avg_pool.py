# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202, D417, N803, PLR0913, PLR0917 - Triton's compiler reads these signatures
"""Gradients of average pooling as one launch: each input reads the windows that contain it.

Each window's gradient is divided, and the quotients are added, in the order in which the torch ops
of ``kernels/avg_pool.py`` do so: along the last dimension first.
"""

from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.patches.primitives.pooling_windows import Window, count_adaptive_windows
from lightning_d9m.patches.triton.geometry import (
    divide_float,
    divide_index,
    find_adaptive_window,
    find_block,
    find_coordinates,
    find_strided_window,
    make_zeros,
)
from lightning_d9m.patches.triton.input_gradient import Side, as_divisor, launch_gradient
from lightning_d9m.patches.triton.launch import INT32_LIMIT

_ONE = as_divisor(1)
_NEUTRAL = (1, _ONE, 0, 1)


@triton.jit
def _find_window(
    place,
    rank,
    outputs,
    inputs,
    window,
    ADAPTIVE: tl.constexpr,
    COUNT_PADDING: tl.constexpr,
):
    """Return the window of a given rank around an input, if it contains it, and its length."""
    if ADAPTIVE:
        output, inside = find_adaptive_window(place, rank, outputs, inputs)
        start = divide_index(output * inputs[0], window)
        end = divide_index((output + 1) * inputs[0] + window[0] - 1, window)
    else:
        output, inside = find_strided_window(place, rank, outputs, window, False)  # noqa: FBT003
        start = output * window[1][0] - window[2]
        end = tl.minimum(start + window[0], inputs[0] + window[2])
        if not COUNT_PADDING:
            start = tl.maximum(start, 0)
            end = tl.minimum(end, inputs[0])
    return output, inside, end - start


@triton.jit(do_not_specialize=["sizes", "outputs", "windows", "strides", "divisor", "elements"])
def add_means(
    gradient,
    result,
    sizes,
    outputs,
    windows,
    strides,
    divisor,
    elements,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    DIMS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    COUNT_PADDING: tl.constexpr,
    OVERRIDE: tl.constexpr,
    RANKS_D: tl.constexpr,
    RANKS_H: tl.constexpr,
    RANKS_W: tl.constexpr,
):
    """Write for each input the sum of the shares that it has in the windows that contain it.

    ``launch_gradient`` describes the other arguments.

    Args:
        windows: For each spatial dimension what ``find_strided_window`` takes; of an adaptive
            pooling the number of outputs, as a divisor.
        divisor: The divisor of all windows, if ``OVERRIDE``.
        WIDE: Whether an offset, or the volume of a window, may exceed 32 bits.
        ADAPTIVE: Whether the windows are those of an adaptive pooling.
        COUNT_PADDING: Whether the padding counts as a part of a window.
        OVERRIDE: Whether ``divisor`` replaces the volume of a window.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    batch, channel, depth, height, width = find_coordinates(offsets, sizes, DIMS, CHANNELS_LAST)
    plane = batch * strides[0] + channel * strides[1]
    total = make_zeros(gradient, BLOCK)
    for rank_d in range(RANKS_D):
        d, in_d, size_d = _find_window(
            depth, rank_d, outputs[0], sizes[1], windows[0], ADAPTIVE, COUNT_PADDING
        )
        total_h = make_zeros(gradient, BLOCK)
        for rank_h in range(RANKS_H):
            h, in_h, size_h = _find_window(
                height, rank_h, outputs[1], sizes[2], windows[1], ADAPTIVE, COUNT_PADDING
            )
            total_w = make_zeros(gradient, BLOCK)
            for rank_w in range(RANKS_W):
                w, in_w, size_w = _find_window(
                    width, rank_w, outputs[2], sizes[3], windows[2], ADAPTIVE, COUNT_PADDING
                )
                inside = exists & in_d & in_h & in_w
                place = plane + d * strides[2] + h * strides[3] + w * strides[4]
                share = tl.load(gradient + place, mask=inside, other=0).to(total.dtype)
                if ADAPTIVE:
                    # Dividing by one side after the other rounds as torch's kernels do.
                    if DIMS > 2:  # noqa: PLR2004 - a number of dimensions
                        share = divide_float(share, size_d.to(total.dtype))
                    if DIMS > 1:
                        share = divide_float(share, size_h.to(total.dtype))
                    share = divide_float(share, size_w.to(total.dtype))
                else:
                    volume = size_d * size_h * size_w
                    if OVERRIDE:
                        volume = volume * 0 + divisor
                    share = divide_float(share, volume.to(total.dtype))
                total_w += tl.where(inside, share, 0)
            total_h += total_w
        total += total_h
    tl.store(result + offsets, total.to(result.dtype.element_ty), mask=exists)


def strided(
    grad_output: Tensor,
    self: Tensor,
    windows: Sequence[Window],
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Return the gradient of an average pooling with a fixed stride."""
    sides = [
        Side((one.size, as_divisor(one.stride), one.padding, 1), -(-one.size // one.stride))
        for one in windows
    ]
    return launch_gradient(
        add_means,
        [grad_output],
        self.shape,
        sides,
        neutral=_NEUTRAL,
        memory_format=torch.contiguous_format,
        extra=[divisor_override or 1],
        wide=prod(one.size for one in windows) > INT32_LIMIT,
        ADAPTIVE=False,
        COUNT_PADDING=count_include_pad,
        OVERRIDE=divisor_override is not None,
    )


def adaptive(grad_output: Tensor, self: Tensor, dims: int) -> Tensor:
    """Return the gradient of an adaptive average pooling."""
    sides = [
        Side(as_divisor(outputs), count_adaptive_windows(inputs, outputs))
        for inputs, outputs in zip(self.shape[-dims:], grad_output.shape[-dims:], strict=True)
    ]
    keeps_format = dims == 2  # noqa: PLR2004 - as torch's kernels
    return launch_gradient(
        add_means,
        [grad_output],
        self.shape,
        sides,
        neutral=_ONE,
        memory_format=suggest_memory_format(self) if keeps_format else torch.contiguous_format,
        extra=[1],
        ADAPTIVE=True,
        COUNT_PADDING=False,
        OVERRIDE=False,
    )
