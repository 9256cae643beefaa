# ruff: noqa: N803 - constants of a kernel
"""A kernel that writes the coordinates that other kernels compute."""

import triton
import triton.language as tl

from lightning_d9m.patches.triton.geometry import find_coordinates


@triton.jit
def write_coordinates(
    result, first, sizes, DIMS: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Write batch, channel, depth, height and width of the offsets from ``first`` on."""
    offsets = first + tl.arange(0, BLOCK)
    batch, channel, depth, height, width = find_coordinates(offsets, sizes, DIMS, CHANNELS_LAST)
    places = tl.arange(0, BLOCK) * 5
    tl.store(result + places, batch)
    tl.store(result + places + 1, channel)
    tl.store(result + places + 2, depth)
    tl.store(result + places + 3, height)
    tl.store(result + places + 4, width)
