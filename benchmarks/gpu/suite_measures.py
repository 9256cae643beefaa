"""Code that the rows of the suite share: settings, times, and outputs beside other work."""

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from suite_journal import Row
from torch import Tensor

from lightning_d9m.engine.hashing.digest import digest_many
from lightning_d9m.ops.patches.registration import patches_applied

AHEAD_CYCLES = 2_000_000  # about a millisecond, in which the host enqueues work ahead of the device

SIDES = (256, 1024, 4096)  # of the matrices that a second stream multiplies
MOST_ALLOCATED = 2**26
HELD = 8  # allocations that are alive at once


class Settings:
    """The choice of ops, the device, and the numbers of calls.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        rounds: The number of timed calls.
        calls: The number of compared calls.
        only: A part of the names of the ops.
    """

    def __init__(self, device: str, rounds: str, calls: str, only: str) -> None:
        self.device, self.rounds, self.calls, self.only = device, int(rounds), int(calls), only


@contextmanager
def deterministic(*, fill: bool = True) -> Iterator[None]:
    """Turn torch's flag on, with or without the fill of uninitialized memory."""
    settings = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(mode=False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make the inputs of workloads in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def patched(settings: Settings, *, fill: bool = True) -> Iterator[None]:
    """Run the body under the settings of a session."""
    with patches_applied(settings.device.upper()), deterministic(fill=fill):
        yield


def measure(call: Callable[[], object], settings: Settings) -> Row:
    """Return medians in microseconds and the peak of new memory in MB, after calls that warm up.

    For the device's time the device is kept busy first, so it does not wait for the host to launch
    kernels; in a training step it does not wait either. The host's time ends at the last launch.
    """
    for _ in range(3 if settings.device == "cuda" else 1):
        call()
    if settings.device == "cpu":
        times = [_time_host(call) for _ in range(settings.rounds)]
        return {"device_us": statistics.median(times), "host_us": None, "peak_mb": None}
    times, host = [], []
    for _ in range(settings.rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)  # noqa: SLF001 - nothing public keeps a device busy
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    for _ in range(settings.rounds):
        torch.cuda.synchronize()
        host.append(_time_host(call))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {
        "device_us": statistics.median(times),
        "host_us": statistics.median(host),
        "peak_mb": peak,
    }


def _time_host(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def list_outputs(outputs: object) -> list[Tensor]:
    """Return the outputs of a call, detached."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return [part.detach() for part in parts if isinstance(part, Tensor)]


class Competitor:
    """Occupies the device from a second stream, and moves the addresses of what is allocated.

    Args:
        device: ``"cuda"`` or ``"cpu"``; on a CPU only addresses move.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._draws = random.Random(0)  # noqa: S311 - for variety
        self._held: deque[torch.Tensor] = deque(maxlen=HELD)
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._matrices = (
            [torch.randn(side, side, device=device) for side in SIDES] if self._stream else []
        )

    def disturb(self, turn: int) -> None:
        """Enqueue between no product and several ones, short and long, and allocate memory."""
        size = self._draws.randrange(1, MOST_ALLOCATED if self._stream else 2**16)
        self._held.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        if self._stream is None or turn % 4 == 0:  # every fourth call runs alone
            return
        with torch.cuda.stream(self._stream):
            for _ in range(self._draws.randrange(1, 4)):
                matrix = self._draws.choice(self._matrices)
                matrix @ matrix


def count_outputs(call: Callable[[], object], settings: Settings) -> int:
    """Return the number of distinct outputs of a call while something competes."""
    return len(collect_outputs(call, settings))


def collect_outputs(call: Callable[[], object], settings: Settings) -> set[tuple[str, ...]]:
    """Return the digests of the distinct outputs of a call while something competes."""
    competitor = Competitor(settings.device)
    seen = set()
    for turn in range(settings.calls):
        competitor.disturb(turn)
        seen.add(tuple(digest_many(list_outputs(call()))))
    return seen


def differ(patched: Sequence[Tensor], original: Sequence[Tensor]) -> float:
    """Return the greatest difference of outputs, over the greatest finite magnitude.

    It is infinite if NaN or an infinity is on one side only.
    """
    worst = 0.0
    for left, right in zip(patched, original, strict=True):
        if not right.numel():
            continue
        mine, other = left.double(), right.to(left.device).double()
        scale = other.nan_to_num(0, 0, 0).abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        is_equal = (mine == other) | (mine.isnan() & other.isnan())
        gap = torch.where(is_equal, 0.0, (mine - other).abs() / scale)
        worst = max(worst, float(gap.nan_to_num(math.inf).max()))
    return worst


def describe(tensors: Sequence[Tensor]) -> list[str]:
    """Return dtype, shape and strides of tensors."""
    return [f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in tensors]
