"""The measurement of all cases, each in four conditions.

Each row is appended to a file when it is measured, with what it depends on, so that an interrupted
audit continues there.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.compatibility import synchronize
from lightning_d9m.engine.control.environment import (
    algorithms_switched,
    capture_flags,
    threads_pinned,
    wanted_flags,
)
from lightning_d9m.errors import LedgerError, SettingError, file_errors
from lightning_d9m.ops.patches.registration import patches_applied
from lightning_d9m.tools.audit.ops.cases import Case, Inputs, MeasuredCall, plan_cases
from lightning_d9m.tools.audit.ops.report import CONDITIONS
from lightning_d9m.tools.comparison.numeric_difference import SpreadMeter, measure_variation
from lightning_d9m.tools.launch.progress import StatusLine, describe_left

_FEWEST_RUNS = 3  # the first also loads kernels, so that two give a time
_REFUSED = "does not have a deterministic implementation"


def plan_rows(settings: Mapping[str, Any]) -> tuple[list[tuple[Case, str]], dict[str, Any]]:
    """Return each case with its dtype, and facts about this machine.

    Raises:
        SettingError: torch cannot use the device, or a pattern matches no op.
    """
    device = settings["device"]
    try:
        torch.zeros(1, device=device)
    # torch raises AssertionError if it was built without CUDA.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise SettingError(
            f"--device is {device!r}, on which torch {torch.__version__} cannot create a tensor: "
            f"{first}. Give an available device, such as cpu, cuda or cuda:1."
        ) from error
    cases = [*plan_cases(settings["ops"], settings["dtypes"], quick=settings["quick"])]
    threads = settings["threads"] or torch.get_num_threads()
    return cases, {"torch": torch.__version__, "threads": threads}


def measure_rows(
    folder: Path, plan: Sequence[tuple[Case, str]], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Measure every case that has no row in the folder yet, and return all rows.

    Args:
        folder: The folder of the rows.
        plan: The cases, with their dtypes.
        settings: What the rows depend on; rows with other settings are left alone.

    Raises:
        LedgerError: The folder cannot be written.
    """
    what, path = f"The rows of the audit cannot be written to {folder}", folder / "ops.jsonl"
    with file_errors(LedgerError, what, "Give a different folder with --output."):
        folder.mkdir(parents=True, exist_ok=True)
        done = _read_rows(path, settings)
        start, known = time.monotonic(), len(done)
        pinned = threads_pinned(settings["threads"])
        with pinned, StatusLine() as status, path.open("a") as file:
            for number, (case, dtype) in enumerate(plan, start=1):
                key = case.key(dtype)
                if key in done:
                    continue
                text = f"[{number} of {len(plan)}] {key}"
                # Rows of an earlier audit took no time in this one.
                each = (time.monotonic() - start) / max(1, len(done) - known)
                left = describe_left(each * (len(plan) - len(done)))
                status.update(f"{text}{left if len(done) > known else ''}")
                if not status.live:
                    print(text, file=sys.stderr, flush=True)
                row: dict[str, Any] = {"key": key, "op": case.op, "parameters": {**case.parameters}}
                limits = settings["runs"], settings["seconds"]
                found = measure_case(case, settings["device"], dtype, *limits)
                done[key] = row | {"dtype": dtype, "conditions": found}
                # After a line that an interruption cut, a new one begins.
                file.write(f"\n{json.dumps({'settings': settings, 'row': done[key]})}")
                file.flush()
    return [done[case.key(dtype)] for case, dtype in plan]


def _read_rows(path: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows that were measured with these settings, by their keys."""
    done: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # it was cut
            record = json.loads(line)
            # A row of another version of torch, or of more runs, is not one of this audit.
            if record["settings"] == settings:
                done[record["row"]["key"]] = record["row"]
    return done


def measure_case(case: Case, device: str, dtype: str, runs: int, seconds: float) -> dict[str, Any]:
    """Run one case in all conditions and return the result, or the failure, of each.

    In a condition it runs so often, from 2 times; after ``seconds`` no run from the fourth on
    starts.
    """
    kind = torch.device(device).type
    if case.devices and kind not in case.devices:
        reason = f"The op exists on {' and '.join(case.devices)} only."
        failed = {"outcome": "failed", "reason": reason}
        return dict.fromkeys(CONDITIONS, failed)
    entries: dict[str, Any] = {}
    oracle: tuple[Tensor, ...] | None = None
    for condition in CONDITIONS:
        inputs, limits = Inputs(device, getattr(torch, dtype)), (runs, seconds)
        if condition == "oracle":
            inputs, limits = Inputs("cpu", torch.float64, getattr(torch, dtype)), (2, 0.0)
        try:
            with _enter(condition, kind):
                first, found = _measure(case.make(inputs), inputs.device, *limits)
        except Exception as error:  # noqa: BLE001 - an op may raise any error; it becomes the result
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = f"{type(error).__name__}: {text[:300]}"
            outcome = "raised" if _REFUSED in str(error) else "failed"
            entries[condition] = {"outcome": outcome, "reason": reason}
            continue
        entries[condition] = {"outcome": "ran", **found}
        if condition == "oracle":
            oracle = first
            continue
        # The time over the default's, and the distance from the oracle.
        if base := entries["default"].get("microseconds"):
            entries[condition]["ratio"] = round(found["microseconds"] / base, 3)
        pairs = [
            (wide.to(tensor.dtype), tensor.cpu())
            for wide, tensor in zip(oracle or (), first, strict=oracle is not None)
            if tensor.is_floating_point()  # an index of a different equal element is not an error
        ]
        if pairs:
            exact, actual = zip(*pairs, strict=True)
            entries[condition]["error"] = measure_variation(exact, actual).vermv
    return entries


def _measure(
    call: MeasuredCall, device: str, runs: int, seconds: float
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the first outputs, and the figures of all."""
    # 100 outputs may not fit into memory: it keeps one and the digests of the others.
    meter = SpreadMeter()
    first: tuple[Tensor, ...] = ()
    times: list[float] = []
    side = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
    begin = time.perf_counter()
    while len(times) < runs and (
        len(times) < _FEWEST_RUNS or time.perf_counter() - begin < seconds
    ):
        if side is not None:  # load the device differently each turn, as other work does
            with torch.cuda.stream(side):
                noise = torch.ones(512, 512, device=device)
                for _ in range(len(times) % 4):
                    noise @ noise
        start = time.perf_counter()
        output = call()
        # A call of a device returns before the device is done.
        if torch.device(device).type != "cpu":
            synchronize(device)
        times.append(time.perf_counter() - start)
        tensors = output if isinstance(output, tuple) else (output,)
        first = first or tuple(tensor.detach().clone() for tensor in tensors)
        meter.add(tensors)
    # The first call also loads and selects kernels: its output counts, its time does not.
    micros = statistics.median(times[1:]) * 1e6
    return first, {"spread": asdict(meter.spread()), "microseconds": round(micros, 2)}


@contextmanager
def _enter(condition: str, kind: str) -> Iterator[None]:
    """Set torch's flag, and nothing else; patched, all that a session does and the op's patch."""
    flags, patched = capture_flags(), condition == "patched"
    # The process may have been started with the flag on.
    flags["torch.deterministic_algorithms"] = condition == "deterministic"
    if patched:
        flags = wanted_flags(fill_uninitialized_memory=True)
    with (
        algorithms_switched(flags),
        patches_applied(kind.upper()) if patched else nullcontext(),
        threads_pinned(1 if condition == "oracle" else None),  # the order of additions is fixed
    ):
        yield
