"""Gradients of interpolation, average pooling and padding, which act on one dimension at a time.

torch's CUDA kernels start one thread per output and add into the inputs with atomics. Here each
input adds the outputs that it went to; see ``taps``. Each function below runs torch's own op along
one dimension.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype
from lightning_d9m.patches.taps import Forward, apply_taps, cached_taps

_aten = torch.ops.aten
_ONE_DIMENSIONAL = {
    "linear": _aten.upsample_linear1d,
    "reflection": _aten.reflection_pad1d,
    "replication": _aten.replication_pad1d,
}
_TWO_DIMENSIONAL = {
    "cubic": "upsample_bicubic2d",
    "linear_aa": "_upsample_bilinear2d_aa",
    "cubic_aa": "_upsample_bicubic2d_aa",
    "lanczos_aa": "_upsample_lanczos2d_aa",  # torch 2.11 has no such op
    "mean": "avg_pool2d",
    "adaptive_mean": "_adaptive_avg_pool2d",
}


def _along(kind: str, first: Sequence[int], *arguments: Any, columns: int = 1) -> Forward:
    """Return an op of torch along one dimension, whose first argument concerns that dimension."""

    def forward(rows: Tensor) -> Tensor:
        result: Tensor
        if kind in _ONE_DIMENSIONAL:
            result = _ONE_DIMENSIONAL[kind](rows.unsqueeze(1), first, *arguments)
            return result.squeeze(1)
        # Antialiased modes take their layout from the strides of several columns.
        image = rows[:, None, :, None].expand(-1, -1, -1, columns).contiguous()
        op = getattr(_aten, _TWO_DIMENSIONAL[kind])
        result = op(image, [*first, columns], *arguments)
        return result[:, 0, :, 0]

    return forward


def _along_resized(kind: str, outputs: int, align_corners: bool, scale: float | None) -> Forward:
    if kind == "linear":
        return _along(kind, [outputs], align_corners, scale)
    return _along(kind, [outputs], align_corners, scale, None, columns=2)


def _along_windows(
    kernel: int, stride: int, padding: int, ceil_mode: bool, include_pad: bool, divisor: int | None
) -> Forward:
    return _along("mean", [kernel], [stride, 1], [padding, 0], ceil_mode, include_pad, divisor)


def _along_adaptive(outputs: int) -> Forward:
    return _along("adaptive_mean", [outputs])


def _differentiate(
    bound: Original,
    grad_output: Tensor,
    shape: Sequence[int],
    sides: Sequence[tuple[Any, ...]],
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Return the gradient with respect to the input, of a shape.

    Args:
        bound: Torch's kernel, with its arguments.
        grad_output: Of shape ``[..., *outputs]``.
        shape: Of the input, ``[..., *inputs]``.
        sides: For each of the last dimensions a function that returns the op, and its arguments.
        memory_format: The result's.
    """
    dims = len(sides)
    if (
        len(shape) != grad_output.dim()
        or grad_output.shape[:-dims] != tuple(shape[:-dims])
        or not (grad_output.is_floating_point() or grad_output.is_complex())
        or 0 in (*shape[1:], *grad_output.shape[1:])
    ):
        raise_as_original(bound)
    dtype = accumulation_dtype(grad_output.dtype)
    dtype = dtype.to_real() if dtype.is_complex else dtype
    try:
        taps = [
            cached_taps(grad_output.device, make, size, dtype, *arguments)
            for size, (make, *arguments) in zip(shape[-dims:], sides, strict=True)
        ]
    except RuntimeError:
        raise_as_original(bound)  # torch's forward pass does not take the arguments either
    if [one.size for one in taps] != list(grad_output.shape[-dims:]):
        raise_as_original(bound)
    result = apply_taps(grad_output, taps, shape)
    if memory_format == torch.contiguous_format:
        return result
    return torch.empty_like(result, memory_format=memory_format).copy_(result)


def _interpolation_backward(
    original: Original,
    grad_output: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    dims: int,
    kind: str,
    keep_format: bool = False,
) -> Tensor:
    """Return the gradient of an interpolation.

    ``keep_format`` says whether torch's kernel keeps the channels_last memory format.
    """
    scales = (*scales, *[None] * (dims - len(scales)))
    arguments = (grad_output, output_size, input_size, align_corners, *scales)
    bound = partial(original, *arguments)
    if (
        len(input_size) != dims + 2
        or list(grad_output.shape) != [*input_size[:2], *output_size]
        or not grad_output.is_floating_point()
    ):
        raise_as_original(bound)
    sides = [
        (_along_resized, kind, outputs, align_corners, scale)
        for outputs, scale in zip(output_size, scales, strict=True)
    ]
    memory_format = suggest_memory_format(grad_output) if keep_format else torch.contiguous_format
    return _differentiate(bound, grad_output, input_size, sides, memory_format)


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
    bound = partial(original, grad_output, self, *shape, *means)
    if not _is_pooled(grad_output, self, dims) or not self.shape[-dims - 1]:
        raise_as_original(bound)
    windows = zip(
        *(
            list(values) * (dims if len(values) == 1 else 1)
            for values in (kernel_size, stride or kernel_size, padding)
        ),
        strict=True,
    )
    # The divisor of all dimensions is that of the first one.
    divisors = [divisor_override, *[None if divisor_override is None else 1] * (dims - 1)]
    sides = [
        (_along_windows, *window, ceil_mode, count_include_pad, divisor)
        for window, divisor in zip(windows, divisors, strict=True)
    ]
    return _differentiate(bound, grad_output, self.shape, sides)


def _adaptive_backward(
    original: Original, grad_output: Tensor, self: Tensor, *, dims: int
) -> Tensor:
    """Return the gradient of an adaptive average pooling with respect to its input."""
    bound = partial(original, grad_output, self)
    if not _is_pooled(grad_output, self, dims):
        raise_as_original(bound)
    sides = [(_along_adaptive, outputs) for outputs in grad_output.shape[-dims:]]
    # torch's kernel of two dimensions keeps the memory format.
    memory_format = suggest_memory_format(self) if dims == 2 else torch.contiguous_format  # noqa: PLR2004 - as above
    return _differentiate(bound, grad_output, self.shape, sides, memory_format)


def _padding_backward(
    original: Original, grad_output: Tensor, self: Tensor, padding: Sequence[int], *, kind: str
) -> Tensor:
    """Return the gradient of padding, ``"reflection"`` or ``"replication"``, by its input."""
    bound = partial(original, grad_output, self, padding)
    dims = len(padding) // 2
    if (
        self.dim() not in (dims + 1, dims + 2)
        or grad_output.dtype != self.dtype
        or not self.shape[-dims - 1]
    ):
        raise_as_original(bound)
    # torch lists the last dimension first.
    sides = [(_along, kind, tuple(padding[side : side + 2])) for side in range(0, 2 * dims, 2)]
    return _differentiate(bound, grad_output, self.shape, sides[::-1])


def _is_pooled(grad_output: Tensor, self: Tensor, dims: int) -> bool:
    return (
        self.dim() in (dims + 1, dims + 2)
        and grad_output.dtype == self.dtype
        and self.is_floating_point()
    )


linear1d_backward = partial(_interpolation_backward, dims=1, kind="linear")
bilinear2d_backward = partial(_interpolation_backward, dims=2, kind="linear", keep_format=True)
trilinear3d_backward = partial(_interpolation_backward, dims=3, kind="linear", keep_format=True)
bicubic2d_backward = partial(_interpolation_backward, dims=2, kind="cubic")
bilinear2d_aa_backward = partial(
    _interpolation_backward, dims=2, kind="linear_aa", keep_format=True
)
bicubic2d_aa_backward = partial(_interpolation_backward, dims=2, kind="cubic_aa")
lanczos2d_aa_backward = partial(_interpolation_backward, dims=2, kind="lanczos_aa")
adaptive_avg_pool2d_backward = partial(_adaptive_backward, dims=2)
adaptive_avg_pool3d_backward = partial(_adaptive_backward, dims=3)
reflection_pad_backward = partial(_padding_backward, kind="reflection")
replication_pad_backward = partial(_padding_backward, kind="replication")
