"""Gradients of separable linear ops: each input reads the outputs that it went to.

Interpolation, average pooling and padding are linear, and act on one dimension after the other. The
matrix of one dimension is what torch's own forward pass does to the identity matrix, and the
gradient multiplies by its transpose. Few elements of a row are not zero: the taps. One thread adds
the taps of an input in ascending order, so no two threads meet.

A row of the identity stands for many here, because outputs read only inputs nearby: it is 1 at
every ``period``-th input. Which of them an output has read follows from the center of all that it
reads, which is the forward pass of the positions.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_d9m.errors import D9mError
from lightning_d9m.patches.triton.launch import allocate, is_capturing, run_kernel

Forward = Callable[[Tensor], Tensor]
"""The op along one dimension, on a CPU: of shape ``[rows, inputs]`` to ``[rows, outputs]``."""

_PERIOD = 16
_SOME = 2**22  # elements that a slice of torch ops adds


class Taps(NamedTuple):
    """The outputs that each input of one dimension went to, in ascending order.

    Attributes:
        begins: The position of each input's first tap, and the number of all; int32 of shape
            ``[inputs + 1]``.
        outputs: The outputs of input 0, of input 1, ...; int32.
        weights: Their weights.
        size: The number of outputs.
        most: The greatest number of taps.
    """

    begins: Tensor
    outputs: Tensor
    weights: Tensor
    size: int
    most: int


def find_taps(forward: Forward, size: int, dtype: torch.dtype) -> Taps:
    """Return the taps of an op along a dimension.

    Args:
        forward: The op.
        size: The number of inputs.
        dtype: The dtype in which the op computes.
    """
    positions = torch.arange(size, dtype=torch.float64)
    ones, centers = forward(torch.stack([torch.ones_like(positions), positions]))
    centers = torch.where(ones == 0, 0, centers / ones)
    samples = torch.rand(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = forward(samples)
    period = min(_PERIOD, size)
    while True:
        inputs, outputs, weights = _probe(forward, centers, size, period, torch.float64)
        # An input that was taken for another one gives other sums.
        sums = torch.zeros_like(expected).index_add_(1, outputs, weights * samples[:, inputs])
        if period == size or torch.allclose(sums, expected, rtol=0, atol=1e-9):
            break
        period = min(2 * period, size)
    if dtype != torch.float64:
        inputs, outputs, weights = _probe(forward, centers, size, period, dtype)
    order = (inputs * len(centers) + outputs).argsort()
    begins = torch.searchsorted(inputs[order], torch.arange(size + 1)).to(torch.int32)
    most = int(begins.diff().max())
    return Taps(begins, outputs[order].to(torch.int32), weights[order], len(centers), most)


def _probe(
    forward: Forward, centers: Tensor, size: int, period: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is read by which output, and with which weight."""
    combs = (torch.arange(size) % period == torch.arange(period)[:, None]).to(dtype)
    # A NaN reaches all that is read, with a weight of 0, too.
    phase, outputs = forward(combs.masked_fill(combs > 0, torch.nan)).isnan().nonzero().unbind(1)
    # Of the inputs of this phase, the nearest one to the center.
    nearest = ((centers[outputs] - phase) / period).round().to(torch.int64)
    last = (size - 1 - phase) // period
    inputs = nearest.clamp(min=0).minimum(last) * period + phase
    return inputs, outputs, forward(combs)[phase, outputs]


@cache
def cached_taps(
    device: torch.device, size: int, dtype: torch.dtype, name: str, *arguments: Any
) -> Taps:
    """Return the taps of an op of torch along one dimension, on a device.

    An op of two dimensions runs on as many columns as the first argument after the name ends with.

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
        taps = find_taps(partial(_run, getattr(torch.ops.aten, name), *arguments), size, dtype)
    moved: Taps = tree_map_only(Tensor, lambda part: part.to(device), taps)
    return moved


def _run(op: Any, first: Sequence[int], *rest: Any) -> Tensor:
    """Run an op, whose last argument has rows, along their columns."""
    *arguments, rows = rest
    if op.__name__.endswith("1d"):
        result: Tensor = op(rows.unsqueeze(1), first, *arguments)
        return result.squeeze(1)
    image = rows[:, None, :, None].expand(-1, -1, -1, first[1]).contiguous()
    result = op(image, first, *arguments)
    return result[:, 0, :, 0]


def apply_taps(gradient: Tensor, sides: Sequence[Taps], shape: Sequence[int]) -> Tensor:
    """Propagate a gradient from outputs to inputs, along the last dimensions.

    Args:
        gradient: Real or complex, of shape ``[..., *outputs]``.
        sides: The taps of each of the last dimensions.
        shape: The shape of the result, ``[..., *inputs]``.

    Returns:
        Contiguous, of the gradient's dtype. Half and bfloat16 are added in float32.
    """
    if gradient.is_complex():
        real, imaginary = torch.view_as_real(gradient.resolve_conj()).unbind(-1)
        return torch.complex(apply_taps(real, sides, shape), apply_taps(imaginary, sides, shape))
    dtype, result, inner = gradient.dtype, gradient.contiguous(), 1
    sizes = list(gradient.shape)
    for dim in range(-1, -len(sides) - 1, -1):
        taps, sizes[dim] = sides[dim], shape[dim]
        wide = torch.float32 if dtype.itemsize == 2 and dim > -len(sides) else dtype  # noqa: PLR2004 - half
        out = allocate(sizes, wide, result.device)
        outer = prod(sizes[:dim])
        if outer and inner:
            run_kernel("taps:apply", _apply, _make_example, out, result, taps, outer, inner)
        result, inner = out, inner * shape[dim]
    return result


def _make_example(device: torch.device) -> tuple[Tensor, Tensor, Taps, int, int]:
    """Return arguments of :func:`_apply`: the gradient of a resized row."""
    taps = cached_taps(device, 7, torch.float32, "upsample_linear1d", (17,), False)  # noqa: FBT003 - an argument of torch's
    source = (torch.arange(3 * taps.size * 5, dtype=torch.float32, device="cpu") * 0.37).sin()
    return torch.zeros(3, 7, 5, device=device), source.to(device), taps, 3, 5


def _apply(out: Tensor, source: Tensor, taps: Taps, outer: int, inner: int) -> None:
    inputs = len(taps.begins) - 1
    step = max(1, _SOME // (inputs * inner))
    numbers, last = taps.begins.diff()[:, None], len(taps.outputs) - 1
    sources, targets = source.view(outer, taps.size, inner), out.view(outer, inputs, inner)
    for given, target in zip(sources.split(step), targets.split(step), strict=True):
        sums = torch.zeros(target.shape, dtype=taps.weights.dtype, device=out.device)
        for turn in range(taps.most):
            tap = (taps.begins[:-1] + turn).clamp(max=last)
            terms = given.index_select(1, taps.outputs[tap]).to(sums.dtype)
            terms.mul_(taps.weights[tap][:, None]).add_(sums)
            sums = torch.where(turn < numbers, terms, sums)
        target.copy_(sums)
