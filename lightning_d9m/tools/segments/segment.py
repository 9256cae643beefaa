"""A segment: a part of a run, from a checkpoint or from the beginning to a step, that runs again.

The user's own command runs it. Variables let its first fit resume from the checkpoint, stop after
the step, and write no checkpoints; see ``engine.recording.interruption``.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_d9m.engine.hashing.files import read_sign
from lightning_d9m.engine.ledger.command import MAX_COMMAND
from lightning_d9m.engine.ledger.folder import Ledger, read_ledger
from lightning_d9m.engine.ledger.format.reader import read_lineage, read_resume
from lightning_d9m.engine.ledger.format.records import (
    Checkpoint,
    Digests,
    End,
    Record,
    Resume,
    Sources,
    StepDigests,
)
from lightning_d9m.engine.ledger.kinds import FINAL, STATE_HASH
from lightning_d9m.engine.recording.interruption import (
    FOLDER,
    INTERRUPT,
    MARK,
    RESUME,
    SEVERAL,
    SEVERAL_FITS,
)
from lightning_d9m.errors import CommandError, LedgerError, SettingError, file_errors
from lightning_d9m.text import escape
from lightning_d9m.tools.comparison.ledgers import Comparison, RecordObserver, compare_ledgers
from lightning_d9m.tools.launch.runs import RunResult, Runs

HASH_SEED = "PYTHONHASHSEED"
_PROVABLE = "LIGHTNING_D9M_PROVABLE"


@dataclass(frozen=True)
class SavedPoint:
    """A checkpoint that a run has saved.

    Attributes:
        path: Where its ledger says that it is.
        step: The global step.
        is_replaced: Whether the run has saved a later checkpoint at the same path.
    """

    path: Path
    step: int
    is_replaced: bool = False

    @property
    def is_there(self) -> bool:
        """True if the file or folder exists, and is that of the step."""
        return not self.is_replaced and self.path.exists()


@dataclass(frozen=True)
class Segment:
    """A part of a run.

    Attributes:
        start: The checkpoint from which it begins; None for the beginning of the run.
        stop: The global step after which it ends; one after the last step of the run lets the fit
            end as it does.
        number: The number of the checkpoint among all of the run, from 1; 0 for the beginning. It
            stays when another one is removed, and while the run saves more.
        kind: The request for it, see ``engine.recording.interruption``.
        of: The ledger of the run, where the request names it; else None.
    """

    start: SavedPoint | None
    stop: int
    number: int = 0
    kind: str = "stop"
    of: Path | None = None

    @property
    def first(self) -> int:
        """The global step at which it begins."""
        return 0 if self.start is None else self.start.step

    @property
    def end(self) -> str:
        """The step or epoch after which it ends, as text."""
        return f"{'epoch' if self.kind == 'epoch' else 'step'} {self.stop}"

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a run of it, without its folder."""
        begins = {} if self.start is None else {RESUME: str(self.start.path)}
        return {
            **begins,
            INTERRUPT: f"{self.kind}:{self.stop}" + (f":{self.of}" if self.of else ""),
        }


class RecordedRun:
    """A run whose ledger exists, and which can be run again in parts.

    Args:
        path: Its ledger, see ``read_ledger``.
        kept: By step, the paths of the checkpoints that count, in place of those in the ledger.

    Attributes:
        ledger: The ledger.
        saved: The checkpoints, in the order in which they were saved.
        epoch_ends: The global steps at which epochs ended, in the order of the records.
        last_step: The global step of the last record of the state; 0 without one.
        end: The record that ends the ledger; None if the run was killed or still runs.
        ends: The states that end segments: the first after each checkpoint, and the final one.
        last_state: The last record of the state.
        sources: The program, if the run commits to it.
        gaps: What of program and data it does not commit to, and why.

    Raises:
        LedgerError: If the ledger cannot be read.
        SettingError: If it is not the first fit of its program, which variables cannot reach.
    """

    def __init__(self, path: Path, kept: Mapping[int, Path] | None = None) -> None:
        self.ledger = read_ledger(path)
        self._kept = kept
        if fit := self.ledger.header.fit:
            raise SettingError(
                f"{self.ledger.path} is fit {fit} of its program, counted from 0, and only the "
                "first fit can be run in parts. Name the ledger of fit 0, or train this one in a "
                "separate program."
            )
        self.saved: list[SavedPoint] = []
        self._last: dict[Path, SavedPoint] = {}  # also of what a resume has left
        self.epoch_ends: list[int] = []
        self.last_step = 0
        self.end: End | None = None
        self._ends_within = True  # whether a run must begin another step to repeat the last record
        self.ends: list[Digests | StepDigests] = []
        self.last_state: Digests | StepDigests | None = None
        self.sources: Sources | None = None
        self.gaps: dict[str, str] = {}
        self._signs: dict[Path, object] = {}
        self._is_saved = False  # whether the state of the last checkpoint is still to come
        # One rank: all save at the same steps. Read once, as a ledger with probes may be long.
        own = self.ledger.files[min(self.ledger.files)]
        for file, record in read_lineage(own):
            self._note(record, file)
        # A later checkpoint at one path, as `last.ckpt`, has overwritten the earlier one.
        self.saved = [replace(own, is_replaced=self._last[own.path] != own) for own in self.saved]

    def _note(self, record: Record, file: Path) -> None:
        """Note what a record says of the run as a whole."""
        if isinstance(record, Checkpoint):
            # The folder of the ledger and of its checkpoints may have been moved.
            path = (file.parent / record.path).resolve()
            self.saved.append(SavedPoint(path, record.step))
            self._last[path] = self.saved[-1]
            self._is_saved = True
        elif isinstance(record, Resume):
            # The run has left what the one before did after this step.
            self.end = None
            self.last_step, self._ends_within = record.step, False
            self.saved = [own for own in self.saved if own.step <= record.step]
        elif isinstance(record, End):
            self.end = record
        elif isinstance(record, Sources):
            self.sources = record
            self.gaps |= record.gaps
        elif isinstance(record, Digests | StepDigests):
            self._note_state(record)

    def _note_state(self, record: Digests | StepDigests) -> None:
        self.last_state, is_step = record, isinstance(record, StepDigests)
        if (is_step and self._is_saved) or getattr(record, "moment", "") == FINAL:
            self.ends.append(record)
            self._is_saved = False
        if record.step >= self.last_step:
            # Digests are taken after what follows a step, such as the end of an epoch.
            self.last_step, self._ends_within = record.step, not is_step
            if getattr(record, "moment", "") == "epoch":
                self.epoch_ends.append(record.step)

    @property
    def command(self) -> str:
        """The command that the run's ledger names; empty if it names none."""
        return str(self.ledger.header.program.get("command", ""))

    @cached_property
    def points(self) -> list[SavedPoint]:
        """The checkpoints of the run, by step; of several of one step, one that is there."""
        found: dict[int, SavedPoint] = {}
        for saved in self.saved:
            point = saved
            if self._kept is not None:
                path = self._kept.get(point.step, point.path)
                point = replace(point, path=path, is_replaced=point.step not in self._kept)
            known = found.get(point.step)
            # ModelCheckpoint may write one step to two files, and keep only one of them.
            if known is None or point.is_there or not known.is_there:
                found[point.step] = point
        return [found[step] for step in sorted(found)]

    @cached_property
    def step_totals(self) -> dict[int, Mapping[str, str]]:
        """The digests of the state after the steps that follow a checkpoint, by global step."""
        return {
            record.step: record.totals
            for record in self.ledger.records(min(self.ledger.files))
            if isinstance(record, StepDigests)
        }

    @property
    def stop(self) -> int:
        """The step after which a segment ends that lets the fit end as it does."""
        return self.last_step + self._ends_within

    @property
    def is_finished(self) -> bool:
        """True if the fit ended as it should."""
        return self.end is not None and self.end.status == "finished"

    @property
    def has_failed(self) -> bool:
        """True if an exception ended the fit."""
        return self.end is not None and not self.is_finished

    @property
    def variables(self) -> dict[str, str]:
        """The variables that a part of the run needs to compute what the run has computed."""
        seed = self.ledger.header.stack.get(f"variable.{HASH_SEED}")
        variables = {HASH_SEED: str(seed or "random")}  # Python's default
        is_provable = any(STATE_HASH in own.totals for own in self.ends)
        return variables | ({_PROVABLE: "1"} if is_provable else {})

    def find_start(self, step: int) -> SavedPoint | None:
        """Return the last checkpoint at or before a step that is there; None for the beginning."""
        usable = [point for point in self.points if point.step <= step and point.is_there]
        return usable[-1] if usable else None

    def list_segments(self) -> list[Segment]:
        """Return the segments between all checkpoints that are there, in order.

        Each ends a step after the next checkpoint, whose record shows the state of the checkpoint;
        the last one ends with the fit.
        """
        last = self.last_step
        numbered: list[tuple[int, SavedPoint | None]] = [(0, None)]
        numbered += [
            (number, point)
            for number, point in enumerate(self.points, start=1)
            if point.is_there and point.step < last
        ]
        stops = [point.step + 1 for _, point in numbered if point is not None]
        stops.append(self.stop)
        pairs = zip(numbered, stops, strict=True)
        return [Segment(start, stop, number) for (number, start), stop in pairs]

    def watch(self, files: Iterable[Path]) -> None:
        """Note files that must stay as they are while the run is checked."""
        self._signs = {path: read_sign(path.stat()) for path in files}

    def list_changed(self) -> Iterator[Path]:
        """Yield the files that were removed, written or replaced since they are watched."""
        for path, sign in self._signs.items():
            # Not by content: a program could put that back after a comparison has read another.
            if not path.exists() or read_sign(path.stat()) != sign:
                yield path

    def list_other_code(self, ledger: Ledger) -> list[str]:
        """Return the files that a segment, with its ledger, has loaded and the run has not.

        They are those of the program: packages are the business of who runs the segment.
        """
        if self.sources is None:
            return []
        known, other = {**self.sources.program, **self.sources.named}, set[str]()
        file = ledger.files[min(ledger.files)]
        records = (record for path, record in read_lineage(file) if path == file)
        found = [own for own in records if isinstance(own, Sources)]
        for own in found:
            named = {n: own.named[n] for n in own.named if f"file {n}" not in self.gaps}
            other |= {n for n, text in {**named, **own.program}.items() if known.get(n) != text}
        return sorted(other) if found else ["it has no record of it"]

    def run(self, runs: Runs, segment: Segment, name: str, title: str, **options: Any) -> RunResult:
        """Run a segment of it as it ran itself; see ``run_segment``."""
        options["variables"] = {**self.variables, **options.get("variables", {})}
        # An exception that has ended the run may come again in its last segment.
        may_fail = self.has_failed and segment.stop >= self.stop
        return run_segment(runs, segment, name, title, may_fail=may_fail, **options)

    def compare(self, run: RunResult, watch: RecordObserver | None = None) -> Comparison:
        """Compare with a run of a segment; ``watch`` as in ``compare_ledgers``.

        Raises:
            CommandError: If it has no ledger of a first fit.
        """
        return compare_ledgers(self.ledger, find_first_fit(run), watch=watch)


def find_first_fit(run: RunResult) -> Ledger:
    """Return the ledger of the first fit of a run.

    Raises:
        CommandError: If it has none.
    """
    for name, fit in run.fits.items():
        if name.startswith("fit-") and fit.header.fit == 0:
            return fit
    raise run.failure or CommandError("The command wrote no ledger of a fit.")


def run_segment(
    runs: Runs,
    segment: Segment,
    name: str,
    title: str,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    may_fail: bool = False,
    **options: Any,
) -> RunResult:
    """Run a segment with the command of ``runs``, in the folder ``name``.

    ``options`` are further arguments of ``Runs.run``. The ledger of a run that ends with a
    ``DriftError`` is as good as that of one that reaches its step; with ``may_fail``, which is for
    the end of a run that failed, that of one that ends with any exception.

    Raises:
        CommandError: If the command fails, does not resume, or ends before the step.
    """
    folder = runs.output / name / "segment"
    with file_errors(LedgerError, f"The folder {folder} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    mark, several = folder / MARK, folder / SEVERAL
    given = {**variables, **segment.variables, FOLDER: str(folder)}

    def is_over() -> bool:
        return mark.exists() or several.exists()

    # Its processes are killed at the mark, so the status of the command says nothing: the mark and
    # the ledger do.
    run = runs.run(name, title, variables=given, may_fail=True, killed_when=is_over, **options)
    if several.exists():
        raise CommandError(SEVERAL_FITS)
    ledger = find_first_fit(run)
    # The mark is written when the step is reached; a program may also end well without it, with
    # fewer batches or fits.
    if not (mark.exists() or any(may_fail or is_drift(end) for end in list_ends(ledger))):
        raise run.failure or CommandError(
            f"The command ended well, and its first fit did not reach {segment.end}, "
            f"as the run that it should repeat. Log: {folder.parent / 'output.log'}."
        )
    # A run up to an epoch is compared with one that begins in the same way.
    if segment.start is None and segment.kind != "epoch" and find_resume(ledger) is not None:
        raise CommandError(
            "The program resumed from a checkpoint by itself, and this segment begins at the "
            "beginning of the run. Let its first fit begin there, such as with ckpt_path=None, or "
            f"move its checkpoints. Log: {folder.parent / 'output.log'}."
        )
    if segment.start is not None and find_resume(ledger) is None:
        raise CommandError(
            f"The program did not resume from {escape(str(segment.start.path))}: its ledger does "
            "not continue another one. Let its first fit resume, or give a checkpoint that was "
            f"saved with DeterminismCallback. Log: {folder.parent / 'output.log'}."
        )
    return replace(run, failure=None) if mark.exists() else run


def list_ends(*ledgers: Ledger) -> list[End]:
    """Return the records that end the files of ledgers; a run that was killed has none."""
    ends = (ledger.outcome(rank).end for ledger in ledgers for rank in ledger.files)
    return [end for end in ends if end is not None]


def is_drift(end: End) -> bool:
    """Return whether a difference from a reference or between ranks ended a fit."""
    # The ledger has the text of an exception and not its class, which may be one of the program.
    return (end.error or "").startswith("DriftError")


def find_resume(ledger: Ledger) -> Resume | None:
    """Return the record that names the ledger which a ledger continues; None if it begins a run."""
    return read_resume(ledger.files[min(ledger.files)])


def name_other_command(recorded: RecordedRun, command: Sequence[str]) -> str:
    """Return a sentence if the command is not that of the ledger; empty if it is.

    It may name another interpreter or path of the same program.
    """
    # The ledger has the beginning of a long one.
    known, given = recorded.command, shlex.join(command)
    own, other = (text.partition(" ")[2] for text in (known, given))
    if not known or own == other or (len(known) >= MAX_COMMAND and other.startswith(own)):
        return ""
    return f"The ledger names another command: {escape(known)}. The parts are run with yours."
