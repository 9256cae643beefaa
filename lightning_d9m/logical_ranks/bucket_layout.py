"""Assign gradients to buckets by the order, size, dtype and device of the parameters alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.errors import SettingError

# Vectorized reductions (the norm of a gradient that is clipped) add in a different order at an
# address that is not aligned like a separate allocation.
ALIGNMENT_BYTES = 64
# A gradient of at least this size is packed as soon as it arrives: it is still in the cache, and
# the next gradient reuses its memory. Smaller ones are packed in one call, which costs less, and so
# they follow the large ones in their bucket.
_LARGE_BYTES = 2**16
# The first bucket is small, as in DDP, so that the first reduction starts early.
_FIRST_BYTES = 2**20


@dataclass(slots=True)
class Slot:
    """One parameter's range of a bucket's buffer, and the view of it."""

    name: str
    parameter: Parameter
    start: int
    stop: int
    view: Tensor

    def describe(self) -> str:
        """Return the name and layout, which must be the same on every process."""
        return f"{self.name} {tuple(self.view.shape)} {self.view.dtype} {self.start}"


@dataclass(slots=True)
class Bucket:
    """A flat buffer, its slots, and the gradients that the current backward pass has produced.

    Attributes:
        index: The number of the bucket, the same on every rank.
        flat: The buffer; slots begin at multiples of 64 bytes, with zeros between. One flag per
            slot may follow.
        slots: One slot per parameter, the large parameters first.
        large: The number of large parameters.
        fired: Positions of the slots whose gradients have arrived.
        packed: Positions of the slots whose gradients are in the buffer.
    """

    index: int
    flat: Tensor
    slots: list[Slot]
    large: int
    fired: set[int] = field(default_factory=set)
    packed: set[int] = field(default_factory=set)

    @property
    def flags(self) -> Tensor:
        """The elements after the last slot."""
        return self.flat[self.slots[-1].stop :]

    @property
    def is_complete(self) -> bool:
        """Whether every gradient has arrived."""
        return len(self.fired) == len(self.slots)

    def find_runs(self) -> Iterator[Sequence[int]]:
        """Yield runs of consecutive positions whose gradients have arrived."""
        if self.is_complete:
            yield range(len(self.slots))
            return
        # The difference to a counter is constant along a run of consecutive positions.
        numbered = enumerate(sorted(self.fired))
        for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]):
            yield [position for _, position in run]


def lay_out(
    parameters: Sequence[tuple[str, Parameter]], bucket_bytes: int, *, with_flags: bool = False
) -> list[Bucket]:
    """Lay out buckets in reverse order of registration, in which gradients tend to arrive.

    Args:
        parameters: Names and parameters in their order of registration.
        bucket_bytes: Size at which a bucket is closed, in bytes. The first bucket of each dtype and
            device is closed at 1 MiB. With 0, each parameter has its own bucket.
        with_flags: Let one more element per parameter follow the slots of a bucket.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[str, Parameter]]] = {}
    for name, parameter in reversed(parameters):
        by_kind.setdefault((parameter.device, parameter.dtype), []).append((name, parameter))
    buckets: list[Bucket] = []
    for (device, dtype), members in by_kind.items():
        for chunk in _chunks(members, bucket_bytes):
            buckets.append(_make_bucket(len(buckets), chunk, device, dtype, with_flags))
    return buckets


def _chunks(
    members: Sequence[tuple[str, Parameter]], limit: int
) -> Iterator[list[tuple[str, Parameter]]]:
    """Yield chunks of at least ``limit`` bytes, the first of at least ``_FIRST_BYTES``."""
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
    with_flags: bool,
) -> Bucket:
    step = max(1, ALIGNMENT_BYTES // members[0][1].element_size())
    members = sorted(members, key=lambda member: not _is_large(member[1]))
    starts = [0]
    for _, parameter in members:
        starts.append(starts[-1] + -(-parameter.numel() // step) * step)
    flat = torch.zeros(starts[-1] + with_flags * len(members), dtype=dtype, device=device)
    slots = []
    for (name, parameter), start, stop in zip(members, starts[:-1], starts[1:], strict=True):
        view = view_like(flat, start, parameter)
        slots.append(Slot(name, parameter, start, stop, view))
    large = sum(_is_large(parameter) for _, parameter in members)
    return Bucket(index, flat, slots, large)


def _is_large(parameter: Parameter) -> bool:
    return parameter.nbytes >= _LARGE_BYTES


def view_like(flat: Tensor, start: int, parameter: Parameter) -> Tensor:
    """Return a view with the parameter's shape and, for channels_last, its strides."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(parameter.dim())
    if last is not None and parameter.is_contiguous(memory_format=last):
        return flat.as_strided(parameter.shape, parameter.stride(), start)
    return flat[start : start + parameter.numel()].view(parameter.shape)


def check_options(*, op: str, bucket_bytes: int) -> None:
    """Check the arguments of a sum of gradients.

    Raises:
        SettingError: A value is not allowed.
    """
    if op not in {"average", "sum"}:
        raise SettingError(f"op={op!r} is not known: pass 'average' or 'sum'.")
    if type(bucket_bytes) is not int or bucket_bytes < 0:
        raise SettingError(
            f"bucket_bytes={bucket_bytes!r} is not allowed: pass a whole number, 0 or more."
        )


def refuse_second_gradient(name: str) -> NoReturn:
    """Raise an error about a gradient that came after the sum had taken the first one."""
    raise SettingError(
        f"The parameter {name!r} got a second gradient in one backward pass, after its first was "
        "added to the sum. Reentrant activation checkpointing of a shared parameter does that: "
        "pass use_reentrant=False to torch.utils.checkpoint."
    )
