"""Gradients of ops whose forward is a fixed weighted sum along each dimension, written as gathers.

Pooling by averages and interpolation send each input to a few neighbouring outputs. Their
gradient, usually a scatter with atomics, is then a gather: each input reads the outputs it went
to, in ascending order. A band lists them, one dimension at a time. ``embedding_bag`` in mode sum
does the reading: one reader adds each run from left to right, and only listed elements are
touched, so that an infinity or a NaN stays where it belongs (in a matrix product it would meet
the zeros).
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype, sum_bags

Parts = TypeVar("Parts", bound=tuple[Tensor | None, ...])


class GatherTable(NamedTuple):
    """For each input along one dimension, the outputs it contributed to.

    Attributes:
        outputs: The outputs of input 0, of input 1, ...; int64 of shape ``[entries]``.
        offsets: Where each input's run starts; int64 of shape ``[inputs]``.
        weight: The factor of each entry, or None where all are 1; shape ``[entries]``.
        divisor: What the mean of each output divided by, or None; int64 of shape ``[outputs]``.
    """

    outputs: Tensor
    offsets: Tensor
    weight: Tensor | None = None
    divisor: Tensor | None = None


def place(device: torch.device, build: Callable[..., Parts], *sizes: Hashable) -> Parts:
    """Build tensors on the host, once for each set of sizes, and copy them to a device.

    Sizes seldom change during a training, so that a layer pays for this at its first step only.
    """
    return cast(Parts, _place(device, build, sizes))


@lru_cache(maxsize=512)
def _place(
    device: torch.device, build: Callable[..., tuple[Tensor | None, ...]], sizes: tuple[Hashable]
) -> tuple[Tensor | None, ...]:
    built = build(*sizes)
    moved = (part if part is None else part.to(device) for part in built)
    return cast(Callable[..., tuple[Tensor | None, ...]], type(built))(*moved)


def build_band(
    inputs: Tensor,
    outputs: Tensor,
    input_size: int,
    *,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
) -> GatherTable:
    """Turn a list of contributions into a band.

    Args:
        inputs: The input of each contribution, int64 of shape ``[entries]``.
        outputs: Its output, ascending, int64 of shape ``[entries]``.
        input_size: Number of inputs.
        weight: The factor of each contribution; shape ``[entries]``.
        divisor: What each output divided by; shape ``[outputs]``.
    """
    sorted_inputs, order = torch.sort(inputs, stable=True)
    bounds = torch.arange(input_size, dtype=torch.int64, device="cpu")
    offsets = torch.searchsorted(sorted_inputs, bounds)
    return GatherTable(outputs[order], offsets, None if weight is None else weight[order], divisor)


def gather_through(gradient: Tensor, bands: Sequence[GatherTable]) -> Tensor:
    """Carry a gradient from the outputs back to the inputs, along the last dimensions.

    Args:
        gradient: Of shape ``[..., *outputs]``.
        bands: One for each of the last dimensions.

    Returns:
        The gradient of shape ``[..., *inputs]``, not necessarily contiguous; half and bfloat16 come
        out as float32. Each input is a sum in ascending order of the outputs, last dimension first.
    """
    result = gradient
    dtype = accumulation_dtype(gradient.dtype)
    if not gradient.numel():
        inputs = [len(band.offsets) for band in bands]
        return gradient.new_zeros((*gradient.shape[: -len(bands)], *inputs))
    for dim in range(-1, -len(bands) - 1, -1):
        band = bands[dim]
        rows = result.movedim(dim, 0)
        # One copy both converts and brings the rows together.
        table = torch.empty(rows.shape, dtype=dtype, device=rows.device).copy_(rows)
        bags = sum_bags(table.flatten(1), band.outputs, band.offsets, band.weight)
        result = bags.view(-1, *rows.shape[1:]).movedim(0, dim)
    return result


def finish(result: Tensor, like: Tensor, *, keep_format: bool) -> Tensor:
    """Return a result in the dtype of a tensor, contiguous or in that tensor's memory format."""
    memory_format = suggest_memory_format(like) if keep_format else torch.contiguous_format
    return torch.empty(
        result.shape, dtype=like.dtype, device=like.device, memory_format=memory_format
    ).copy_(result)
