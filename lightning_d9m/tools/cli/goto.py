"""``d9m goto``: return to a step of a run, in a debugger or with a trace of it."""

import argparse
import os
import sys
from typing import Any

from lightning_d9m.errors import SettingError
from lightning_d9m.text import escape, pluralize
from lightning_d9m.tools.cli.arguments import STATUS, TRAINING, get_command, whole_number
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.launch.runs import Runs, make_output
from lightning_d9m.tools.output.columns import print_result
from lightning_d9m.tools.output.comparison_text import format_evidence, state_verdict
from lightning_d9m.tools.output.terminal import wrap
from lightning_d9m.tools.segments.goto import debug_step, find_nonfinite, find_segment, trace_step
from lightning_d9m.tools.segments.segment import RecordedRun, Segment, name_other_command

ARGUMENTS = f"""
step:STEP?  the global step, counted from 0, before which the program stops
ledger:LEDGER  the ledger of the run, as d9m compare takes it
--first-nonfinite  find the first step whose loss, gradients or weights are not finite, and go there
--debugger {{pdb,ipdb,debugpy}}  what opens in the training_step of the step (default: pdb); debugpy
    waits for a client at 127.0.0.1:5678
| --trace  open no debugger: record all probes of the step, for d9m compare and d9m report
--rank RANK  the rank in whose process the debugger opens (default: 0)
--anyway  open it even if the program differs from the run on the way
-o, --output DIR  new folder for ledgers and logs (default: the next free d9m-runs/NNN)
--json  with --trace: print the result as one JSON object
{TRAINING}"""
EXAMPLE = "d9m goto 412 lightning_logs/version_0/d9m -- python train.py"


def _read_step(text: str) -> int:
    """Parse the step; an argparse ``type``."""
    if not text.lstrip("-").isdigit():
        raise argparse.ArgumentTypeError(
            f"{text} is not valid; allowed: a whole number from 0. The ledger stands behind it."
        )
    return whole_number(0)(text)


SETTINGS = {
    "step": {"type": _read_step},
    "rank": {"type": whole_number(0), "default": 0},
    "debugger": {"default": "pdb"},
}


def run(arguments: argparse.Namespace) -> int:
    """Go to the step.

    Returns:
        0 if all that was compared on the way is equal, else 1, or 3 if a ledger was cut off.

    Raises:
        SettingError: If arguments contradict each other, or the debugger has no terminal.
    """
    command, ledger, step = get_command(arguments), arguments.ledger, arguments.step
    if step is None and ledger.name.isdigit() and not ledger.exists():
        raise SettingError(
            f"The ledger is missing. Give it behind the step: d9m goto {ledger} LEDGER"
        )
    recorded = RecordedRun(ledger)
    segment = None if step is None else find_segment(recorded, step)
    _check_arguments(arguments, recorded)
    runs = Runs(command, make_output(arguments.output))
    _say(name_other_command(recorded, command))
    found: dict[str, Any] = {}
    if segment is None:
        start, found = find_nonfinite(recorded, runs)
        since = "the beginning"
        if start is not None:
            since = f"the checkpoint of step {start.step} (the last one with finite weights)"
        if not found:
            lines = wrap(f"All losses, gradients and weights since {since} are finite.")
            print_result(arguments.format, {"nonfinite": None}, lines)
            return 0
        step = found["step"]
        _say(
            f"The {found['kind']} of {escape(found['name'])} is not finite in step {step} (rank "
            f"{found['rank']}); it is the first one since {since}."
        )
        segment = find_segment(recorded, step)
    _say(_describe_start(recorded, segment))
    if not arguments.trace:
        anyway = "-anyway" if arguments.anyway else ""
        kind = f"debug{anyway}:{arguments.rank}:{arguments.debugger}"
        return int(not debug_step(recorded, segment, command, runs.output / "goto", kind))
    ledger = trace_step(recorded, segment, runs)
    comparison = compare_ledgers(recorded.ledger, ledger)
    facts = {"step": step, "nonfinite": found or None, "trace": str(ledger.path)}
    lines = [*format_evidence(comparison), "", f"trace of step {step}: {ledger.path}"]
    facts |= {"comparison": comparison.as_json()}
    print_result(arguments.format, facts, lines, state_verdict(comparison))
    return STATUS[comparison.verdict]


def _say(text: str) -> None:
    """Print a sentence; the program, too, writes to the terminal."""
    for line in wrap(text) if text else ():
        print(line, file=sys.stderr, flush=True)


def _check_arguments(arguments: argparse.Namespace, recorded: RecordedRun) -> None:
    size = recorded.ledger.header.world_size
    if arguments.first_nonfinite == (arguments.step is not None):
        example = arguments.parser.epilog.removeprefix("example: ")
        raise SettingError(f"Give the step, or --first-nonfinite, which finds it: {example}")
    if arguments.rank >= size:
        raise SettingError(
            f"--rank is {arguments.rank}, and the run has {pluralize(size, 'rank')}; allowed: 0 to "
            f"{size - 1}."
        )
    if arguments.format == "json" and not arguments.trace:
        raise SettingError("--json is for --trace: a debugger prints what you type. Add --trace.")
    needs_terminal = not arguments.trace and arguments.debugger != "debugpy"
    if needs_terminal and not sys.stdin.isatty():
        raise SettingError(
            f"{arguments.debugger} reads from the terminal, and the standard input is not one. Run "
            "d9m goto in a terminal, or record the step with --trace."
        )


def _describe_start(recorded: RecordedRun, segment: Segment) -> str:
    """Return where a segment begins, and how many nearer checkpoints are gone."""
    step, start = segment.stop - 1, segment.start
    where = "the beginning of the run: no checkpoint before it is there"
    if start is not None:
        where = f"the checkpoint of step {start.step}, {escape(os.path.relpath(start.path))}"
    gone = [p for p in recorded.points if segment.first < p.step < step and not p.is_there]
    lost = f" Nearer checkpoints that are gone: {len(gone)}." if gone else ""
    return f"Step {step} is reached from {where}.{lost}"
