"""Gradients of average pooling in 3 dimensions and of adaptive average pooling in 2 and 3.

torch's CUDA kernels start one thread per output and add into the inputs with atomics. Here each
input reads the windows that cover it. (The gradient of 2-D average pooling is such a gather in
torch.)
"""

from collections.abc import Sequence

from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.gather_tables import finish, gather_through, place
from lightning_d9m.patches.primitives.pooling_windows import (
    build_adaptive_band,
    build_mean_band,
    count_outputs,
    read_windows,
)
from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype


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
    windows = read_windows(dims, kernel_size, stride, padding)
    sizes = self.shape[-dims:]
    if (
        not _can_divide(grad_output, self, dims)
        or divisor_override == 0
        or any(2 * window.padding > window.size or window.stride < 1 for window in windows)
        or list(grad_output.shape[-dims:])
        != [count_outputs(*side, ceil_mode=ceil_mode) for side in zip(sizes, windows, strict=True)]
    ):
        raise_as_original(
            original,
            grad_output,
            self,
            kernel_size,
            stride,
            padding,
            ceil_mode,
            count_include_pad,
            divisor_override,
        )
    bands = [
        place(self.device, build_mean_band, *side, count_include_pad)
        for side in zip(sizes, grad_output.shape[-dims:], windows, strict=True)
    ]
    if divisor_override is None:
        divisor = (
            _stand_up(bands[0].divisor, 2)
            * _stand_up(bands[1].divisor, 1)
            * _stand_up(bands[2].divisor, 0)
        )
        shares = grad_output.to(accumulation_dtype(grad_output.dtype)) / divisor
    else:
        shares = grad_output.to(accumulation_dtype(grad_output.dtype)) / divisor_override
    return finish(gather_through(shares, bands), self, keep_format=False)


def adaptive_avg_pool2d_backward(original: Original, grad_output: Tensor, self: Tensor) -> Tensor:
    """Return the gradient of ``adaptive_avg_pool2d`` with respect to its input."""
    return _adaptive_backward(original, grad_output, self, 2)


def adaptive_avg_pool3d_backward(original: Original, grad_output: Tensor, self: Tensor) -> Tensor:
    """Return the gradient of ``adaptive_avg_pool3d`` with respect to its input."""
    return _adaptive_backward(original, grad_output, self, 3)


def _adaptive_backward(original: Original, grad_output: Tensor, self: Tensor, dims: int) -> Tensor:
    if not _can_divide(grad_output, self, dims):
        raise_as_original(original, grad_output, self)
    sides = zip(self.shape[-dims:], grad_output.shape[-dims:], strict=True)
    bands = [place(self.device, build_adaptive_band, *side) for side in sides]
    shares = grad_output.to(accumulation_dtype(grad_output.dtype))
    for position, band in enumerate(bands):
        # Dividing by one side after the other rounds as torch's kernels do.
        shares = shares / _stand_up(band.divisor, dims - 1 - position)
    return finish(gather_through(shares, bands), self, keep_format=dims == 2)  # noqa: PLR2004 - a number of dimensions


def _can_divide(grad_output: Tensor, self: Tensor, dims: int) -> bool:
    return (
        self.dim() in (dims + 1, dims + 2)
        and grad_output.shape[:-dims] == self.shape[:-dims]
        and grad_output.dim() == self.dim()
        and grad_output.dtype == self.dtype
        and self.is_floating_point()
        and min(*self.shape[-dims - 1 :], *grad_output.shape[-dims:]) > 0
    )


def _stand_up(divisor: Tensor | None, trailing: int) -> Tensor:
    assert divisor is not None
    return divisor.view([-1] + [1] * trailing)
