"""``put_`` and the max unpoolings: of several values for one place, the last one is written.

torch's CUDA kernels let threads race for a place; its CPU kernels, on one thread, go from first
to last.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.exact_sum import unravel
from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.gather_tables import cast_like
from lightning_d9m.patches.primitives.segment_reduce import Update, find_last
from lightning_d9m.patches.triton.launch import run_kernel

_MOST_MARKS = 16  # places for each value, beyond which a mark for each takes too much memory


def put(
    original: Original, self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False
) -> Update:
    """Write the source into a tensor, at positions counted as if it were flat."""
    bound = partial(original, self, index, source, accumulate)
    size = self.numel()
    if (
        index.dtype != torch.int64
        or source.dtype != self.dtype
        or source.numel() != index.numel()
        or (size == 0 and index.numel() > 0)
    ):
        raise_as_original(bound)
    if not index.numel():
        return Update(lambda _: None)
    places, values = index.flatten(), source.flatten()

    def write(target: Tensor) -> None:
        try:
            if accumulate:
                _put(target, places, values, accumulate=True)
            elif target.is_contiguous() and size <= _MOST_MARKS * values.numel():
                run_kernel("put:put_last", _put_last, target, places, values)
            else:
                _put_last(target, places, values)
        except (IndexError, RuntimeError):  # on a CPU; on CUDA the device reports it later
            raise_as_original(bound)

    return Update(write)


def _put_last(target: Tensor, places: Tensor, values: Tensor) -> None:
    # All values for one place become equal, so the order of the writes has no effect.
    wrapped = torch.where(places < 0, places + target.numel(), places)
    last = find_last(wrapped, target.numel() + 1)
    _put(target, places, values.index_select(0, last), accumulate=False)


def _put(target: Tensor, places: Tensor, values: Tensor, *, accumulate: bool) -> None:
    size = target.numel()
    places = torch.where(places < 0, places + size, places)
    places = torch.where(places < 0, size, places)  # out of range for index_put_ too
    flat = target.is_contiguous()
    indices = (places,) if flat else unravel(places, target.shape)
    (target.view(-1) if flat else target).index_put_(indices, values, accumulate=accumulate)


def max_unpool2d(
    original: Original, self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Tensor:
    """Return zeros with each value at the position in its plane that its index names."""
    return _unpool(partial(original, self, indices, output_size), self, indices, output_size, 2)


def max_unpool3d(
    original: Original,
    self: Tensor,
    indices: Tensor,
    output_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return zeros with each value at the position in its volume that its index names."""
    bound = partial(original, self, indices, output_size, stride, padding)
    if len(stride) != 3 or len(padding) != 3 or min(stride) < 1:  # noqa: PLR2004 - a number of dimensions
        raise_as_original(bound)
    return _unpool(bound, self, indices, output_size, 3)


def _unpool(
    bound: Original, self: Tensor, indices: Tensor, output_size: Sequence[int], dims: int
) -> Tensor:
    if (
        self.dim() not in (dims + 1, dims + 2)
        or indices.dtype != torch.int64
        or indices.shape != self.shape
        or len(output_size) != dims
        or min(self.shape[-dims - 1 :]) < 1
        or not self.is_floating_point()
    ):
        raise_as_original(bound)
    reference = partial(_write_last, bound)
    return run_kernel("put:unpool", reference, self, indices, output_size)


def _write_last(
    bound: Original, self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Tensor:
    dims = len(output_size)
    planes = prod(self.shape[:-dims])
    size = prod(self.shape[-dims:])
    values, places = self.reshape(planes, size), indices.reshape(planes, size)
    ranks = torch.arange(size, device=self.device).expand_as(places)
    # The greatest of some integers does not depend on their order.
    last = places.new_full((planes, prod(output_size)), -1)
    try:
        last.scatter_reduce_(1, places, ranks, "amax")
    except RuntimeError:
        raise_as_original(bound)  # an index lies outside its plane
    result = torch.where(last >= 0, values.gather(1, last.clamp(min=0)), 0)
    return cast_like(result.view(*self.shape[:-dims], *output_size), self, keep_format=False)
