"""Probes: digests of values in the order of execution, as records of a ledger.

Framework-free: hooks pass values as (kind, name, value).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, TypeVar

from lightning_d9m.engine.hashing.digest import DigestQueue
from lightning_d9m.engine.hashing.nested_values import list_pytree_leaves
from lightning_d9m.engine.ledger.format.records import (
    DIGEST_BYTES,
    ProbeKey,
    ProbeLayout,
    ProbesRecord,
)
from lightning_d9m.engine.probes.training import ProbePoint

# 64 KiB of digests: a record passes to the kernel in one call, and a killed run loses one.
RECORD_PLACES = 4096
# Longer names are cut; places whose cut names are equal count as calls of one place.
_LONGEST_NAME = 4000
# The most layouts that are remembered, two million places: a model whose operations differ from
# batch to batch would otherwise fill the memory.
_MOST_LAYOUTS = 512

# Batches of at most RECORD_PLACES places that end within this time are written together: in the
# cold caches of a training step, a first record costs several times as much as a further one.
_WRITE_SECONDS = 0.1

Write = Callable[[ProbeLayout | ProbesRecord], None]
Save = Callable[[ProbePoint, ProbeKey, object], None]
Leaves = Sequence[tuple[str, object]]
Take = Callable[[str, Leaves], object]
"""Receives probed values: their kind, and each with the name of its place."""


def name_leaves(name: str, value: object) -> Leaves:
    """Return each leaf of a value, with the name of its place."""
    leaves = list_pytree_leaves(value)
    return [(f"{name}:{path}" if path else name, leaf) for path, leaf in leaves]


class Trace:
    """The places of a batch in order, and the digests of their values.

    Attributes:
        queue: The digests.
        places: Kind, name and call of each place.
        problem: The first place whose value cannot be read as a whole, and why; None without one.
    """

    def __init__(self) -> None:
        self.queue = DigestQueue()
        self.places: list[ProbeKey] = []
        self.problem: str | None = None
        self._calls: dict[tuple[str, str], int] = {}

    def add_leaves(self, kind: str, leaves: Leaves) -> None:
        """Take values, in one launch for each device."""
        reasons: dict[int, str] = {}
        self.queue.add_leaves((leaf for _, leaf in leaves), reasons.setdefault)
        for number, reason in reasons.items() if self.problem is None else ():
            self.problem = self.problem or f"{kind} {leaves[number][0]}: {reason}"
        for name, _ in leaves:
            key = (kind, name[:_LONGEST_NAME])
            call = self._calls.get(key, 0)
            self._calls[key] = call + 1
            self.places.append((*key, call))


class ProbeCollector:
    """Writes the probes of each batch as records ``layout`` and ``probes``.

    Bytes are read when a value is added. Records are written in the order of batches; those of
    short batches are written together. On CUDA the digests of a batch are fetched when the next one
    ends, so that the device never waits for the host.

    ``write`` takes the records, and ``save`` saves the value at each place; None saves nothing.
    """

    def __init__(self, write: Write, save: Save | None = None) -> None:
        self._write = write
        self._save = save
        self._paused = False
        self._moment: ProbePoint | None = None
        self._trace = Trace()
        self._waiting: list[tuple[ProbePoint, Trace]] = []
        self._written = -math.inf  # time of the last write, by the monotonic clock
        self._layouts: dict[tuple[ProbeKey, ...], int] = {}

    @property
    def is_paused(self) -> bool:
        """True during a probe's own work."""
        return self._paused

    @property
    def listens(self) -> bool:
        """True if values are taken now: within a batch, and not during a probe's own work."""
        return self._moment is not None and not self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take nothing while the body runs."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def begin(self, moment: ProbePoint) -> None:
        """Begin a batch; a batch that was not ended is ended first."""
        self.end()
        self._moment = moment
        self._trace = Trace()

    def add(self, kind: str, name: str, value: object) -> None:
        """Take the value at a place; do nothing outside batches."""
        self.add_leaves(kind, name_leaves(name, value) if self.listens else ())

    def add_leaves(self, kind: str, leaves: Leaves) -> None:
        """Take values, in one launch for each device."""
        if self._moment is None or not self.listens:
            return
        trace = self._trace
        before = len(trace.places)
        with self.paused():
            trace.add_leaves(kind, leaves)
            if self._save is not None:
                for place, (_, value) in zip(trace.places[before:], leaves, strict=True):
                    self._save(self._moment, place, value)

    def end(self) -> None:
        """End the batch; write its record and those before it if the last write is old enough."""
        moment, trace, self._moment = self._moment, self._trace, None
        if moment is None:
            return
        if trace.places:
            if trace.queue.pending:
                trace.queue.start_copies()
            self._waiting.append((moment, trace))
        now = time.monotonic()
        waiting = sum(len(trace.places) for _, trace in self._waiting)
        if now - self._written >= _WRITE_SECONDS or waiting >= RECORD_PLACES:
            self._written = now
            self.catch_up(keep=moment)

    def close(self) -> None:
        """End the batch and write all records."""
        self.end()
        self.catch_up()

    def catch_up(self, keep: ProbePoint | None = None) -> None:
        """Write the batches that have ended; keep one whose digests a device still computes."""
        while self._waiting:
            moment, trace = self._waiting[0]
            if trace.queue.pending and moment is keep:
                break
            del self._waiting[0]
            digests = bytes.fromhex("".join(trace.queue.fetch()))
            for start in range(0, len(trace.places), RECORD_PLACES):
                stop = start + RECORD_PLACES
                sequence = tuple(trace.places[start:stop])
                if sequence not in self._layouts:
                    if len(self._layouts) == _MOST_LAYOUTS:
                        self._layouts.clear()
                    number = len(self._layouts)
                    # Known only when it is written: an interruption may come between the two.
                    self._write(ProbeLayout(number, sequence))
                    self._layouts[sequence] = number
                record = ProbesRecord(
                    epoch=moment.epoch,
                    step=moment.step,
                    batch=moment.batch,
                    layout=self._layouts[sequence],
                    digests=digests[DIGEST_BYTES * start : DIGEST_BYTES * stop],
                    problem=trace.problem,
                )
                self._write(record)


Value = TypeVar("Value")


class _Monitors:
    """The listener to the probes that users place in a model; None while nothing listens."""

    listener: ClassVar[Callable[[str, object], None] | None] = None


def monitor(value: Value, name: str) -> Value:
    """Record a value under a name while probes of the kind ``"monitor"`` are on.

    Args:
        value: A tensor, number, string, None, any other object, or containers of these. It is
            returned unchanged, so gradients pass, and an expression can be monitored in place.
        name: The name of the place in ledgers and reports.

    Examples:
        >>> monitor(3, "three")
        3
    """
    if _Monitors.listener is not None:
        _Monitors.listener(name, value)
    return value


@contextmanager
def monitors_heard(listener: Callable[[str, object], None]) -> Iterator[None]:
    """Call ``listener`` with (name, value) for each monitor, until the body ends."""
    before, _Monitors.listener = _Monitors.listener, listener
    try:
        yield
    finally:
        _Monitors.listener = before
