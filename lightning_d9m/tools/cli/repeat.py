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
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_d9m.engine.control.settings import RECORD_SAVES
from lightning_d9m.engine.ledger.kinds import FOLLOWED_STEPS
from lightning_d9m.engine.recording.interruption import FOLDER, INTERRUPT, POINTS
from lightning_d9m.errors import CommandError, LedgerError, SettingError
from lightning_d9m.text import pluralize
from lightning_d9m.tools.cli.arguments import (
    FORMAT,
    MOST_RUNS,
    TIMEOUT,
    TRAINING,
    get_command,
    whole_number,
)
from lightning_d9m.tools.comparison.printed_output import compare_printed
from lightning_d9m.tools.launch.left_files import FileWatch
from lightning_d9m.tools.launch.processes import count_threads
from lightning_d9m.tools.launch.run import Run, Runs, make_output
from lightning_d9m.tools.output.repeat_text import RepeatReport
from lightning_d9m.tools.segments.segment import (
    RecordedRun,
    SavedPoint,
    Segment,
    find_first_fit,
    run_segment,
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
-o, --output DIR  new folder for ledgers and logs (default: the next free d9m-runs/NNN)
-v, --verbose  show whole digests and the bits of losses
{FORMAT}{TIMEOUT}{TRAINING}"""
EXAMPLE = "d9m repeat -n 3 -- python train.py"
# torch reads the first only where the caller of `torch.load` leaves weights_only at its default,
# as Lightning does, and raises if the second is set beside it.
_ALLOW_OBJECTS = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "0"}
_OBJECTS = "Weights only load failed"
_UNSAVED = "so it cannot be saved and resumed"  # see StepRecorder
# By words in the log of a run that cannot resume.
_REMEDIES = {
    "InexactResumeError": (
        "To resume anyway and compare the result, set LIGHTNING_D9M_ON_INEXACT_RESUME=warn before "
        "the command."
    ),
    _OBJECTS: (
        "The checkpoint holds Python objects. To load them, add --allow-objects, or call "
        "fit(..., weights_only=False) in the program."
    ),
    "from run.next_epoch": (
        "The program begins at epoch 0 again. Let its loop count from the recorder's next_epoch: "
        "for epoch in range(run.next_epoch, epochs)."
    ),
}
_SAVED = "checkpoints"
# Of a segment at most, about, without the start of the program.
_SECONDS = 30.0
_LABELS = {
    "epoch": "resumed at the end of an epoch, after step {}",
    "step": "resumed after step {}",
    "accumulated": "resumed between accumulated batches, after step {}",
    "validation": "resumed within a validation, after step {}",
    "validated": "resumed at the end of a validation, after step {}",
}
_OWN = "resumed from its own checkpoint of step {}"


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print the comparison.

    Returns:
        0 if all runs are equal, 1 if some differ, 3 if none differs but some failed.
    """
    argv = get_command(arguments)
    _check_arguments(arguments)
    output = make_output(arguments.output)
    runs = Runs(argv, output, arguments.timeout)
    if arguments.interrupt:
        report = _interrupt_and_resume(argv, runs, allow_objects=arguments.allow_objects)
    else:
        watch = FileWatch(argv, output)
        made: dict[int, Run] = {}
        plan = list(_plan_runs(argv, arguments))
        for number, (title, count, options) in enumerate(plan, start=1):
            try:
                done = runs.run(f"run-{number:03d}", title, later=len(plan) - number, **options)
                made[number] = replace(done, processes=count)
                watch.note_run()
            except CommandError as error:
                before = f" (run {number - 1} succeeded)" if made else ""
                raise CommandError(f"In {title}{before}: {error}") from error
        printed = "" if arguments.processes else compare_printed(output)
        report = RepeatReport(made, output, argv, printed=printed, left=watch.describe)
    report.print_out(arguments.format, verbose=arguments.verbose)
    return {"equal": 0, "different": 1, "incomplete": 3}[report.verdict]


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


def _check_arguments(arguments: argparse.Namespace) -> None:
    if arguments.allow_objects and not arguments.interrupt:
        raise SettingError(
            "--allow-objects is only for --interrupt, which loads checkpoints. Leave it out, or "
            "add --interrupt."
        )


def _read_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of processes, separated by commas; an argparse ``type``.

    >>> _read_counts("1,2,4")
    (1, 2, 4)
    """
    counts = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not all(1 <= count <= _MOST_PROCESSES for count in counts):
        problem = f"allowed: whole numbers from 1 to {_MOST_PROCESSES}, separated by commas."
    elif len(set(counts)) < len(counts):
        problem = "a number occurs twice. Give each number once."
    elif len(counts) < _FEWEST_RUNS:
        problem = "one run cannot be compared. Give at least two numbers, such as 1,2,4."
    else:
        return tuple(counts)
    raise argparse.ArgumentTypeError(f"{text} is not valid; {problem}")


SETTINGS = {
    "runs": {"type": whole_number(_FEWEST_RUNS, MOST_RUNS)},
    "processes": {"type": _read_counts},
}


def _interrupt_and_resume(argv: list[str], runs: Runs, *, allow_objects: bool) -> RepeatReport:
    """Run the command straight, and a segment from each point at which it has saved.

    Returns:
        The straight run compared with the segments. A point whose segment fails is part of it and
        stops no other.

    Raises:
        CommandError: When the straight run fails or has saved at no point.
    """
    folder = runs.output / "run-001"
    saves = {INTERRUPT: POINTS, FOLDER: str(folder / _SAVED)}
    straight = runs.run(folder.name, "run 1, straight", variables=saves, may_fail=True)
    first = find_first_fit(straight)
    if straight.failure is not None or first is None:
        if _UNSAVED in _read_log(folder):
            raise CommandError(
                "--interrupt needs a training that can be saved and resumed, and this loop has "
                "neither a Trainer nor a Recorder: its steps are recorded by its optimizers alone. "
                "Add lightning_d9m.Recorder to the loop; see docs/loops.md."
            )
        raise straight.failure or CommandError("The command wrote no ledger of a fit.")
    recorded = RecordedRun(first.path)
    steps = int(_SECONDS * recorded.last_step / (straight.seconds or _SECONDS))
    segments = list(_choose_segments(recorded, folder / _SAVED, steps))
    if not segments:
        raise CommandError(
            "The command's first fit has no point from which it can be resumed: it has one epoch "
            "of one batch, and no validation. Train for more batches. A loop must call the "
            "recorder's epoch()."
        )
    trial = _Trial(runs, {1: replace(straight, label="straight")}, allow_objects=allow_objects)
    trial.last = len(segments) + 1
    for segment, label in segments:
        trial.add(segment, label)
    for file in (folder / _SAVED).glob("*"):
        if not file.name.startswith(tuple(trial.kept)):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    with suppress(OSError):
        (folder / _SAVED).rmdir()
    return RepeatReport(trial.made, runs.output, argv, resumed=True, steady=trial.steady)


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
    for point, label in (
        *((own[place], _OWN) for place in places),
        *((kept[kind], _LABELS[kind]) for kind in _LABELS if kind in kept),
    ):
        end = min((step for step in recorded.epoch_ends if step > point.step), default=last)
        stop = min(end + FOLLOWED_STEPS, point.step + max(FOLLOWED_STEPS, steps))
        length = f", for {pluralize(stop - point.step, 'step')}"
        if stop >= last:
            stop, length = recorded.stop, ", to the end of the fit"
        yield Segment(point, stop), f"{label.format(point.step)}{length}"


class _Trial:
    """Segments that resume from the checkpoints of one straight run.

    Args:
        runs: The runs of the command.
        made: The runs by number; run 1 is the straight one.
        allow_objects: Whether checkpoints may hold Python objects.

    Attributes:
        last: The number of the last run, for progress.
        steady: Whether the first run that differs does so in the same way twice; None if none does.
        kept: The names of the checkpoints that do not lead to the bits of the straight run.
    """

    def __init__(self, runs: Runs, made: dict[int, Run], *, allow_objects: bool) -> None:
        self._runs = runs
        self.made = made
        self._allowed = _ALLOW_OBJECTS if allow_objects else {}
        self._has_objects = False  # in the checkpoints of all points
        self.last = 1
        self.steady: bool | None = None
        self.kept: list[str] = []

    def add(self, segment: Segment, label: str) -> None:
        """Resume, and compare with the straight run; a failure is kept and stops no other."""
        if self._has_objects:
            return
        number = max(self.made) + 1
        title, name = f"run {number} of {self.last}", f"run-{number:03d}"
        words: dict[str, Any] = {"variables": self._allowed, "later": self.last - number}
        assert segment.start is not None, "it resumes"
        self.kept.append(segment.start.path.name)
        try:
            run = run_segment(self._runs, segment, name, title, **words)
        except (CommandError, LedgerError) as error:
            said = _read_log(self._runs.output / name)
            remedies = [remedy for cause, remedy in _REMEDIES.items() if cause in said]
            failure = CommandError("\n".join([str(error), *remedies]))
            self.made[number] = Run({}, f"{label}, failed", failure=failure)
            self._has_objects = _OBJECTS in said
            return
        self.made[number] = run = replace(run, label=label, is_part=True)
        if self._is_equal(self.made[1], run):
            self.kept.pop()
        elif self.steady is None:
            with suppress(CommandError, LedgerError):
                again = run_segment(
                    self._runs, segment, f"{name}-again", f"{title}, once more", **words
                )
                self.steady = self._is_equal(run, again)

    def _is_equal(self, one: Run, other: Run) -> bool:
        report = RepeatReport({1: one, 2: other}, self._runs.output, self._runs.command)
        return report.verdict == "equal"


def _read_log(folder: Path) -> str:
    log = folder / "output.log"
    return log.read_text(errors="replace") if log.exists() else ""
