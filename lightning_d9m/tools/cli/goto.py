"""``d9m goto``: return to a step of a run, in a debugger or with a trace of it."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_d9m.errors import CheckpointError, SettingError
from lightning_d9m.text import escape, pluralize
from lightning_d9m.tools.cli.arguments import TRAINING, get_command, whole_number
from lightning_d9m.tools.launch.run import Runs, make_output
from lightning_d9m.tools.output.comparison_text import format_evidence, state_verdict
from lightning_d9m.tools.output.terminal import print_lines, wrap
from lightning_d9m.tools.segments.goto import (
    PartCheck,
    debug_step,
    find_nonfinite,
    find_segment,
    trace_step,
)
from lightning_d9m.tools.segments.segment import RecordedRun, Segment, describe_command

ARGUMENTS = f"""
step:STEP?  the global step, counted from 0, before which the program stops
ledger:LEDGER  the ledger of the run, as d9m compare takes it
--first-nonfinite  find the first step whose loss, gradients or weights are not finite, and go there
--debugger {{pdb,ipdb,debugpy}}  what opens in the training_step of the step (default: pdb); debugpy
    waits for a client at 127.0.0.1:5678
| --trace  open no debugger: record all probes of the step, for d9m compare and d9m report
--rank RANK  the rank whose process the debugger opens in (default: 0)
--anyway  open it even if the program differs from the run on the way
-o, --output DIR  new folder for ledgers and logs (default: the next free d9m-runs/NNN)
--json  print the result as one JSON object
{TRAINING}"""
EXAMPLE = "d9m goto 412 lightning_logs/version_0/d9m -- python train.py"
SETTINGS = {
    "step": {"type": whole_number(0)},
    "rank": {"type": whole_number(0), "default": 0},
    "debugger": {"default": "pdb"},
}


def run(arguments: argparse.Namespace) -> int:
    """Go to the step.

    Returns:
        0 if it was reached and all that was compared on the way is equal, else 1.

    Raises:
        SettingError: If arguments contradict each other, or there is no terminal.
    """
    command, trip = get_command(arguments), _Trip(arguments)
    recorded, step = RecordedRun(arguments.ledger), arguments.step
    _check_arguments(arguments, recorded)
    segment = None if step is None else find_segment(recorded, step)
    runs = Runs(command, make_output(arguments.output))
    trip.say(describe_command(recorded, command))
    if segment is None:
        segment = _find_nonfinite(trip, recorded, runs)
    if segment is not None:
        _visit(trip, arguments, recorded, segment, runs)
    trip.facts["output"] = str(runs.output)
    if arguments.format == "json":
        print(json.dumps(trip.facts, indent=2))
    return int(trip.differs)


class _Trip:
    """What is said on the way, and the facts for ``--json``."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._is_text = arguments.format == "text"
        self.facts: dict[str, Any] = {"step": arguments.step, "nonfinite": None}
        self.differs = False

    def say(self, *sentences: str) -> None:
        """Print sentences, each on a line of its own; the program may use the terminal, too."""
        if self._is_text:
            for line in (line for sentence in sentences if sentence for line in wrap(sentence)):
                print(line, flush=True)

    def note(self, check: PartCheck, step: int) -> bool:
        """Say what was compared before a step; return whether it is equal."""
        self.facts |= check.as_json()
        self.differs = check.differs
        if check.differs and self._is_text:
            self.say(f"The program differs from the run before step {step}.")
            print_lines([*wrap(state_verdict(check.comparison)), ""])
            print_lines(format_evidence(check.comparison))
            sys.stdout.flush()
        elif check.last is None:
            self.say(f"Nothing was recorded before step {step} that could be compared.")
        else:
            count = sum(rank.digests + rank.batches for rank in check.comparison.ranks)
            records = pluralize(count, "record")
            later = ""
            if check.last < step:
                later = f" It has recorded no state between steps {check.last} and {step}."
            self.say(f"Equal up to step {check.last}: {records}, bit for bit as in the run.{later}")
        return not check.differs


def _check_arguments(arguments: argparse.Namespace, recorded: RecordedRun) -> None:
    size = recorded.ledger.header.world_size
    if arguments.first_nonfinite == (arguments.step is not None):
        raise SettingError(
            "Give the step, or --first-nonfinite, which finds it: "
            f"{arguments.parser.epilog.removeprefix('example: ')}"
        )
    if arguments.rank >= size:
        raise SettingError(
            f"--rank is {arguments.rank}, and the run has {pluralize(size, 'rank')}; allowed: 0 to "
            f"{size - 1}."
        )
    needs_terminal = not arguments.trace and arguments.debugger != "debugpy"
    if needs_terminal and not sys.stdin.isatty():
        raise SettingError(
            f"{arguments.debugger} reads from the terminal, and the standard input is not one. Run "
            "d9m goto in a terminal, or record the step with --trace."
        )


def _find_nonfinite(trip: _Trip, recorded: RecordedRun, runs: Runs) -> Segment | None:
    """Say where the first value is that is not finite; return the segment up to its step."""
    start, found = find_nonfinite(recorded, runs, _holds_finite)
    since = "the beginning"
    if start is not None:
        since = f"the checkpoint of step {start.step}, the last one whose weights are finite"
    if found is None:
        trip.say(f"All losses, gradients and weights since {since}, are finite.")
        return None
    trip.facts |= {"step": found.step, "nonfinite": vars(found)}
    trip.say(
        f"The {found.kind} of {escape(found.name)} is not finite in step {found.step} (rank "
        f"{found.rank}), the first one since {since}."
    )
    return find_segment(recorded, found.step)


def _holds_finite(path: Path) -> bool:
    """Return whether the weights of a checkpoint are finite; False if it is not one file."""
    from lightning_d9m.integrations.lightning.saved_state import find_weights, load_checkpoint

    try:
        weights = find_weights(load_checkpoint(path))
    except (CheckpointError, SettingError):
        return False
    return bool(weights) and all(bool(own.isfinite().all()) for own in weights.values())


def _visit(
    trip: _Trip,
    arguments: argparse.Namespace,
    recorded: RecordedRun,
    segment: Segment,
    runs: Runs,
) -> None:
    """Run up to the step, and it in the debugger or with probes."""
    step = segment.stop - 1
    trip.facts["start"] = None if segment.start is None else str(segment.start.path)
    trip.say(*_describe_start(recorded, segment))
    if arguments.trace:
        check, ledger = trace_step(recorded, segment, runs)
        trip.note(check, step)
        trip.facts["ledger"] = str(ledger.path)
        trip.say(f"Trace of step {step}: {os.path.relpath(ledger.path)}")
        return

    def may_enter(check: PartCheck) -> bool:
        if segment.start is not None and not check.resumed:
            trip.say("The program did not resume from the checkpoint; it ran from the beginning.")
        return trip.note(check, step) or arguments.anyway

    before, after = debug_step(
        recorded,
        segment,
        runs.command,
        runs.output / "goto",
        debugger=arguments.debugger,
        rank=arguments.rank,
        may_enter=may_enter,
    )
    if after.last is not None and after.last > step and not before.differs:
        equal = "differs from" if after.differs else "is equal to"
        trip.say(f"The state after step {step} {equal} that of the run.")


def _describe_start(recorded: RecordedRun, segment: Segment) -> Iterator[str]:
    """Yield where a segment begins, and what is missing nearer to its end."""
    step = segment.stop - 1
    gone = [p.step for p in recorded.points if segment.first <= p.step <= step and not p.is_there]
    if segment.start is not None:
        name = os.path.relpath(segment.start.path)
        yield f"Step {step} is reached from the checkpoint of step {segment.first}, {escape(name)}."
    else:
        yield f"Step {step} is reached from the beginning: no checkpoint before it is there."
    if gone:
        listed = (
            f"those of steps {', '.join(map(str, gone))} are"
            if gone[1:]
            else (f"that of step {gone[0]} is")
        )
        yield f"Of nearer checkpoints that the ledger names, {listed} gone."
