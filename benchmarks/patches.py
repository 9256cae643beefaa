"""Measure the patches: ``python benchmarks/patches.py --output FOLDER`` on a CUDA machine.

For each op and shape: the time of the original (nondeterministic), of torch's deterministic version
if there is one, and of the patched op; medians over CUDA events; the number of distinct outputs of
each while a second stream competes; and the difference of the patched op from the original. Then
the step time of whole models. JSON and Markdown are written after each row, so an interrupted run
keeps its rows. A worker process measures each row and is replaced if it fails or does not answer:
an error on the device ends that process, and costs one row.

``--device cpu --calls 2 --rounds 1`` only shows that it runs.
"""

import argparse
import json
import math
import re
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

GOAL_MEAN, GOAL_WORST, GOAL_MODEL = 1.2, 3.0, 1.05
START_SECONDS = 120.0  # for a worker to load torch and to find the device
OPS_SHARE = 0.75  # of the time; the rest is the models'
WORKER = [sys.executable, str(Path(__file__).with_name("patch_worker.py"))]
ABOUT = """\
torch {torch}, {date}. Times in microseconds, medians of {rounds} calls; distinct outputs of {calls}
calls beside a competing stream; difference: of the patched op from the original, over its greatest
magnitude. The fill of uninitialized memory is off, unless it says on."""
ABOUT_MODELS = f"""\
Steps of whole models, deterministic over plain (goal {GOAL_MODEL} with the fill off); offered: with
the ops that are patched on request too, and the fill off."""

Row = dict[str, object]


class Worker:
    """A process that answers each line, the name of a task, with a line of JSON.

    Args:
        command: The command; the first line that it prints is its greeting.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self.greeting: Row = {}

    def ask(self, task: str, seconds: float) -> Row:
        """Return the answer, or ``{"error": ...}``; then the next call starts a new process."""
        try:
            process = self._start()
            process.stdin.write(f"{task}\n")
            process.stdin.flush()
            answer = self._read(process, seconds)
        except (OSError, ValueError, TimeoutError) as error:
            self.close()
            return {"error": str(error) or type(error).__name__}
        if answer.get("fatal"):
            self.close()
        return answer

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
            self.greeting = self._read(self._process, START_SECONDS)
        return self._process

    @staticmethod
    def _read(process: subprocess.Popen[str], seconds: float) -> Row:
        if not select.select([process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"no answer within {seconds:g} seconds")
        line = process.stdout.readline()
        if not line:
            raise ValueError(f"the worker ended with status {process.wait()}")
        return json.loads(line)


def measure_all(worker: Worker, words: argparse.Namespace, write: object) -> Row:
    """Measure every row; without time left, a row has an error."""
    begin = time.monotonic()
    tasks = worker.ask("list", START_SECONDS)
    if "error" in tasks:
        raise SystemExit(f"patches.py: the worker does not start: {tasks['error']}")
    result: Row = {
        **worker.greeting,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rounds": words.rounds,
        "calls": words.calls,
        "ops": [],
        "models": [],
    }
    for kind, share in (("ops", OPS_SHARE), ("models", 1.0)):
        for task in tasks[kind]:
            left = words.seconds * share - (time.monotonic() - begin)
            row = {"error": "out of time"}
            if left > 0:
                row = worker.ask(task["task"], min(left + 10, words.limit))
            result[kind].append({**task, **row})
            result["seconds"] = time.monotonic() - begin
            write(result)
            print(json.dumps(result[kind][-1]), flush=True)
    return result


def summarize(result: Mapping[str, object]) -> list[str]:
    """Return the findings: speed compared with the goals, repeatability, and possible defaults."""
    rows = [row for row in result["ops"] if "ratio" in row]
    ratios = [row["ratio"] for row in rows if row["op"] != "convolution"]
    varied = sorted({row["op"] for row in rows if row["patched_outputs"] != 1})
    silent = sorted({row["op"] for row in rows if row["original_outputs"] == 1})
    failed = [row for row in [*result["ops"], *result["models"]] if "error" in row]
    offered = sorted({row["op"] for row in rows if row["offered"]})
    faster = [
        op
        for op in offered
        if all(row["patched_us"] < row["torch_deterministic_us"] for row in rows if row["op"] == op)
    ]
    mean = statistics.geometric_mean(ratios) if ratios else math.nan
    return [
        (
            f"Patched over original: geometric mean {mean:.2f} (goal {GOAL_MEAN}), worst "
            f"{max(ratios, default=math.nan):.2f} (goal {GOAL_WORST})."
        ),
        f"Patched ops with several outputs for one input: {', '.join(varied) or 'none'}.",
        f"Originals with one output, which are no control: {', '.join(silent) or 'none'}.",
        (
            f"Offered, and faster than torch's deterministic version on every shape: "
            f"{', '.join(faster) or 'none'} (of {', '.join(offered) or 'none'})."
        ),
        f"Rows that failed or were not reached: {len(failed)}.",
    ]


def render(result: Mapping[str, object]) -> str:
    """Return the result as Markdown."""
    heading = (
        "op | shape | original | outputs | torch's deterministic | outputs | patched | outputs"
    )
    lines = [
        f"# Patches on {result['device']}",
        "",
        ABOUT.format(**result),
        "",
        *(f"- {line}" for line in summarize(result)),
        "",
        f"| {heading} | ratio | difference |",
        "| - | - | -: | -: | -: | -: | -: | -: | -: | -: |",
    ]
    for row in result["ops"]:
        if "error" in row:
            lines.append(f"| {row['op']} | {row['shape']} | failed: {row['error']} |")
            continue
        torchs = row.get("torch_deterministic_us")
        lines.append(
            f"| {row['op']} | {row['shape']} | {row['original_us']:.0f} | "
            f"{row['original_outputs']} | {f'{torchs:.0f}' if torchs else ''} | "
            f"{row.get('torch_deterministic_outputs', '')} | "
            f"{row['patched_us']:.0f} | {row['patched_outputs']} | {row['ratio']:.2f} | "
            f"{row['difference']:.1e} |"
        )
    lines += [
        "",
        ABOUT_MODELS,
        "",
        "| model | plain | fill off | ratio | fill on | ratio | offered | ratio |",
        "| - | -: | -: | -: | -: | -: | -: | -: |",
    ]
    for row in result["models"]:
        if "error" in row:
            lines.append(f"| {row['model']} | failed: {row['error']} |")
            continue
        cells = " | ".join(
            f"{row[f'{condition}_us']:.0f} | {row[f'{condition}_ratio']:.2f}"
            for condition in ("fill_off", "fill_on", "offered")
        )
        lines.append(f"| {row['model']} | {row['plain_us']:.0f} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=50, help="number of timed calls")
    parser.add_argument("--calls", type=int, default=200, help="number of compared calls")
    parser.add_argument("--only", default="", help="only ops with this in their name")
    parser.add_argument("--seconds", type=float, default=540, help="start no row after this time")
    parser.add_argument("--limit", type=float, default=90, help="time limit of a row in seconds")
    words = parser.parse_args()
    words.output.mkdir(parents=True, exist_ok=True)

    def write(result: Row) -> None:
        name = re.sub(r"[^a-z0-9]+", "-", str(result["device"]).lower()).strip("-")
        for ending, text in (("json", json.dumps(result, indent=2) + "\n"), ("md", render(result))):
            path = words.output / f"patches-{name}.{ending}"
            path.with_suffix(".new").write_text(text, encoding="utf-8")
            path.with_suffix(".new").replace(path)

    settings = [words.device, str(words.rounds), str(words.calls), words.only]
    worker = Worker([*WORKER, *settings])
    try:
        result = measure_all(worker, words, write)
    finally:
        worker.close()
    print(render(result))
    rows = [*result["ops"], *result["models"]]
    varied = any(row.get("patched_outputs", 1) != 1 for row in rows)
    sys.exit(1 if varied or any("error" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
