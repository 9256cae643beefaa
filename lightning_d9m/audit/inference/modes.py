"""Modes of evaluation: as it is, in one shape, sample by sample; what each gives, and its cost."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_d9m.audit.inference.batches import list_batches
from lightning_d9m.audit.inference.subject import Subject
from lightning_d9m.audit.inference.trace import ModuleTrace, ModuleValue
from lightning_d9m.hashing.digest import digest_value

_TIMINGS = 9


def count_outputs(
    subject: Subject,
    sizes: Sequence[int],
    evaluate: Callable[[Sequence[int]], list[str | None]],
) -> tuple[int, dict[int, int]]:
    """Evaluate without hooks; return the most distinct outputs of a sample, and what differs.

    Args:
        subject: The model and its samples.
        sizes: The batch sizes, 1 first.
        evaluate: Gives the digest of each sample of a batch.

    Returns:
        The greatest number of distinct outputs that a sample had, 0 where the outputs cannot be
        told apart by sample; and by batch size the number of samples that had other bits than
        alone.
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
    """Return, by mode, what evaluates a batch: as it is, in one shape, and sample by sample."""
    shapes: dict[ModuleValue, torch.Size] = {}

    def as_it_is(indices: Sequence[int]) -> list[str | None]:
        trace = ModuleTrace(len(indices), shapes)
        trace.note("output", "", subject.call(subject.collate(indices)))
        if any(rows is None for rows in trace.rows.values()) or not trace.rows:
            return [None] * len(indices)
        columns = [rows for rows in trace.rows.values() if rows is not None]
        return [digest_value(list(row)) for row in zip(*columns, strict=True)]

    def fixed_shape(indices: Sequence[int]) -> list[str | None]:
        if not shapes:
            as_it_is(indices[:1])
        filled = [*indices, *[indices[-1]] * (size - len(indices))]
        return as_it_is(filled)[: len(indices)]

    def per_sample(indices: Sequence[int]) -> list[str | None]:
        return [as_it_is([index])[0] for index in indices]

    return {"as it is": as_it_is, "fixed shape": fixed_shape, "per sample": per_sample}


def time_modes(subject: Subject, size: int) -> dict[str, tuple[float, float]]:
    """Return by mode the microseconds of a sample in a full batch, and of one that comes alone."""
    batch = subject.collate(range(size))
    singles = [subject.collate([sample]) for sample in range(size)]

    def whole() -> Any:
        return subject.call_unseeded(batch)

    def one_by_one() -> Any:
        return [subject.call_unseeded(single) for single in singles]

    together, apart = _time(whole) * 1e6, _time(one_by_one) * 1e6 / size
    # A full batch has the fixed shape as it is; a lone sample is filled up to it.
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
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
