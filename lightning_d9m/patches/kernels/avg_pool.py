"""Gradients of average pooling in 3 dimensions and of adaptive average pooling in 2 and 3.

torch's CUDA kernels start one thread per output and add into the inputs with atomics. Here each
input reads the windows that contain it. (In torch the gradient of 2-D average pooling is such a
gather.)
"""

from collections.abc import Sequence
from functools import partial
from math import prod

from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.gather_tables import (
    cached_on_device,
    cast_like,
    gather_through,
)
from lightning_d9m.patches.primitives.pooling_windows import (
    Window,
    build_adaptive_table,
    build_mean_table,
    count_outputs,
    is_pooled,
    read_windows,
)
from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype
from lightning_d9m.patches.triton.launch import run_kernel


def avg_pool3d_backward(  # noqa: PLR0913, PLR0917 - torch's arguments
    original: Original,
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Return the gradient of ``avg_pool3d`` with respect to its input."""
    dims = 3
    shape, means = (kernel_size, stride, padding, ceil_mode), (count_include_pad, divisor_override)
    windows = read_windows(dims, kernel_size, stride, padding)
    sizes = self.shape[-dims:]
    if (
        not is_pooled(grad_output, self, dims)
        or not self.shape[-dims - 1]
        or divisor_override == 0
        or any(2 * window.padding > window.size or window.stride < 1 for window in windows)
        or list(grad_output.shape[-dims:])
        != [count_outputs(*side, ceil_mode=ceil_mode) for side in zip(sizes, windows, strict=True)]
    ):
        raise_as_original(original, grad_output, self, *shape, *means)
    return run_kernel("avg_pool:strided", _gather_strided, grad_output, self, windows, *means)


def _adaptive_backward(
    original: Original, grad_output: Tensor, self: Tensor, *, dims: int
) -> Tensor:
    """Return the gradient of an adaptive average pooling with respect to its input."""
    if not is_pooled(grad_output, self, dims):
        raise_as_original(original, grad_output, self)
    return run_kernel("avg_pool:adaptive", _gather_adaptive, grad_output, self, dims)


adaptive_avg_pool2d_backward = partial(_adaptive_backward, dims=2)
adaptive_avg_pool3d_backward = partial(_adaptive_backward, dims=3)


def _gather_strided(
    grad_output: Tensor,
    self: Tensor,
    windows: Sequence[Window],
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    dims = len(windows)
    tables = [
        cached_on_device(self.device, build_mean_table, *side, count_include_pad)
        for side in zip(self.shape[-dims:], grad_output.shape[-dims:], windows, strict=True)
    ]
    divisor = divisor_override or prod(
        _broadcast(table.divisor, dims - 1 - side) for side, table in enumerate(tables)
    )
    shares = grad_output.to(accumulation_dtype(grad_output.dtype)) / divisor
    return cast_like(gather_through(shares, tables), self, keep_format=False)


def _gather_adaptive(grad_output: Tensor, self: Tensor, dims: int) -> Tensor:
    sides = zip(self.shape[-dims:], grad_output.shape[-dims:], strict=True)
    tables = [cached_on_device(self.device, build_adaptive_table, *side) for side in sides]
    shares = grad_output.to(accumulation_dtype(grad_output.dtype))
    for position, table in enumerate(tables):
        # Dividing by one side after the other rounds as torch's kernels do.
        shares = shares / _broadcast(table.divisor, dims - 1 - position)
    return cast_like(gather_through(shares, tables), self, keep_format=dims == 2)  # noqa: PLR2004 - as torch's kernels


def _broadcast(divisor: Tensor | None, trailing: int) -> Tensor:
    assert divisor is not None
    return divisor.view([-1] + [1] * trailing)
