"""Probes: digests of values in the order in which a training meets them, as records of a ledger.

Framework-free: whoever knows where values appear hands them in, as (kind, name, value).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch

from lightning_d9m.errors import DigestError
from lightning_d9m.hashing.digest import digest_value
from lightning_d9m.hashing.model_tensors import Standing
from lightning_d9m.hashing.pending import DigestQueue
from lightning_d9m.hashing.pytree_leaves import list_pytree_leaves
from lightning_d9m.ledger.records import Json

MOST_PLACES = 4096
# What comes after is left out; places that are then called alike are calls of one.
_LONGEST_NAME = 4000
# How many places the remembered layouts may have in all; a model whose operations differ from batch
# to batch would otherwise fill the memory.
_REMEMBERED_PLACES = 2_000_000

# Batches that end within so many seconds, and have no more than MOST_PLACES, are written together:
# among the cold caches of a training step a record costs several times what a further one costs.
_TOGETHER_SECONDS = 0.1

_Met = tuple[str, str]  # kind and name
ProbeKey = tuple[str, str, int]
Write = Callable[[Mapping[str, Json]], None]


class ProbePoint(NamedTuple):
    """A batch of the training: epoch, global step when it began, and index within the epoch."""

    epoch: int
    step: int
    batch: int


Save = Callable[[ProbePoint, ProbeKey, Mapping[str, Any]], None]


class Listener(Protocol):
    """What values are handed to."""

    def add(self, kind: str, name: str, value: object) -> None:
        """Take a value that was met at a place."""
        ...

    def add_tensors(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors by name, together."""
        ...


class Trace:
    """The places of a batch in order, and the digests of what was met there.

    Attributes:
        queue: The digests.
        met: Kind and name of each place.
    """

    def __init__(self) -> None:
        self.queue = DigestQueue()
        self.met: list[_Met] = []
        self._places: list[ProbeKey] = []
        self._calls: dict[_Met, int] = {}
        self._goes_on = False

    @property
    def places(self) -> list[ProbeKey]:
        """The places; calls are counted when this is asked for, and in most batches it is not."""
        self._count()
        return self._places

    def sequence(self, start: int, stop: int) -> tuple[_Met | ProbeKey, ...]:
        """Return what the places from ``start`` up to ``stop`` follow from."""
        whole = start == 0 and not self._goes_on
        return tuple(self.met[:stop] if whole else self.places[start:stop])

    def add(self, kind: str, name: str, value: object) -> None:
        """Take a value; each of its leaves gets a place of its own.

        A leaf whose bytes are not defined counts by its type.
        """
        leaves = [("", value)] if isinstance(value, torch.Tensor) else list_pytree_leaves(value)
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                try:
                    self.queue.add_one(leaf)
                except DigestError:
                    self.queue.add_digest(digest_value(type(leaf)))
            else:
                self.queue.add_digest(_digest_leaf(leaf))
            self.met.append((kind, f"{name}:{path}" if path else name))

    def add_tensors(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors by name, in one launch for each device."""
        try:
            located = tensors.locate() if isinstance(tensors, Standing) else None
            if located is None:
                self.queue.add(tensors.values())
            else:
                self.queue.add_located(located)
        except DigestError:
            for name, tensor in tensors.items():
                self.add(kind, name, tensor)
        else:
            self.met += zip(repeat(kind), tensors)

    def restart(self) -> "Trace":
        """Return a trace that goes on where this one ends, without its places."""
        self._count()
        other = Trace()
        other._calls = self._calls
        other._goes_on = True
        return other

    def _count(self) -> None:
        for kind, name in self.met[len(self._places) :]:
            key = (kind, name[:_LONGEST_NAME])
            call = self._calls.get(key, 0)
            self._calls[key] = call + 1
            self._places.append((*key, call))


class ProbeCollector:
    """Writes the probes of each batch as records ``layout`` and ``probes``.

    Bytes are read when values are handed in; records are written in the order of batches, those of
    short batches several at once. On CUDA the digests of a batch are fetched when the next one
    ends, so that the device never waits for the host.

    Args:
        write: Takes the records.
        save: Takes each place and what was met there, to keep it; None for nothing.
    """

    def __init__(self, write: Write, save: Save | None = None) -> None:
        self._write = write
        self._save = save
        self._paused = False
        self._busy = False
        self._moment: ProbePoint | None = None
        self._trace = Trace()
        self._waiting: list[tuple[ProbePoint, Trace]] = []
        self._waiting_places = 0
        self._written = -math.inf  # when something was, by the monotonic clock
        self._layouts: dict[tuple[_Met | ProbeKey, ...], int] = {}
        self._next_layout = 0
        self._remembered = 0

    @property
    def saves(self) -> bool:
        """Whether what is met is kept, so that inputs of operations are worth a copy."""
        return self._save is not None

    @property
    def listens(self) -> bool:
        """Whether values are taken now: not between batches, nor of a probe's own work."""
        return self._moment is not None and not self._paused and not self._busy

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take nothing while the body runs."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def begin(self, moment: ProbePoint) -> None:
        """Begin a batch; what was met before it and not ended is written first."""
        self.end()
        self._moment = moment
        self._trace = Trace()

    def add(
        self, kind: str, name: str, value: object, content: Mapping[str, Any] | None = None
    ) -> None:
        """Take a value that was met at a place; outside batches nothing is taken.

        Args:
            kind: One of the kinds of places.
            name: The place's name.
            value: Anything.
            content: What is saved in the place of the value's leaves.
        """
        if self._moment is None or self._paused:
            return
        trace = self._trace
        before = len(trace.met)
        busy, self._busy = self._busy, True
        try:
            trace.add(kind, name, value)
            if self._save is not None:
                self._save_places(trace.places[before:], name, value, content)
        finally:
            self._busy = busy
        if len(trace.met) >= MOST_PLACES:
            self._part(self._moment)

    def add_tensors(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors by name, in one launch for each device."""
        if self._moment is None or self._paused:
            return
        trace = self._trace
        before = len(trace.met)
        busy, self._busy = self._busy, True
        try:
            trace.add_tensors(kind, tensors)
            if self._save is not None:
                for place, tensor in zip(trace.places[before:], tensors.values(), strict=True):
                    self._save(self._moment, place, {"value": tensor})
        finally:
            self._busy = busy
        if len(trace.met) >= MOST_PLACES:
            self._part(self._moment)

    def end(self) -> None:
        """End the batch, and write its record and those before it if it is time to."""
        moment, self._moment = self._moment, None
        if moment is None:
            return
        self._set_aside(moment)
        now = time.monotonic()
        if now - self._written >= _TOGETHER_SECONDS or self._waiting_places >= MOST_PLACES:
            self._written = now
            self._write_waiting(keep=moment)

    def catch_up(self) -> None:
        """Write the records of all batches that have ended."""
        self._write_waiting(keep=None)

    def close(self) -> None:
        """Write everything that is still under way."""
        self.end()
        self.catch_up()

    def _save_places(
        self, places: list[ProbeKey], name: str, value: object, content: Mapping[str, Any] | None
    ) -> None:
        assert self._moment is not None and self._save is not None  # noqa: PT018 - told by add()
        if content is not None and places:
            kind, _, call = places[0]  # of the first leaf
            self._save(self._moment, (kind, name, call), content)
            return
        for place, (_, leaf) in zip(places, list_pytree_leaves(value), strict=True):
            self._save(self._moment, place, {"value": leaf})

    def _part(self, moment: ProbePoint) -> None:
        """Let what the batch has so far become a record of its own."""
        self._set_aside(moment)
        self._trace = self._trace.restart()

    def _set_aside(self, moment: ProbePoint) -> None:
        trace = self._trace
        if trace.met:
            if trace.queue.flights:
                trace.queue.depart()
            self._waiting.append((moment, trace))
            self._waiting_places += len(trace.met)

    def _write_waiting(self, keep: ProbePoint | None) -> None:
        """Write what waits, in order, up to a batch that is kept because a device has it."""
        while self._waiting:
            moment, trace = self._waiting[0]
            if trace.queue.flights and moment is keep:
                return
            del self._waiting[0]
            self._waiting_places -= len(trace.met)
            self._write_trace(moment, trace)

    def _write_trace(self, moment: ProbePoint, trace: Trace) -> None:
        digests = trace.queue.fetch()
        for start in range(0, len(digests), MOST_PLACES):
            stop = start + MOST_PLACES
            record = {
                "kind": "probes",
                "epoch": moment.epoch,
                "step": moment.step,
                "batch": moment.batch,
                "layout": self._layout_of(trace, start, stop),
                "digests": "".join(digests[start:stop]),
            }
            self._write(record)

    def _layout_of(self, trace: Trace, start: int, stop: int) -> int:
        sequence = trace.sequence(start, stop)
        number = self._layouts.get(sequence)
        if number is None:
            if self._remembered > _REMEMBERED_PLACES:
                self._layouts.clear()
                self._remembered = 0
            number = self._layouts[sequence] = self._next_layout
            self._next_layout += 1
            self._remembered += len(sequence)
            entries = [list(place) for place in trace.places[start:stop]]
            self._write({"kind": "layout", "id": number, "places": entries})
        return number


class TraceDifference(NamedTuple):
    """Where two traces differ.

    Attributes:
        place: The first place, in order of execution.
        expected: Its digest in the first trace; None if the place is not there.
        actual: Its digest in the second.
        differing: Number of places that differ.
    """

    place: ProbeKey
    expected: str | None
    actual: str | None
    differing: int


def find_difference(expected: Trace, actual: Trace) -> TraceDifference | None:
    """Hold two traces of the same batch against each other, by place; order does not count."""
    ours = dict(zip(expected.places, expected.queue.fetch(), strict=True))
    theirs = dict(zip(actual.places, actual.queue.fetch(), strict=True))
    places = [*ours, *(place for place in theirs if place not in ours)]
    differing = [place for place in places if ours.get(place) != theirs.get(place)]
    if not differing:
        return None
    first = differing[0]
    return TraceDifference(first, ours.get(first), theirs.get(first), len(differing))


def _digest_leaf(leaf: object) -> str:
    try:
        return digest_value(leaf)
    except DigestError:
        return digest_value(type(leaf))
