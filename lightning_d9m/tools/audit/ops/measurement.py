"""The measurement of all cases, each in four conditions, in a worker that may crash.

A worker process is restarted after a case has crashed it. Each row is appended to a file when it is
measured, with what it depends on, so that an interrupted audit continues there. The worker is this
module, run as a program.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_d9m.compatibility import synchronize
from lightning_d9m.engine.control.environment import (
    algorithms_switched,
    capture_flags,
    wanted_flags,
)
from lightning_d9m.errors import CommandError, LedgerError, SettingError, file_errors
from lightning_d9m.ops.patches.registration import patches_applied
from lightning_d9m.tools.audit.ops.cases import (
    Case,
    Inputs,
    MeasuredCall,
    find_documented_lines,
    list_cases,
    plan_cases,
    read_documentation,
)
from lightning_d9m.tools.audit.ops.report import CONDITIONS
from lightning_d9m.tools.comparison.numeric_difference import SpreadMeter, measure_variation
from lightning_d9m.tools.launch.progress import StatusLine, describe_left

_FEWEST_RUNS = 3
# The worker imports torch and creates a CUDA context on a machine that may be busy.
_START_SECONDS = 300.0
_WORKER = [sys.executable, "-m", "lightning_d9m.tools.audit.ops.measurement"]
_REFUSED = "does not have a deterministic implementation"


def plan_rows(settings: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the row of each case without its conditions, and facts about this machine.

    Raises:
        SettingError: torch cannot use the device, or a pattern matches no op.
    """
    device = settings["device"]
    try:
        kind = torch.zeros(1, device=device).device.type
    # torch raises AssertionError if it was built without CUDA.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise SettingError(
            f"--device is {device!r}, on which torch {torch.__version__} cannot create a tensor: "
            f"{first}. Give an available device, such as cpu, cuda or cuda:1."
        ) from error
    cases = plan_cases(settings["ops"], settings["dtypes"], quick=settings["quick"])
    lines = read_documentation(torch.use_deterministic_algorithms.__doc__ or "")
    rows = [
        {
            "key": case.key(dtype),
            "op": case.op,
            "parameters": dict(case.parameters),
            "dtype": dtype,
            "documented": [
                line.kind for line in find_documented_lines(lines, case.documented, kind)
            ],
        }
        for case, dtype in cases
    ]
    threads = settings["threads"] or torch.get_num_threads()
    return rows, {"torch": torch.__version__, "threads": threads}


def measure_rows(
    folder: Path, plan: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], timeout: float
) -> list[dict[str, Any]]:
    """Measure every case that has no row in the folder yet, and return all rows.

    Args:
        folder: The folder of the rows, and of the log with what the worker prints.
        plan: The row of each case without its conditions.
        settings: What the rows depend on; rows with other settings are left alone.
        timeout: Seconds after which a case counts as hanging.

    Raises:
        CommandError: The worker ends before its first case.
        LedgerError: The folder cannot be written.
    """
    worker: _Worker | None = None
    done: dict[str, dict[str, Any]] = {}
    what, path = f"The rows of the audit cannot be written to {folder}", folder / "ops.jsonl"
    try:
        with file_errors(LedgerError, what, "Give a different folder with --output."):
            folder.mkdir(parents=True, exist_ok=True)
            done |= _read_rows(path, settings)
            log, rows = (folder / "worker.log").open("ab"), path.open("a")
            start, known = time.monotonic(), len(done)
            with StatusLine() as status, log, rows:
                for number, row in enumerate(plan, start=1):
                    if row["key"] in done:
                        continue
                    text = f"[{number} of {len(plan)}] {row['key']}"
                    # Rows of an earlier audit took no time in this one.
                    each = (time.monotonic() - start) / max(1, len(done) - known)
                    left = describe_left(each * (len(plan) - len(done)))
                    status.update(f"{text}{left if len(done) > known else ''}")
                    if not status.live:
                        print(text, file=sys.stderr, flush=True)
                    # One worker for many cases, as its start takes seconds; a new one after a case
                    # has killed it.
                    worker = worker or _Worker(settings, log)
                    conditions = worker.ask(row["key"], timeout)
                    if conditions is None:
                        entry = {"outcome": "lost", "reason": f"The process was {worker.end()}."}
                        conditions, worker = dict.fromkeys(CONDITIONS, entry), None
                    done[row["key"]] = {**row, "conditions": conditions}
                    # After a line that an interruption cut, a new one begins.
                    rows.write(f"\n{json.dumps({'settings': settings, 'row': done[row['key']]})}")
                    rows.flush()
    finally:  # after an interruption the case is measured again
        if worker is not None:
            worker.end()
    return [done[row["key"]] for row in plan]


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


class _Worker:
    """A worker process; it is killed if an answer does not come in time."""

    def __init__(self, settings: Mapping[str, Any], log: IO[bytes]) -> None:
        self._late = 0.0
        self._process = subprocess.Popen(
            _WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        if self.ask(settings, _START_SECONDS) is None:
            raise CommandError(
                f"The measuring process was {self.end()} before its first case. Its output is in "
                f"{log.name}."
            )

    def ask(self, request: object, seconds: float) -> Any:
        """Send a request, and return the answer; None if the process has ended without."""
        assert self._process.stdin is not None, "the pipe was requested"
        assert self._process.stdout is not None, "the pipe was requested"
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        # A kernel that hangs cannot be interrupted from within its process.
        if not wait([self._process.stdout.fileno()], seconds):
            self._late = seconds
            self._process.kill()
            return None
        # Half a line was written by a process that died meanwhile.
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer.endswith("\n") else None

    def end(self) -> str:
        """End the process, and return how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=1)
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # closes its pipes
            status = self._process.wait()
        if self._late:
            return f"killed because it was still running after {self._late:g} s"
        if status == -signal.SIGKILL:
            return "killed, as the system does if it runs out of memory"
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"


def main() -> int:
    """Measure the cases that standard input requests; return 0 after the last one.

    It reads one line of JSON for each case, and writes one line with what it measured. What a
    library prints goes to standard error.
    """
    # A library that prints to descriptor 1 would write between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    cases = {case.key(dtype): (case, dtype) for case in list_cases() for dtype in case.dtypes}
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        case, dtype = cases[json.loads(line)]
        limits = settings["runs"], settings["seconds"]
        conditions = measure_case(case, settings["device"], dtype, *limits)
        print(json.dumps(conditions), file=answers, flush=True)
    return 0


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
    # It keeps one output and the digests of the others.
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
    flags, threads = capture_flags(), torch.get_num_threads()
    # The process may have been started with the flag on.
    flags["torch.deterministic_algorithms"] = condition == "deterministic"
    patched = condition == "patched"
    if patched:
        flags = wanted_flags(fill_uninitialized_memory=True)
    with algorithms_switched(flags), patches_applied(kind.upper()) if patched else nullcontext():
        # On one thread the order of additions is fixed.
        torch.set_num_threads(1 if condition == "oracle" else threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
