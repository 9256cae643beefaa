"""Where each gradient lies, decided by the order, size, dtype and device of parameters alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

# A gradient at an odd address takes another path through vectorised reductions (its norm, when it
# is clipped) than one that was allocated for itself.
_ALIGNMENT_BYTES = 64
# A gradient of this size is packed as soon as it is there: it is still in the cache, and what it
# leaves is what the next gradient is allocated from. Smaller ones cost less all in one call, for
# which they lie behind the large ones of their bucket.
_LARGE_BYTES = 2**16
# The first bucket is small, as DDP's is, so that something travels early.
_FIRST_BYTES = 2**20


@dataclass(slots=True)
class Slot:
    """The place of one parameter: a view of its bucket's buffer."""

    name: str
    parameter: Parameter
    start: int
    stop: int
    view: Tensor


@dataclass(slots=True)
class Bucket:
    """A flat buffer, its slots, and how far the present backward pass has filled it.

    Attributes:
        index: Its number, by which all ranks know it.
        flat: The buffer; slots begin at multiples of 64 bytes, with zeros between.
        slots: The places of its parameters, the large ones first.
        large: How many these are.
        fired: Positions of the slots whose gradients have arrived.
        packed: Positions of those that lie in the buffer already.
    """

    index: int
    flat: Tensor
    slots: list[Slot]
    large: int
    fired: set[int] = field(default_factory=set)
    packed: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have arrived."""
        return len(self.fired) == len(self.slots)

    def find_runs(self) -> Iterator[Sequence[int]]:
        """The positions of gradients that have arrived, cut where one is missing."""
        if self.is_complete:
            yield range(len(self.slots))
            return
        # Neighbours have the same difference between their number and their place.
        numbered = enumerate(sorted(self.fired))
        for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]):
            yield [position for _, position in run]


def lay_out(parameters: Sequence[tuple[str, Parameter]], bucket_bytes: int) -> list[Bucket]:
    """Lay out buckets: the parameter registered last comes first, as its gradient arrives first.

    Args:
        parameters: Names and parameters in their order of registration.
        bucket_bytes: A bucket is closed when it holds this many bytes, the first of a kind at 1 MiB
            already; 0 gives each parameter one.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[str, Parameter]]] = {}
    for name, parameter in reversed(parameters):
        by_kind.setdefault((parameter.device, parameter.dtype), []).append((name, parameter))
    buckets: list[Bucket] = []
    for (device, dtype), members in by_kind.items():
        for chunk in _chunks(members, bucket_bytes):
            buckets.append(_make_bucket(len(buckets), chunk, device, dtype))
    return buckets


def _chunks(
    members: Sequence[tuple[str, Parameter]], limit: int
) -> Iterator[list[tuple[str, Parameter]]]:
    """Cut where a bucket holds ``limit`` bytes or more; the first where it holds _FIRST_BYTES."""
    chunk: list[tuple[str, Parameter]] = []
    held = 0
    enough = min(limit, _FIRST_BYTES)
    for name, parameter in members:
        chunk.append((name, parameter))
        held += parameter.numel() * parameter.element_size()
        if held >= enough:
            yield chunk
            chunk, held, enough = [], 0, limit
    if chunk:
        yield chunk


def _make_bucket(
    index: int,
    members: Sequence[tuple[str, Parameter]],
    device: torch.device,
    dtype: torch.dtype,
) -> Bucket:
    step = max(1, _ALIGNMENT_BYTES // members[0][1].element_size())
    members = sorted(members, key=lambda member: not _is_large(member[1]))
    starts = [0]
    for _, parameter in members:
        starts.append(starts[-1] + -(-parameter.numel() // step) * step)
    flat = torch.zeros(starts[-1], dtype=dtype, device=device)
    slots = []
    for (name, parameter), start, stop in zip(members, starts[:-1], starts[1:], strict=True):
        view = _view_like(flat, start, parameter)
        slots.append(Slot(name, parameter, start, stop, view))
    large = sum(_is_large(parameter) for _, parameter in members)
    return Bucket(index, flat, slots, large)


def _is_large(parameter: Parameter) -> bool:
    return parameter.nbytes >= _LARGE_BYTES


def _view_like(flat: Tensor, start: int, parameter: Parameter) -> Tensor:
    """A view with the parameter's shape and, where it is dense, its strides (channels_last)."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(parameter.dim())
    if last is not None and parameter.is_contiguous(memory_format=last):
        return flat.as_strided(parameter.shape, parameter.stride(), start)
    return flat[start : start + parameter.numel()].view(parameter.shape)
