"""The four arms of ``d9m audit ops``, and the measuring of one case in them."""

import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.audit.ops.case import Call, Case, Inputs, NotHereError
from lightning_d9m.comparison.variability import SpreadMeter, measure_variation
from lightning_d9m.control.torch_flags import algorithms_switched, capture_flags, restore_flags
from lightning_d9m.patches.catalog.catalog import OPS
from lightning_d9m.patches.catalog.torch_docs import Line, find_lines
from lightning_d9m.patches.registration import patches_applied

CONDITIONS = ("default", "deterministic", "ours")
_OFFERED = {op.name for op in OPS if op.status == "offered"}
_FEWEST_RUNS = 3
_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_MISSING = re.compile(r"not implemented|could not run|not supported|unsupported", re.IGNORECASE)
_REFUSED = "does not have a deterministic implementation"


@dataclass(frozen=True)
class Budget:
    """How long one arm of one case may go on.

    Attributes:
        runs: Number of runs, from 2.
        seconds: After so many seconds no further run begins, from the third on.
    """

    runs: int
    seconds: float


def begin_row(case: Case, device: str, dtype: str, lines: tuple[Line, ...]) -> dict[str, Any]:
    """Return what is known of a case before it is measured."""
    documented = find_lines(lines, case.documented, torch.device(device).type)
    return {
        "key": case.key(dtype),
        "op": case.op,
        "entry": case.entry or case.op,
        "parameters": dict(case.parameters),
        "dtype": dtype,
        "documented": [line.kind for line in documented],
    }


def measure_case(case: Case, device: str, dtype: str, budget: Budget) -> dict[str, Any]:
    """Run one case in all arms and return what each gave; whatever goes wrong is part of it."""
    kind = torch.device(device).type
    if case.devices and kind not in case.devices:
        reason = f"The op is of {' and '.join(case.devices)} only."
        return {arm: {"outcome": "missing", "reason": reason} for arm in (*CONDITIONS, "oracle")}
    arms: dict[str, Any] = {}
    measured = getattr(torch, dtype)
    results: dict[str, tuple[Tensor, ...]] = {}
    oracle = Inputs("cpu", torch.float64, measured)
    arms["oracle"] = _attempt(
        lambda: _measure(case.make(oracle), "cpu", Budget(2, 0.0), results, "oracle"), _oracle()
    )
    for arm in CONDITIONS:
        inputs = Inputs(device, measured)
        arms[arm] = _attempt(
            lambda inputs=inputs, arm=arm: _measure(  # type: ignore[misc]
                case.make(inputs), device, budget, results, arm
            ),
            _enter(arm, kind, case.op),
        )
    _relate(arms, results)
    return arms


def _attempt(
    measure: Callable[[], dict[str, Any]], arm: AbstractContextManager[object]
) -> dict[str, Any]:
    try:
        with arm:
            return {"outcome": "ran", **measure()}
    except (NotHereError, NotImplementedError) as error:
        return _failure("missing", error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _failure("out of memory", error)
    except Exception as error:  # noqa: BLE001 - an op may raise anything; it is what is measured
        text = str(error)
        if _REFUSED in text:
            return _failure("raised", error)
        if _MEMORY.search(text):
            return _failure("out of memory", error)
        return _failure("missing" if _MISSING.search(text) else "failed", error)


def _failure(outcome: str, error: Exception) -> dict[str, Any]:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return {"outcome": outcome, "reason": f"{type(error).__name__}: {first[:300]}"}


def _measure(
    call: Call, device: str, budget: Budget, results: dict[str, tuple[Tensor, ...]], arm: str
) -> dict[str, Any]:
    meter = SpreadMeter()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < budget.runs and (
        len(times) < _FEWEST_RUNS or time.perf_counter() - begin < budget.seconds
    ):
        _disturb(device, len(times))
        start = time.perf_counter()
        output = call()
        _wait(device)
        times.append(time.perf_counter() - start)
        tensors = output if isinstance(output, tuple) else (output,)
        results.setdefault(arm, tuple(tensor.detach().clone() for tensor in tensors))
        meter.add(tensors)
    # The first call also loads and chooses kernels: its output counts, its time does not.
    micros = statistics.median(times[1:]) * 1e6
    return {"spread": meter.spread().as_record(), "microseconds": round(micros, 2)}


def _disturb(device: str, turn: int) -> None:
    """Let another stream compete for the device, differently each turn, as other work does."""
    if torch.device(device).type == "cuda":
        with torch.cuda.stream(_side_stream(device)):
            noise = torch.ones(512, 512, device=device)
            for _ in range(turn % 4):
                noise @ noise


_streams: dict[str, torch.cuda.Stream] = {}


def _side_stream(device: str) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _wait(device: str) -> None:
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def _relate(arms: dict[str, dict[str, Any]], results: dict[str, tuple[Tensor, ...]]) -> None:
    """Add each arm's time over the default's, and its distance from the oracle."""
    base = arms["default"].get("microseconds")
    for arm in CONDITIONS:
        if arms[arm]["outcome"] != "ran":
            continue
        if base:
            arms[arm]["ratio"] = round(arms[arm]["microseconds"] / base, 3)
        if "oracle" in results:
            arms[arm]["error"] = _measure_error(results["oracle"], results[arm])


def _measure_error(oracle: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> float | None:
    """Return Vermv against the rounded oracle; None of an output without floating point."""
    pairs = [
        (wide.to(tensor.dtype), tensor.cpu())
        for wide, tensor in zip(oracle, results, strict=True)
        if tensor.is_floating_point()  # which of equal elements an index names is no error
    ]
    if not pairs:
        return None
    exact, actual = zip(*pairs, strict=True)
    return measure_variation(exact, actual).vermv


def _enter(arm: str, kind: str, op: str) -> AbstractContextManager[object]:
    if arm == "default":
        return _plain()
    return _flagged() if arm == "deterministic" else _ours(kind, op)


@contextmanager
def _plain() -> Iterator[None]:
    before = capture_flags()
    torch.use_deterministic_algorithms(mode=False)
    try:
        yield
    finally:
        restore_flags(before)


@contextmanager
def _flagged() -> Iterator[None]:
    """Do what torch's documentation says, and no more."""
    before = capture_flags()
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        restore_flags(before)


@contextmanager
def _ours(kind: str, op: str) -> Iterator[None]:
    """Do what a session does that patches the ops; what is only offered is taken."""
    include = [op] if op in _OFFERED else []
    with (
        algorithms_switched(fill_uninitialized_memory=True),
        patches_applied(kind.upper(), include=include),
    ):
        yield


@contextmanager
def _oracle() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _plain():
            yield
    finally:
        torch.set_num_threads(threads)
