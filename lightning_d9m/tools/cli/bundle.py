"""``d9m bundle``: pack two ledgers and what is known of their difference, or one step of a run."""

import argparse
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.filesize import decimal

from lightning_d9m.engine.recording.interruption import STEP_FILE
from lightning_d9m.errors import SettingError
from lightning_d9m.text import escape, pluralize, printable
from lightning_d9m.tools.cli.arguments import (
    FORMAT,
    STATUS,
    TIMEOUT,
    check_new_file,
    get_command,
    refuse_options,
    whole_number,
)
from lightning_d9m.tools.cli.report import compare_chosen
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.history.bundle import SecretFilter, read_located, write_bundle
from lightning_d9m.tools.launch.runs import Runs, make_output
from lightning_d9m.tools.output.columns import Column, format_table, print_result
from lightning_d9m.tools.output.comparison_text import format_evidence, state_verdict
from lightning_d9m.tools.output.terminal import find_command, wrap
from lightning_d9m.tools.segments.goto import trace_step
from lightning_d9m.tools.segments.segment import RecordedRun

_OPEN = "open"
_PAIR = 2
_COLUMNS = (
    Column[tuple[str, int]]("file", lambda row: escape(row[0])),
    Column[tuple[str, int]]("size", lambda row: decimal(row[1]), is_number=True),
)

ARGUMENTS = f"""
paths:PATH*  two ledgers, or a folder that d9m locate or d9m repeat left (default: the last two
    ledgers in the working folder); with --step, the ledger of one run; or the word open and a
    capsule, whose step runs again
--step STEP  write a capsule instead: the operations of this global step, counted from 0, and the
    state that they need, so that the step runs again elsewhere
--with-data  with --step: put the batch in, too. Without it, the operations that need the batch
    cannot run from the capsule
-o, --output FILE  the bundle to write (default: d9m-bundle.zip, or d9m-capsule.zip)
{FORMAT}{TIMEOUT}
-v, --verbose  show whole digests and the bits of numbers
-- COMMAND  with --step: the training of the run, such as: python train.py
"""
EXAMPLE = "d9m bundle d9m-runs/000"
SETTINGS: dict[str, dict[str, object]] = {
    # The first word may be `open`, which is not a path.
    "paths": {"type": str},
    "step": {"type": whole_number(0)},
}


def run(arguments: argparse.Namespace) -> int:
    """Write or open a bundle.

    Returns:
        0 if its ledgers are equal, or its step has the bits of the run; else 1, or 3 if a ledger
        was cut off, or operations of the step could not run.
    """
    paths, output = [Path(path) for path in arguments.paths], arguments.output
    if arguments.step is not None:
        return _write_capsule(arguments, paths, output or Path("d9m-capsule.zip"))
    if arguments.with_data or arguments.argv or arguments.timeout is not None:
        raise SettingError("--with-data, --timeout and a command are for --step. Add --step STEP.")
    if arguments.paths[:1] != [_OPEN]:
        return _write(arguments, paths, output or Path("d9m-bundle.zip"))
    if len(paths) != _PAIR:
        raise SettingError("d9m bundle open takes one capsule: d9m bundle open FILE")
    refuse_options(arguments, ["output"], "nothing is written")
    return _run_capsule(arguments, paths[1])


def _write_capsule(arguments: argparse.Namespace, paths: list[Path], output: Path) -> int:
    """Run to the step, write its capsule, and run the step from it."""
    from lightning_d9m.tools.history import capsule  # loads torch

    command = get_command(arguments)
    if len(paths) != 1:
        raise SettingError("--step takes one ledger: d9m bundle RUN --step STEP -- COMMAND")
    check_new_file(output)
    recorded = RecordedRun(paths[0])
    segment = capsule.find_step(recorded, arguments.step)
    runs = Runs(command, make_output(None), arguments.timeout)
    try:
        ledger = trace_step(recorded, segment, runs, probes=capsule.STATE)
        comparison = compare_ledgers(recorded.ledger, ledger)
        content = runs.output / "trace/segment" / STEP_FILE
        differs = "" if comparison.equal else state_verdict(comparison)
        words = {"with_data": arguments.with_data, "differs": differs}
        capsule.write_capsule(output, arguments.step, ledger, content, **words)
    finally:
        # It holds the values of the batch, which the capsule may leave out for good reason.
        shutil.rmtree(runs.output / "trace/segment", ignore_errors=True)
    shutil.rmtree(runs.output)  # an error names the log in it
    # Without its data a capsule is as it should be if what runs of it is equal.
    return _run_capsule(arguments, output, may_lack_data=not arguments.with_data, is_written=True)


def _run_capsule(
    arguments: argparse.Namespace,
    path: Path,
    *,
    may_lack_data: bool = False,
    is_written: bool = False,
) -> int:
    """Run the step of a capsule, and print what it holds and how the step compares."""
    from lightning_d9m.tools.history.capsule import open_capsule  # loads torch

    facts, outcome = open_capsule(path)
    ops = f"{outcome.ops:,} operations of step {facts.step:,}"
    if facts.last > facts.step:
        ops += f" to {facts.last:,}, which one batch makes,"
    lack = f"they lack data ({decimal(facts.left_out)}), which --with-data adds."
    verdict = {
        "equal": f"equal: {ops} leave the bits of the run.",
        "different": f"different: {outcome.different:,} of {ops} do not leave the bits of the run, "
        f"first {outcome.first}.",
        "incomplete": f"incomplete: {outcome.ran:,} of {ops} ran, and are equal. The others did "
        f"not: {outcome.obstacle or lack}",
    }[outcome.verdict]
    lines = wrap(f"It is not the step of the run: {facts.differs}") if facts.differs else []
    if outcome.stack:
        lines += wrap(f"The stack differs from that of the run: {', '.join(outcome.stack)}.")
    lines += [
        *([""] if lines else []),
        *_format_sizes(facts.sizes, facts.secrets, is_written=is_written),
    ]
    lines.append(f"capsule: {shlex.quote(str(path))}")
    shown = msgspec.to_builtins(facts) | asdict(outcome) | {"verdict": outcome.verdict}
    print_result(arguments.format, shown, list(map(printable, lines)), printable(verdict))
    # A capsule of another step than the run's is a difference even if it repeats itself.
    if outcome.different or facts.differs:
        return 1
    is_equal = outcome.verdict == "equal" or (may_lack_data and not outcome.obstacle)
    return STATUS["equal" if is_equal else "incomplete"]


def _format_sizes(sizes: Mapping[str, int], secrets: int, *, is_written: bool = True) -> list[str]:
    """Return a table of files and their sizes, the largest first, and what writing removed."""
    # The largest first: they decide whether the bundle can be sent.
    rows = sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0]))
    removed = f"{pluralize(secrets, 'secret')} removed."
    advice = wrap(f"{removed} Look through the bundle before you publish it.")
    return [*format_table(_COLUMNS, rows).splitlines(), *advice * is_written]


def _write(arguments: argparse.Namespace, paths: list[Path], output: Path) -> int:
    if len(paths) > _PAIR:
        raise SettingError(
            f"{len(paths)} paths were given: {shlex.join(map(str, paths))}. Give two ledgers, or "
            "one folder."
        )
    check_new_file(output)
    arguments.expected, arguments.actual = [*paths, None, None][:_PAIR]
    found, secrets = compare_chosen(arguments), SecretFilter()
    located = read_located(found.ledgers)
    sizes = write_bundle(output, found.ledgers, located, secrets)
    facts: dict[str, Any] = {"bundle": str(output), "sizes": sizes, "secrets": secrets.count}
    table = _format_sizes(sizes, secrets.count)
    # The summary of a CI job may be public, too.
    facts["comparison"] = secrets.clean_values(found.comparison.as_json())
    evidence = map(secrets.clean, format_evidence(found.comparison, verbose=arguments.verbose))
    report = ["", "d9m locate:", *map(secrets.clean_code, located[1])] if located[1] else []
    lines = [*evidence, *report, "", *table, f"bundle: {shlex.quote(str(output))}"]
    steps = []
    if not (report or found.comparison.equal):
        command = printable(secrets.clean(find_command(found.ledgers) or "COMMAND"))
        steps = [(f"d9m locate -- {command}", "finds the line, for a new bundle")]
    verdict = state_verdict(found.comparison)
    print_result(arguments.format, facts, list(map(printable, lines)), verdict, steps=steps)
    return STATUS[found.comparison.verdict]
