"""Gradients of interpolation: each input reads the outputs that it contributed to.

torch's CUDA kernels start one thread per output and add into the inputs with atomics. An
interpolation is separable, so one gather table per dimension suffices. Indices and weights follow
torch's ``UpSample.h`` (plain modes) and ``UpSampleKernel.cpp`` (antialiased modes), in the
precision in which torch computes them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.gather_tables import (
    GatherTable,
    build_gather_table,
    cached_on_device,
    cast_like,
    gather_through,
)
from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype

TableBuilder = Callable[[int, int, bool, float | None, torch.dtype], GatherTable]

CUBIC = -0.75
_CUBIC_ANTIALIASED = -0.5


def build_linear_table(
    input_size: int, output_size: int, align_corners: bool, scale: float | None, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of linear interpolation: two neighbors, weighted by distance."""
    step = _source_step(input_size, output_size, align_corners, scale, dtype)
    source = _sources(output_size, step, align_corners).clamp(min=0)
    left = source.to(torch.int64).clamp(max=input_size - 1)
    right = (left + 1).clamp(max=input_size - 1)
    weight = source - left
    return _collect(
        torch.stack([left, right], dim=1), torch.stack([1 - weight, weight], dim=1), input_size
    )


def build_cubic_table(
    input_size: int, output_size: int, align_corners: bool, scale: float | None, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of cubic convolution: four neighbors, clamped at the border."""
    step = _source_step(input_size, output_size, align_corners, scale, dtype)
    source = _sources(output_size, step, align_corners)
    base = source.floor()
    after = source - base
    before = 1 - after
    weights = [
        weigh_cubic_outer(after + 1, CUBIC),
        weigh_cubic_inner(after, CUBIC),
        weigh_cubic_inner(before, CUBIC),
        weigh_cubic_outer(before + 1, CUBIC),
    ]
    taps = base.to(torch.int64)[:, None] + torch.arange(-1, 3, device="cpu")
    return _collect(taps.clamp(0, input_size - 1), torch.stack(weights, dim=1), input_size)


def build_triangle_table(
    input_size: int, output_size: int, align_corners: bool, scale: float | None, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of an antialiasing triangle filter."""
    step = _source_step(input_size, output_size, align_corners, scale, dtype)
    return _build_filter_table(input_size, output_size, step, 2, lambda x: (1 - x).clamp(min=0))


def build_keys_table(
    input_size: int, output_size: int, align_corners: bool, scale: float | None, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of an antialiasing cubic filter (Keys, a = -0.5)."""

    def weigh(distance: Tensor) -> Tensor:
        outer = weigh_cubic_outer(distance, _CUBIC_ANTIALIASED)
        outer = torch.where(distance < 2, outer, torch.zeros_like(outer))  # noqa: PLR2004 - the filter's support
        return torch.where(distance < 1, weigh_cubic_inner(distance, _CUBIC_ANTIALIASED), outer)

    step = _source_step(input_size, output_size, align_corners, scale, dtype)
    return _build_filter_table(input_size, output_size, step, 4, weigh)


def build_lanczos_table(
    input_size: int, output_size: int, align_corners: bool, scale: float | None, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of an antialiasing Lanczos filter with three lobes."""
    lobes = 3

    def weigh(distance: Tensor) -> Tensor:
        weight = torch.sinc(distance) * torch.sinc(distance / lobes)
        return torch.where(distance < lobes, weight, torch.zeros_like(weight))

    step = _source_step(input_size, output_size, align_corners, scale, dtype)
    return _build_filter_table(input_size, output_size, step, 2 * lobes, weigh)


def _source_step(
    input_size: int,
    output_size: int,
    align_corners: bool,
    scale: float | None,
    dtype: torch.dtype,
) -> Tensor:
    if align_corners:
        step = (input_size - 1) / (output_size - 1) if output_size > 1 else 0.0
    else:
        step = 1 / scale if scale is not None and scale > 0 else input_size / output_size
    return torch.tensor(step, dtype=dtype, device="cpu")


def _sources(output_size: int, step: Tensor, align_corners: bool) -> Tensor:
    outputs = torch.arange(output_size, dtype=step.dtype, device="cpu")
    return outputs * step if align_corners else (outputs + 0.5) * step - 0.5


def _collect(inputs: Tensor, weights: Tensor, input_size: int) -> GatherTable:
    outputs = torch.arange(len(inputs), device="cpu")[:, None].expand_as(inputs)
    return build_gather_table(
        inputs.flatten(), outputs.flatten(), input_size, weight=weights.flatten()
    )


def _build_filter_table(
    input_size: int,
    output_size: int,
    step: Tensor,
    taps: int,
    weigh: Callable[[Tensor], Tensor],
) -> GatherTable:
    shrink = step.clamp(min=1)  # the filter widens where the image shrinks
    support = taps / 2 * shrink
    centers = (torch.arange(output_size, dtype=step.dtype, device="cpu") + 0.5) * step
    # Conversion to an integer truncates toward zero, as in C++.
    starts = (centers - support + 0.5).to(torch.int64).clamp(min=0)
    ends = (centers + support + 0.5).to(torch.int64).clamp(max=input_size)
    width = ceil(float(support)) * 2 + 1
    inputs = starts[:, None] + torch.arange(width, device="cpu")
    inside = inputs < ends[:, None]
    weights = weigh(((inputs - centers[:, None] + 0.5) / shrink).abs())
    weights = torch.where(inside, weights, torch.zeros_like(weights))
    weights = weights / weights.sum(dim=1, keepdim=True)
    outputs = torch.arange(output_size, device="cpu")[:, None].expand_as(inputs)
    return build_gather_table(inputs[inside], outputs[inside], input_size, weight=weights[inside])


def weigh_cubic_inner(distance: Tensor, a: float) -> Tensor:
    """Return the weight of cubic convolution at a distance of 0 to 1."""
    return ((a + 2) * distance - (a + 3)) * distance * distance + 1


def weigh_cubic_outer(distance: Tensor, a: float) -> Tensor:
    """Return the weight of cubic convolution at a distance of 1 to 2."""
    return ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a


def _differentiate(
    original: Original,
    grad_output: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    dims: int,
    build: TableBuilder,
    keep_format: bool = False,
) -> Tensor:
    """Return the gradient of an interpolation with respect to its input.

    Args:
        original: Torch's kernel.
        grad_output: Of shape ``[batch, channels, *output_size]``.
        output_size: Sizes of the spatial dimensions.
        input_size: Sizes of all dimensions.
        align_corners: As in ``torch.nn.functional.interpolate``.
        *scales: One for each spatial dimension; in torch's schema the last, optional arguments.
        dims: Number of spatial dimensions.
        build: Builds the gather table of one dimension.
        keep_format: Whether torch's kernel keeps the channels_last memory format.
    """
    scales = (*scales, *[None] * (dims - len(scales)))
    if (
        len(input_size) != dims + 2
        or len(output_size) != dims
        or list(grad_output.shape) != [*input_size[:2], *output_size]
        or not grad_output.is_floating_point()
        or min(*input_size[1:], *grad_output.shape[1:]) < 1
    ):
        raise_as_original(original, grad_output, output_size, input_size, align_corners, *scales)
    dtype = accumulation_dtype(grad_output.dtype)
    tables = [
        cached_on_device(grad_output.device, build, *side, align_corners, scale, dtype)
        for *side, scale in zip(input_size[2:], output_size, scales, strict=True)
    ]
    return cast_like(gather_through(grad_output, tables), grad_output, keep_format=keep_format)


linear1d_backward = partial(_differentiate, dims=1, build=build_linear_table)
bilinear2d_backward = partial(_differentiate, dims=2, build=build_linear_table, keep_format=True)
trilinear3d_backward = partial(_differentiate, dims=3, build=build_linear_table, keep_format=True)
bicubic2d_backward = partial(_differentiate, dims=2, build=build_cubic_table)
bilinear2d_aa_backward = partial(
    _differentiate, dims=2, build=build_triangle_table, keep_format=True
)
bicubic2d_aa_backward = partial(_differentiate, dims=2, build=build_keys_table)
lanczos2d_aa_backward = partial(_differentiate, dims=2, build=build_lanczos_table)
