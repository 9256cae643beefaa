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
from torch._prims_common import suggest_memory_format

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.gather_tables import (
    GatherTable,
    build_gather_table,
    cached_on_device,
    gather_through,
)
from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype
from lightning_d9m.patches.triton.launch import run_kernel

TableBuilder = Callable[[int, int, bool, float, torch.dtype], GatherTable]

CUBIC = -0.75
_CUBIC_ANTIALIASED = -0.5


def build_linear_table(
    input_size: int, output_size: int, align_corners: bool, step: float, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of linear interpolation: two neighbors, weighted by distance."""
    source = _sources(output_size, step, align_corners, dtype).clamp(min=0)
    left = source.to(torch.int64).clamp(max=input_size - 1)
    right = (left + 1).clamp(max=input_size - 1)
    weight = source - left
    return _collect(
        torch.stack([left, right], dim=1), torch.stack([1 - weight, weight], dim=1), input_size
    )


def build_cubic_table(
    input_size: int, output_size: int, align_corners: bool, step: float, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of cubic convolution: four neighbors, clamped at the border."""
    source = _sources(output_size, step, align_corners, dtype)
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
    input_size: int, output_size: int, _align_corners: bool, step: float, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of an antialiasing triangle filter."""
    return _build_filter_table(
        input_size, output_size, step, dtype, 2, lambda x: (1 - x).clamp(min=0)
    )


def build_keys_table(
    input_size: int, output_size: int, _align_corners: bool, step: float, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of an antialiasing cubic filter (Keys, a = -0.5)."""

    def weigh(distance: Tensor) -> Tensor:
        outer = weigh_cubic_outer(distance, _CUBIC_ANTIALIASED)
        outer = torch.where(distance < 2, outer, torch.zeros_like(outer))  # noqa: PLR2004 - the filter's support
        return torch.where(distance < 1, weigh_cubic_inner(distance, _CUBIC_ANTIALIASED), outer)

    return _build_filter_table(input_size, output_size, step, dtype, 4, weigh)


def build_lanczos_table(
    input_size: int, output_size: int, _align_corners: bool, step: float, dtype: torch.dtype
) -> GatherTable:
    """Return the gather table of an antialiasing Lanczos filter with three lobes."""
    lobes = 3

    def weigh(distance: Tensor) -> Tensor:
        weight = torch.sinc(distance) * torch.sinc(distance / lobes)
        return torch.where(distance < lobes, weight, torch.zeros_like(weight))

    return _build_filter_table(input_size, output_size, step, dtype, 2 * lobes, weigh)


def _find_step(
    input_size: int, output_size: int, align_corners: bool, scale: float | None
) -> float:
    """Return the distance of two outputs, in inputs."""
    if align_corners:
        return (input_size - 1) / (output_size - 1) if output_size > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else input_size / output_size


def _sources(output_size: int, step: float, align_corners: bool, dtype: torch.dtype) -> Tensor:
    outputs = torch.arange(output_size, dtype=dtype, device="cpu")
    distance = torch.tensor(step, dtype=dtype, device="cpu")
    return outputs * distance if align_corners else (outputs + 0.5) * distance - 0.5


def _collect(inputs: Tensor, weights: Tensor, input_size: int) -> GatherTable:
    outputs = torch.arange(len(inputs), device="cpu")[:, None].expand_as(inputs)
    return build_gather_table(
        inputs.flatten(), outputs.flatten(), input_size, weight=weights.flatten()
    )


def _build_filter_table(
    input_size: int,
    output_size: int,
    step: float,
    dtype: torch.dtype,
    taps: int,
    weigh: Callable[[Tensor], Tensor],
) -> GatherTable:
    distance = torch.tensor(step, dtype=dtype, device="cpu")
    shrink = distance.clamp(min=1)  # the filter widens where the image shrinks
    support = taps / 2 * shrink
    centers = (torch.arange(output_size, dtype=dtype, device="cpu") + 0.5) * distance
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
    mode: str,
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
        mode: The name of the weights.
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
    sizes = zip(input_size[2:], output_size, scales, strict=True)
    steps = [_find_step(size, outputs, align_corners, scale) for size, outputs, scale in sizes]
    memory_format = suggest_memory_format(grad_output) if keep_format else torch.contiguous_format
    return run_kernel(
        "interpolation:resampled",
        _gather,
        grad_output,
        input_size[2:],
        steps,
        align_corners,
        mode,
        memory_format,
    )


def _gather(
    grad_output: Tensor,
    input_size: Sequence[int],
    steps: Sequence[float],
    align_corners: bool,
    mode: str,
    memory_format: torch.memory_format,
) -> Tensor:
    dtype = accumulation_dtype(grad_output.dtype)
    outputs = grad_output.shape[2:]
    tables = [
        cached_on_device(grad_output.device, _BUILDERS[mode], *side, align_corners, step, dtype)
        for *side, step in zip(input_size, outputs, steps, strict=True)
    ]
    result = gather_through(grad_output, tables)
    return torch.empty(
        result.shape, dtype=grad_output.dtype, device=result.device, memory_format=memory_format
    ).copy_(result)


_BUILDERS: dict[str, TableBuilder] = {
    "linear": build_linear_table,
    "cubic": build_cubic_table,
    "triangle": build_triangle_table,
    "keys": build_keys_table,
    "lanczos": build_lanczos_table,
}
linear1d_backward = partial(_differentiate, dims=1, mode="linear")
bilinear2d_backward = partial(_differentiate, dims=2, mode="linear", keep_format=True)
trilinear3d_backward = partial(_differentiate, dims=3, mode="linear", keep_format=True)
bicubic2d_backward = partial(_differentiate, dims=2, mode="cubic")
bilinear2d_aa_backward = partial(_differentiate, dims=2, mode="triangle", keep_format=True)
bicubic2d_aa_backward = partial(_differentiate, dims=2, mode="keys")
lanczos2d_aa_backward = partial(_differentiate, dims=2, mode="lanczos")
