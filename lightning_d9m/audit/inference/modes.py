"""Modes of evaluation (unchanged, fixed shape, sample by sample), with their outputs and costs."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_d9m.audit.inference.subject import Subject, list_batches
from lightning_d9m.audit.inference.trace import ModuleTrace, ModuleValue
from lightning_d9m.compatibility import find_accelerator, synchronize
from lightning_d9m.hashing.digest import digest_value

_TIMINGS = 9


def count_distinct_outputs(
    subject: Subject,
    sizes: Sequence[int],
    evaluate: Callable[[Sequence[int]], list[str | None]],
) -> tuple[int, dict[int, int]]:
    """Evaluate without hooks, and count distinct outputs and differing samples.

    Returns:
        The greatest number of distinct outputs of a sample, 0 if the outputs cannot be assigned to
        samples; and by batch size the number of samples whose output differs from that of a batch
        of one.
    """
    seen: list[set[str]] = [set() for _ in subject.samples]
    alone: dict[int, str] = {}
    differing: dict[int, set[int]] = {size: set() for size in sizes}
    for size in sizes:
        for indices in list_batches(len(subject.samples), size):
            for sample, digest in zip(indices, evaluate(indices), strict=True):
                if digest is None:
                    return 0, {}
                seen[sample].add(digest)
                if digest != alone.setdefault(sample, digest):
                    differing[size].add(sample)
    return max(map(len, seen)), {size: len(found) for size, found in differing.items()}


def make_evaluators(
    subject: Subject, size: int
) -> dict[str, Callable[[Sequence[int]], list[str | None]]]:
    """Return a function for each mode that evaluates a batch."""
    shapes: dict[ModuleValue, torch.Size] = {}

    def as_it_is(indices: Sequence[int]) -> list[str | None]:
        trace = ModuleTrace(len(indices), shapes)
        trace.record("output", "", subject.call(subject.collate(indices)))
        if any(rows is None for rows in trace.rows.values()) or not trace.rows:
            return [None] * len(indices)
        columns = [rows for rows in trace.rows.values() if rows is not None]
        return [digest_value([digests[0] for digests in row]) for row in zip(*columns, strict=True)]

    def fixed_shape(indices: Sequence[int]) -> list[str | None]:
        if not shapes:
            as_it_is(indices[:1])
        filled = [*indices, *[indices[-1]] * (size - len(indices))]
        return as_it_is(filled)[: len(indices)]

    def per_sample(indices: Sequence[int]) -> list[str | None]:
        return [as_it_is([index])[0] for index in indices]

    return {"as it is": as_it_is, "fixed shape": fixed_shape, "per sample": per_sample}


def time_modes(subject: Subject, size: int) -> dict[str, tuple[float, float]]:
    """Return by mode the microseconds per sample in a full batch, and in a batch of one."""
    batch = subject.collate(range(size))
    singles = [subject.collate([sample]) for sample in range(size)]

    def whole() -> Any:
        return subject.call_unseeded(batch)

    def one_by_one() -> Any:
        return [subject.call_unseeded(single) for single in singles]

    together, apart = _time(whole) * 1e6, _time(one_by_one) * 1e6 / size
    # A full batch has the fixed shape already; a batch of one is padded to it.
    return {
        "as it is": (together / size, apart),
        "fixed shape": (together / size, together),
        "per sample": (apart, apart),
    }


def _time(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(_TIMINGS):
        begin = time.perf_counter()
        call()
        if find_accelerator(available=True) is not None:
            synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
