"""``d9m repeat``: run a command several times and compare the runs bit for bit.

With ``--processes`` it runs on several numbers of processes; with logical ranks (see
docs/logical-ranks.md) all runs have the same bits.

With ``--interrupt``, a straight run saves a checkpoint at each kind of point of its first fit. From
each of them, and from some that the program itself saves, a segment is run and compared with it.
The user's program is not changed: variables control the callback in it or the recorder of its loop
(see ``engine.recording.interruption``).
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_d9m.engine.control.settings import RECORD_SAVES
from lightning_d9m.engine.ledger.kinds import FOLLOWED_STEPS
from lightning_d9m.engine.recording.interruption import FOLDER, INTERRUPT, POINTS
from lightning_d9m.errors import CommandError
from lightning_d9m.text import pluralize
from lightning_d9m.tools.cli.arguments import (
    FORMAT,
    MOST_RUNS,
    OUTPUT,
    STATUS,
    TIMEOUT,
    TRAINING,
    get_command,
    refuse_options,
    whole_number,
)
from lightning_d9m.tools.comparison.printed_output import compare_printed
from lightning_d9m.tools.launch.left_files import FileWatch
from lightning_d9m.tools.launch.processes import count_threads
from lightning_d9m.tools.launch.runs import RunResult, Runs, make_output
from lightning_d9m.tools.output.check_text import print_check
from lightning_d9m.tools.output.repeat_text import RepeatReport
from lightning_d9m.tools.output.terminal import print_error
from lightning_d9m.tools.segments.check import CheckedSegment, CheckReport, check_segment
from lightning_d9m.tools.segments.segment import (
    RecordedRun,
    SavedPoint,
    Segment,
    find_first_fit,
)

_FEWEST_RUNS = 2
# What changes the bits of a training on one machine, unless they are portable.
_PORTABLE = {"LIGHTNING_D9M_PORTABLE": "1", "OMP_NUM_THREADS": "1"}
_STACKS = (
    ("one thread", _PORTABLE),
    ("two threads", _PORTABLE | {"OMP_NUM_THREADS": "2"}),
    ("no vector instructions", _PORTABLE | {"ATEN_CPU_CAPABILITY": "default"}),
)
_THREADS = "OMP_NUM_THREADS"
# A word of the command that stands for the number of processes.
_PLACEHOLDER = "{processes}"
_MOST_PROCESSES = 1024
ARGUMENTS = f"""
-n, --runs RUNS  number of runs (default: 2)
| --portable  compute portable bits, and run with one thread, with two, and without vector
    instructions
| --processes P,P,...  numbers of processes, such as 1,2,4: run once on each, started as torchrun
    starts them; a command that contains {{processes}} starts them itself
| --interrupt  resume from checkpoints at several points of a run, and compare with that run
--allow-objects  with --interrupt: resume also from checkpoints that hold Python objects, as
    fit(..., weights_only=False) does
{OUTPUT.strip()}
-v, --verbose  show whole digests and the bits of losses
{FORMAT}{TIMEOUT}{TRAINING}"""
EXAMPLE = "d9m repeat -n 3 -- python train.py"
# torch reads the first only where the caller of `torch.load` leaves weights_only at its default,
# as Lightning does, and raises if the second is set beside it.
_ALLOW_OBJECTS = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "0"}
# What torch says then names `torch.load`, which the program does not call.
_OBJECTS = b"Weights only load failed"
_ADVICE = (
    "The checkpoint holds Python objects. To load them, add --allow-objects, or call "
    "fit(..., weights_only=False) in the program."
)
_SAVED = "checkpoints"
# Of a segment at most, about, without the start of the program.
_SECONDS = 30.0
_LABELS = {
    "epoch": "at the end of an epoch",
    "step": "after a step",
    "accumulated": "between accumulated batches",
    "validation": "within a validation",
    "validated": "at the end of a validation",
}
_OWN = "by the program"
_LACKS = (
    "Two runs that resume there agree, and differ from the straight one: the checkpoint lacks "
    "state that the training uses. Save what differs in state_dict or on_save_checkpoint."
)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print the comparison.

    Returns:
        0 if all runs are equal, 1 if some differ, 3 if none differs but one failed.
    """
    argv = get_command(arguments)
    if not arguments.interrupt:
        refuse_options(arguments, ["allow_objects"], "only --interrupt loads checkpoints")
    output = make_output(arguments.output)
    runs = Runs(argv, output, arguments.timeout)
    if arguments.interrupt:
        return STATUS[_interrupt_and_resume(runs, arguments).verdict]
    watch = FileWatch(argv, output)
    made: dict[int, RunResult] = {}
    report: RepeatReport | None = None
    failure, plan = "", list(_plan_runs(argv, arguments))
    try:
        for number, (title, count, options) in enumerate(plan, start=1):
            done = runs.run(f"run-{number:03d}", title, later=len(plan) - number, **options)
            made[number] = replace(done, processes=count)
            watch.note_run()
    except CommandError as error:
        before = f" (run {number - 1} succeeded)" if made else ""
        failure = f"In {title}{before}: {error}"
    finally:  # a signal may end it, too
        if len(made) >= _FEWEST_RUNS:
            is_whole = len(made) == len(plan)
            printed = compare_printed(output) if is_whole and not arguments.processes else ""
            words: dict[str, Any] = {"printed": printed, "left": watch, "is_whole": is_whole}
            report = RepeatReport(made, output, argv, **words)
            report.print_out(arguments.format, verbose=arguments.verbose)
    if failure:
        print_error(failure)
    return STATUS["incomplete" if report is None else report.verdict]


def _plan_runs(
    argv: list[str], arguments: argparse.Namespace
) -> Iterator[tuple[str, int | None, dict[str, Any]]]:
    """Yield the title of each run, its number of processes if it was chosen, and its options.

    If a word of the command contains ``{processes}``, the command is started once with the number
    in its place, and starts the processes itself; otherwise it is started so many times, as
    torchrun does.
    """
    if arguments.portable:
        for title, variables in _STACKS:
            yield title, None, {"variables": variables}
    elif arguments.processes is None:
        runs = arguments.runs or _FEWEST_RUNS
        for number in range(1, runs + 1):
            saves = {RECORD_SAVES: os.environ.get(RECORD_SAVES, "1")}
            yield f"run {number} of {runs}", None, {"variables": saves}
    else:
        counts = arguments.processes
        starts_itself = any(_PLACEHOLDER in word for word in argv)
        # Sums depend on the number of threads, so all runs have the same.
        threads = {_THREADS: os.environ.get(_THREADS) or str(count_threads(max(counts)))}
        for number, count in enumerate(counts, start=1):
            title = f"run {number} of {len(counts)}, on {pluralize(count, 'process', 'processes')}"
            command = [word.replace(_PLACEHOLDER, str(count)) for word in argv]
            processes = None if starts_itself else count
            yield title, count, {"command": command, "processes": processes, "variables": threads}


def _read_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of processes, separated by commas; an argparse ``type``.

    >>> _read_counts("1,2,4")
    (1, 2, 4)
    """
    counts = tuple(map(whole_number(1, _MOST_PROCESSES), text.split(",")))
    if len(set(counts)) < max(len(counts), _FEWEST_RUNS):
        raise argparse.ArgumentTypeError(
            f"{text} is not valid; allowed: two or more different numbers, such as 1,2,4."
        )
    return counts


SETTINGS = {
    "runs": {"type": whole_number(_FEWEST_RUNS, MOST_RUNS)},
    "processes": {"type": _read_counts},
}


def _interrupt_and_resume(runs: Runs, arguments: argparse.Namespace) -> CheckReport:
    """Run the command straight, and check a segment from each point at which it has saved.

    Raises:
        CommandError: When the straight run fails or has saved at no point.
    """
    folder = runs.output / "run-001"
    points = folder / _SAVED
    saves = {INTERRUPT: POINTS, FOLDER: str(points)}
    straight = runs.run(folder.name, "straight run", variables=saves)
    recorded = RecordedRun(find_first_fit(straight).path)
    steps = int(_SECONDS * recorded.last_step / (straight.seconds or _SECONDS))
    segments = list(_choose_segments(recorded, points, steps))
    if not segments:
        raise CommandError(
            "The command's first fit has no point from which it can be resumed: it has one epoch "
            "of one batch, and no validation. Train for more batches. A loop must call the "
            "recorder's epoch()."
        )
    numbers = [segment.number for segment, _ in segments]
    report = CheckReport(str(runs.output), there=numbers)
    report.note_run(recorded)
    options = {"variables": _ALLOW_OBJECTS if arguments.allow_objects else {}}
    show = partial(print_check, report, arguments.format, runs.command, resumed=True)
    with report.kept(points, show):
        for later, (segment, label) in zip(range(len(segments))[::-1], segments, strict=True):
            title = f"segment {segment.number} ({segment.number} of {len(segments)})"
            checked = _check_resumed(recorded, runs, segment, label, title, **options, later=later)
            report.checked.append(checked)
            if _ADVICE in checked.reason:
                break  # those of all points hold them
    return report


def _check_resumed(
    recorded: RecordedRun, runs: Runs, segment: Segment, label: str, title: str, **options: Any
) -> CheckedSegment:
    """Resume, and compare with the straight run, as far as that has states to compare."""
    known = CheckedSegment.of(segment, min(segment.stop, recorded.last_step), label)
    # The straight run has records after its points alone, not at the end of each segment.
    checked = check_segment(recorded, runs, segment, known, segment.first, title, **options)
    logs = (runs.output / f"segment-{checked.number:03d}").glob("output*.log")  # of all ranks
    if checked.verdict == "failed" and any(map(_names_objects, logs)):
        return replace(checked, reason=f"{checked.reason}\n{_ADVICE}")
    return replace(checked, reason=_LACKS) if checked.verdict == "persistent" else checked


def _names_objects(log: Path) -> bool:
    """Return whether a log names the objects, at any place: programs print more at their end."""
    with suppress(OSError), log.open("rb") as lines:
        return any(_OBJECTS in line for line in lines)
    return False  # without a log only the advice is lost


def _choose_segments(
    recorded: RecordedRun, folder: Path, steps: int
) -> Iterator[tuple[Segment, str]]:
    """Yield a segment from the last point of each kind, and from some of the program's own.

    Each ends some steps after the end of the next epoch, where what a checkpoint lacks may show
    first, or after ``steps`` if that is earlier.
    """
    last, own = recorded.last_step, list[SavedPoint]()
    kept: dict[str, SavedPoint] = {}
    for point in recorded.saved:
        kind = point.path.name.partition("-")[0] if point.path.parent == folder else ""
        # The record of the last epoch follows its validation.
        if point.is_there and (point.step < last or kind.startswith("valid")):
            own += [] if kind else [point]
            kept |= {kind: point} if kind else {}
    places = sorted({0, len(own) // 2, len(own) - 1}) if own else []
    chosen = [(own[place], _OWN) for place in places]
    chosen += [(kept[kind], label) for kind, label in _LABELS.items() if kind in kept]
    for number, (point, label) in enumerate(chosen, start=1):
        end = min((step for step in recorded.epoch_ends if step > point.step), default=last)
        stop = min(end + FOLLOWED_STEPS, point.step + max(FOLLOWED_STEPS, steps))
        yield Segment(point, recorded.stop if stop >= last else stop, number), label
