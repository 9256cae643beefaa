"""The four conditions of ``d9m audit ops``, and the measurement of one case in each."""

import re
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.audit.device import check_device
from lightning_d9m.audit.ops.cases import Call, Case, Inputs, NotHereError, list_cases, plan_cases
from lightning_d9m.audit.ops.torch_docs import Line, find_documented_lines, read_documentation
from lightning_d9m.comparison.numeric_difference import SpreadMeter, measure_variation
from lightning_d9m.compatibility import synchronize
from lightning_d9m.control.environment import (
    algorithms_switched,
    capture_flags,
    restore_flags,
    wanted_flags,
)
from lightning_d9m.patches.registration import patches_applied

CONDITIONS = ("default", "deterministic", "patched")
_FEWEST_RUNS = 3
_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_MISSING = re.compile(r"not implemented|could not run|not supported|unsupported", re.IGNORECASE)
_REFUSED = "does not have a deterministic implementation"


def plan_rows(settings: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the row of each case without its conditions, and facts about this machine.

    Raises:
        SettingError: torch cannot use the device, or a pattern matches no op.
    """
    check_device(settings["device"])
    cases = list(plan_cases(settings["ops"], settings["dtypes"], quick=settings["quick"]))
    lines = read_documentation(torch.use_deterministic_algorithms.__doc__ or "")
    known = {name for case in list_cases() for name in case.documented}
    facts = {
        "torch": torch.__version__,
        "threads": settings["threads"] or torch.get_num_threads(),
        "unknown": [
            line.text
            for line in lines
            if not find_documented_lines((line,), known, (line.devices or ("cpu",))[0])
        ],
    }
    return [begin_row(case, settings["device"], dtype, lines) for case, dtype in cases], facts


def begin_row(case: Case, device: str, dtype: str, lines: tuple[Line, ...]) -> dict[str, Any]:
    """Return the fields of a case's row that are known before the measurement."""
    documented = find_documented_lines(lines, case.documented, torch.device(device).type)
    return {
        "key": case.key(dtype),
        "op": case.op,
        "parameters": dict(case.parameters),
        "dtype": dtype,
        "documented": [line.kind for line in documented],
    }


def measure_case(case: Case, device: str, dtype: str, runs: int, seconds: float) -> dict[str, Any]:
    """Run one case in all conditions and return the result, or the failure, of each.

    In a condition it runs so often, from 2 times; after ``seconds`` no run from the fourth on
    starts.
    """
    kind = torch.device(device).type
    if case.devices and kind not in case.devices:
        reason = f"The op exists on {' and '.join(case.devices)} only."
        missing = {"outcome": "missing", "reason": reason}
        return dict.fromkeys((*CONDITIONS, "oracle"), missing)
    entries: dict[str, Any] = {}
    oracle: tuple[Tensor, ...] | None = None
    for condition in ("oracle", *CONDITIONS):
        inputs, limits = Inputs(device, getattr(torch, dtype)), (runs, seconds)
        if condition == "oracle":
            inputs, limits = Inputs("cpu", torch.float64, getattr(torch, dtype)), (2, 0.0)
        try:
            with _enter(condition, kind):
                first, found = _measure(case.make(inputs), inputs.device, *limits)
        except Exception as error:  # noqa: BLE001 - an op may raise any error; it becomes the result
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = f"{type(error).__name__}: {text[:300]}"
            entries[condition] = {"outcome": _name_outcome(error), "reason": reason}
            continue
        entries[condition] = {"outcome": "ran", **found}
        if condition == "oracle":
            oracle = first
            continue
        # The time over the default's, and the distance from the oracle.
        if base := entries["default"].get("microseconds"):
            entries[condition]["ratio"] = round(found["microseconds"] / base, 3)
        if oracle is not None:
            entries[condition]["error"] = _measure_error(oracle, first)
    return entries


def _name_outcome(error: Exception) -> str:
    if isinstance(error, (NotHereError, NotImplementedError)):
        return "missing"
    if _REFUSED in str(error):
        return "raised"
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if memory or _MEMORY.search(str(error)):
        return "out of memory"
    return "missing" if _MISSING.search(str(error)) else "failed"


def _measure(
    call: Call, device: str, runs: int, seconds: float
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the first outputs, and the figures of all."""
    meter = SpreadMeter()
    first: tuple[Tensor, ...] = ()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < runs and (
        len(times) < _FEWEST_RUNS or time.perf_counter() - begin < seconds
    ):
        _disturb(device, len(times))
        start = time.perf_counter()
        output = call()
        if torch.device(device).type != "cpu":
            synchronize(device)
        times.append(time.perf_counter() - start)
        tensors = output if isinstance(output, tuple) else (output,)
        first = first or tuple(tensor.detach().clone() for tensor in tensors)
        meter.add(tensors)
    # The first call also loads and selects kernels: its output counts, its time does not.
    micros = statistics.median(times[1:]) * 1e6
    return first, {"spread": asdict(meter.spread()), "microseconds": round(micros, 2)}


def _disturb(device: str, turn: int) -> None:
    """Load the device from a second stream, differently each turn, as other work does."""
    if torch.device(device).type == "cuda":
        with torch.cuda.stream(_side_stream(device)):
            noise = torch.ones(512, 512, device=device)
            for _ in range(turn % 4):
                noise @ noise


@cache
def _side_stream(device: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _measure_error(oracle: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> float | None:
    """Return Vermv against the rounded oracle, or None if no output is floating point."""
    pairs = [
        (wide.to(tensor.dtype), tensor.cpu())
        for wide, tensor in zip(oracle, results, strict=True)
        if tensor.is_floating_point()  # an index of a different equal element is not an error
    ]
    if not pairs:
        return None
    exact, actual = zip(*pairs, strict=True)
    return measure_variation(exact, actual).vermv


@contextmanager
def _enter(condition: str, kind: str) -> Iterator[None]:
    """Set torch's flag, and nothing else; patched, all that a session does and the op's patch."""
    if condition == "patched":
        wanted = wanted_flags(fill_uninitialized_memory=True)
        with algorithms_switched(wanted), patches_applied(kind.upper()):
            yield
        return
    flags, threads = capture_flags(), torch.get_num_threads()
    torch.use_deterministic_algorithms(mode=condition == "deterministic")
    if condition == "oracle":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if condition == "oracle":
            torch.set_num_threads(threads)
        restore_flags(flags)
