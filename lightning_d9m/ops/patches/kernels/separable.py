"""Gradients of separable linear ops: each input reads the outputs that it went to.

Interpolation, average pooling and padding are linear, and act on one dimension after the other. The
matrix of one dimension is what torch's own forward pass does to the identity matrix, and the
gradient multiplies by its transpose. Few elements of a row are not zero: the taps. One thread adds
the taps of an input in ascending order, so no two threads meet: along the last dimension first, and
then what these sums give along the dimension before it.

A row of the identity stands for many here, because outputs read only inputs nearby: it is 1 at
every ``period``-th input. Which of them an output has read follows from the center of all that it
reads, which is the forward pass of the positions.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.errors import D9mError
from lightning_d9m.ops.patches.registration import accumulation_dtype, require
from lightning_d9m.ops.patches.triton.launch import is_capturing, run_kernel

# Outputs of most ops read fewer than 16 inputs. Where they read more, it is doubled until the taps
# explain the op.
_PERIOD = 16


Side = tuple[Any, ...]
"""The name of an op that acts on one dimension, and its arguments after the input. An op of two
dimensions sees as many columns as its first argument ends with."""


class Taps(NamedTuple):
    """The outputs that each input of a dimension went to, in ascending order.

    Attributes:
        begins: The position of each input's first tap, and the end of all; int32.
        places: The outputs of input 0, of input 1, ...; int32.
        weights: Their weights.
        outputs: The number of outputs.
    """

    begins: Tensor
    places: Tensor
    weights: Tensor
    outputs: int


def find_taps(forward: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype) -> Taps:
    """Return the taps of an op along a dimension of ``size`` inputs, as it computes in a dtype.

    ``forward`` is the op on a CPU: of shape ``[rows, inputs]`` to ``[rows, outputs]``.
    """
    positions = torch.arange(size, dtype=torch.float64, device="cpu")
    # The mean of the positions that an output reads, weighted.
    ones, centers = forward(torch.stack([torch.ones_like(positions), positions]))
    centers = torch.where(ones == 0, 0, centers / ones)
    samples = torch.rand(
        2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    # The taps are checked on two random rows, since wrong ones would be silent.
    expected = forward(samples)
    period = min(_PERIOD, size)
    while True:
        inputs, outputs, weights = _probe(forward, centers, size, period, torch.float64)
        # An input that was taken for another one gives other sums.
        sums = torch.zeros_like(expected).index_add_(1, outputs, weights * samples[:, inputs])
        # Samples are below 1, and so are most sums of weights: roundings of float64 are far below
        # this, and a tap at a wrong place is far above.
        if period == size or torch.allclose(sums, expected, rtol=0, atol=1e-9):
            break
        period = min(2 * period, size)
    # Once more in the op's dtype, for the weights as it rounds them.
    if dtype != torch.float64:
        inputs, outputs, weights = _probe(forward, centers, size, period, dtype)
    # By input, then by output: the order in which a thread adds.
    order = (inputs * len(centers) + outputs).argsort()
    begins = torch.searchsorted(inputs[order], torch.arange(size + 1, device="cpu")).to(torch.int32)
    return Taps(begins, outputs[order].to(torch.int32), weights[order], len(centers))


def _probe(
    forward: Callable[[Tensor], Tensor], centers: Tensor, size: int, period: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is read by which output, and with which weight."""
    combs = (
        torch.arange(size, device="cpu") % period == torch.arange(period, device="cpu")[:, None]
    ).to(dtype)
    # A NaN reaches all that is read, with a weight of 0, too.
    phase, outputs = forward(combs.masked_fill(combs > 0, torch.nan)).isnan().nonzero().unbind(1)
    # Of the inputs of this phase, the nearest one to the center.
    nearest = ((centers[outputs] - phase) / period).round().to(torch.int64)
    # The last input of this phase.
    last = (size - 1 - phase) // period
    inputs = nearest.clamp(min=0).minimum(last) * period + phase
    return inputs, outputs, forward(combs)[phase, outputs]


@cache
def cached_taps(device: torch.device, dtype: torch.dtype, size: int, *side: Any) -> Taps:
    """Return the taps of an op of torch along a dimension of so many inputs, on a device.

    Sizes seldom change during a training, so a layer pays for this at its first step only. Nothing
    is evicted: taps are only as long as a side, a CUDA graph reads the memory at each replay, and
    other streams may still read it.

    Raises:
        D9mError: A CUDA graph is being captured, of which the copy from the host cannot be a part.
        RuntimeError: The op does not take the arguments.
    """
    if device.type == "cuda" and is_capturing():
        raise D9mError(
            "A CUDA graph is being captured, and a deterministic replacement has to copy a table "
            f"for a side of {size} to {device} first. Run the same step once before the capture."
        )
    # For any later use, whatever the default device is.
    with torch.device("cpu"), torch.inference_mode(mode=False), torch.no_grad():
        begins, places, weights, outputs = find_taps(partial(run_side, *side), size, dtype)
        return Taps(begins.to(device), places.to(device), weights.to(device), outputs)


def run_side(name: str, first: Sequence[int], *rest: Any) -> Tensor:
    """Run the op of a side along the columns of the last argument."""
    *arguments, rows = rest
    op = getattr(torch.ops.aten, name)
    if name.endswith("1d"):
        result: Tensor = op(rows.unsqueeze(1), first, *arguments)
        return result.squeeze(1)
    # An op of two dimensions needs columns, all alike.
    image = rows[:, None, :, None].expand(-1, -1, -1, first[1]).contiguous()
    result = op(image, first, *arguments)
    return result[:, 0, :, 0]


def apply_taps(gradient: Tensor, taps: Sequence[Taps], shape: Sequence[int]) -> Tensor:
    """Propagate a gradient from outputs to inputs, along the last dimensions.

    It is real or complex, of shape ``[..., *outputs]``. The result has the shape ``[..., *inputs]``
    and is contiguous, of the gradient's dtype. Half and bfloat16 are added in float32.
    """
    # A linear op with real weights acts on both parts alone.
    if gradient.is_complex():
        parts = torch.view_as_real(gradient.resolve_conj()).unbind(-1)
        return torch.complex(*(apply_taps(part, taps, shape) for part in parts))
    found, inner = gradient.contiguous(), 1
    for axis in range(-1, -len(taps) - 1, -1):
        one, size = taps[axis], shape[axis]
        outer = found.numel() // max(one.outputs * inner, 1)
        # Sums are rounded to a shorter dtype once, after the first dimension, which comes last.
        dtype = one.weights.dtype if axis > -len(taps) else gradient.dtype
        out = gradient.new_empty((outer, size, inner), dtype=dtype)
        if found.numel():
            source = found.view(outer, one.outputs, inner)
            run_kernel("kernels:add_taps", _make_example, out, source, one)
        found, inner = out, inner * size
    return found.view(shape)


def _make_example(device: torch.device) -> tuple[Tensor, Tensor, Taps]:
    """Return arguments of the kernel: the gradient of resized columns."""
    source = (torch.arange(3 * 17 * 5, dtype=torch.float32, device="cpu") * 0.37).sin()
    side = 7, "upsample_linear1d", (17,), False
    taps = cached_taps(device, torch.float32, *side)
    return torch.zeros(3, 7, 5, device=device), source.view(3, 17, 5).to(device), taps


def _differentiate(
    grad_output: Tensor, self: Tensor, sides: Sequence[Side], format_of: Tensor | None = None
) -> Callable[..., Tensor]:
    """Return what returns the gradient with respect to the input.

    Args:
        grad_output: Of shape ``[..., *outputs]``.
        self: The input, of shape ``[..., *inputs]``, with one or two more dimensions.
        sides: For each of the last dimensions torch's op and its arguments.
        format_of: The tensor whose memory format torch's kernel keeps, if it keeps one.
    """
    given, shape, dims = grad_output.shape, self.shape, len(sides)
    require(
        len(shape) in {dims + 1, dims + 2},
        grad_output.dtype == self.dtype,
        grad_output.is_floating_point() or grad_output.is_complex(),
        given[:-dims] == shape[:-dims],
        0 not in (*shape[1:], *given[1:]),
    )
    dtype = accumulation_dtype(grad_output.dtype).to_real()
    pairs = zip(shape[-dims:], sides, strict=True)
    taps = [cached_taps(grad_output.device, dtype, size, *side) for size, side in pairs]
    require(all(one.outputs == size for one, size in zip(taps, given[-dims:], strict=True)))
    form = torch.contiguous_format if format_of is None else suggest_memory_format(format_of)

    def run(grad_output: Tensor, *_: Any, **__: Any) -> Tensor:
        result = apply_taps(grad_output, taps, shape)
        return result if form == torch.contiguous_format else result.clone(memory_format=form)

    return run


def resize_sides(
    name: str, sizes: Sequence[int], scales: Sequence[float | None], *corners: bool
) -> list[Side]:
    """Return the sides of an interpolation to some sizes by an op of one or of two dimensions."""
    # Antialiased modes take their layout from the strides of several columns, and torch 2.13
    # computes images of width 1 wrongly.
    columns, more = ((), ()) if name.endswith("1d") else ((2,), (None,))
    scales = (*scales, *[None] * len(sizes))
    return [
        (name, (size, *columns), *corners, scale, *more)
        for size, scale in zip(sizes, scales, strict=False)
    ]


def pool_sides(
    dims: int,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> list[Side]:
    """Return the sides of an average pooling; the divisor is that of the first dimension."""
    lists = (kernel_size, stride or kernel_size, padding)
    windows = (tuple(values) * (dims // len(values)) for values in lists)
    divisors = (divisor, *[divisor and 1] * (dims - 1))
    return [
        ("avg_pool2d", (size, 1), (step, 1), (pad, 0), ceil_mode, count_include_pad, by)
        for size, step, pad, by in zip(*windows, divisors, strict=True)
    ]


def adaptive_sides(sizes: Sequence[int]) -> list[Side]:
    """Return the sides of an adaptive average pooling."""
    return [("_adaptive_avg_pool2d", (size, 1)) for size in sizes]


def _interpolation_backward(
    grad_output: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    dims: int,
    forward: str = "upsample_linear1d",
    keep_format: bool = False,
) -> Callable[..., Tensor]:
    """Return what returns the gradient of an interpolation.

    ``keep_format`` says whether torch's kernel keeps the channels_last memory format.
    """
    require(
        len(input_size) == dims + 2,
        grad_output.shape == (*input_size[:2], *output_size),
        grad_output.is_floating_point(),
    )
    sides = resize_sides(forward, output_size, scales, align_corners)
    # Only its shape and dtype are read.
    image = torch.empty(input_size, dtype=grad_output.dtype, device="meta")
    return _differentiate(grad_output, image, sides, grad_output if keep_format else None)


def avg_pool3d_backward(grad_output: Tensor, self: Tensor, *window: Any) -> Callable[..., Tensor]:
    """Return what returns the gradient of ``avg_pool3d`` with respect to its input."""
    require(self.shape[-4] > 0)
    return _differentiate(grad_output, self, pool_sides(3, *window))


def _adaptive_backward(grad_output: Tensor, self: Tensor, *, dims: int) -> Callable[..., Tensor]:
    """Return what returns the gradient of an adaptive average pooling with respect to its input."""
    sides = adaptive_sides(grad_output.shape[-dims:])
    # torch's kernel of two dimensions keeps the memory format.
    return _differentiate(grad_output, self, sides, self if dims == 2 else None)  # noqa: PLR2004


def _padding_backward(
    grad_output: Tensor, self: Tensor, padding: Sequence[int], *, forward: str
) -> Callable[..., Tensor]:
    """Return what returns the gradient of a padding with respect to its input."""
    dims = len(padding) // 2
    require(self.shape[-dims - 1] > 0)
    # torch lists the last dimension first.
    sides = [(forward, tuple(padding[side : side + 2])) for side in range(0, len(padding), 2)]
    return _differentiate(grad_output, self, sides[::-1])


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
