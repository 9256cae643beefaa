"""Gradients of interpolation, average pooling and padding, which act on one dimension at a time.

torch's CUDA kernels start one thread per output and add into the inputs with atomics. Here each
input adds the outputs that it went to; see ``taps``. Each side of a tensor names torch's own op and
the arguments with which it is run along one dimension.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.patches.arguments import Function, accumulation_dtype, lay_out, require
from lightning_d9m.patches.taps import apply_taps, cached_taps


def _differentiate(
    grad_output: Tensor,
    shape: Sequence[int],
    sides: Sequence[tuple[Any, ...]],
    format_of: Tensor | None = None,
) -> Function:
    """Return what returns the gradient with respect to the input, of a shape.

    Args:
        grad_output: Of shape ``[..., *outputs]``.
        shape: Of the input, ``[..., *inputs]``.
        sides: For each of the last dimensions torch's op and its arguments.
        format_of: The tensor whose memory format torch's kernel keeps, if it keeps one.
    """
    given, dims, dtype = grad_output.shape, len(sides), accumulation_dtype(grad_output.dtype)
    require(
        dtype.is_floating_point or dtype.is_complex,
        given[:-dims] == tuple(shape[:-dims]),
        0 not in (*shape[1:], *given[1:]),
    )
    dtype = dtype.to_real() if dtype.is_complex else dtype
    device, sizes = grad_output.device, shape[-dims:]
    taps = [
        cached_taps(device, size, dtype, *side) for size, side in zip(sizes, sides, strict=True)
    ]
    require(all(one.size == size for one, size in zip(taps, given[-dims:], strict=True)))
    memory_format = (
        torch.contiguous_format if format_of is None else suggest_memory_format(format_of)
    )

    def run(grad_output: Tensor, *_: Any, **__: Any) -> Tensor:
        return lay_out(apply_taps(grad_output, taps, shape), memory_format)

    return run


def _interpolation_backward(
    grad_output: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    dims: int,
    forward: str = "upsample_linear1d",
    keep_format: bool = False,
) -> Function:
    """Return what returns the gradient of an interpolation.

    ``keep_format`` says whether torch's kernel keeps the channels_last memory format.
    """
    scales = scales or (None,) * dims
    require(
        len(input_size) == dims + 2,
        grad_output.shape == (*input_size[:2], *output_size),
        grad_output.is_floating_point(),
    )
    # Antialiased modes take their layout from the strides of several columns.
    columns, more = ((), ()) if forward.endswith("1d") else ((2,), (None,))
    sides = [
        (forward, (outputs, *columns), align_corners, scale, *more)
        for outputs, scale in zip(output_size, scales, strict=True)
    ]
    return _differentiate(grad_output, input_size, sides, grad_output if keep_format else None)


def avg_pool3d_backward(
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Function:
    """Return what returns the gradient of ``avg_pool3d`` with respect to its input."""
    _require_image(grad_output, self, 3)
    require(self.shape[-4] > 0)
    windows = (
        tuple(values) * (3 // len(values))
        for values in (kernel_size, stride or kernel_size, padding)
    )
    # The divisor of all dimensions is that of the first one.
    divisors = (divisor_override, *[divisor_override and 1] * 2)
    sides = [
        ("avg_pool2d", (size, 1), (step, 1), (pad, 0), ceil_mode, count_include_pad, divisor)
        for size, step, pad, divisor in zip(*windows, divisors, strict=True)
    ]
    return _differentiate(grad_output, self.shape, sides)


def _adaptive_backward(grad_output: Tensor, self: Tensor, *, dims: int) -> Function:
    """Return what returns the gradient of an adaptive average pooling with respect to its input."""
    _require_image(grad_output, self, dims)
    sides = [("_adaptive_avg_pool2d", (outputs, 1)) for outputs in grad_output.shape[-dims:]]
    # torch's kernel of two dimensions keeps the memory format.
    return _differentiate(grad_output, self.shape, sides, self if dims == 2 else None)  # noqa: PLR2004


def _padding_backward(
    grad_output: Tensor, self: Tensor, padding: Sequence[int], *, forward: str
) -> Function:
    """Return what returns the gradient of a padding with respect to its input."""
    dims = len(padding) // 2
    _require_image(grad_output, self, dims)
    require(self.shape[-dims - 1] > 0)
    # torch lists the last dimension first.
    sides = [(forward, tuple(padding[side : side + 2])) for side in range(0, len(padding), 2)]
    return _differentiate(grad_output, self.shape, sides[::-1])


def _require_image(grad_output: Tensor, self: Tensor, dims: int) -> None:
    """Refuse the arguments unless the input has one or two more dimensions."""
    require(self.dim() in {dims + 1, dims + 2}, grad_output.dtype == self.dtype)


_resize = partial(_interpolation_backward, dims=2)
upsample_linear1d_backward = partial(_interpolation_backward, dims=1)
upsample_bilinear2d_backward = partial(_resize, keep_format=True)
upsample_trilinear3d_backward = partial(_interpolation_backward, dims=3, keep_format=True)
upsample_bicubic2d_backward = partial(_resize, forward="upsample_bicubic2d")
upsample_bilinear2d_aa_backward = partial(
    _resize, forward="_upsample_bilinear2d_aa", keep_format=True
)
upsample_bicubic2d_aa_backward = partial(_resize, forward="_upsample_bicubic2d_aa")
adaptive_avg_pool2d_backward = partial(_adaptive_backward, dims=2)
adaptive_avg_pool3d_backward = partial(_adaptive_backward, dims=3)
reflection_pad1d_backward = partial(_padding_backward, forward="reflection_pad1d")
reflection_pad2d_backward = reflection_pad3d_backward = reflection_pad1d_backward
replication_pad1d_backward = partial(_padding_backward, forward="replication_pad1d")
replication_pad2d_backward = replication_pad3d_backward = replication_pad1d_backward
