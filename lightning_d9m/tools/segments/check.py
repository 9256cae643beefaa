"""The check of a run: its segments are computed again and compared with its ledger.

A segment that differs is computed a second time, because three causes look alike after the first: a
fault or a race in that run, a program that computes different values in each run, and a ledger
that says something else than what the program computes.
"""

import json
import os
import shutil
import site
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from sysconfig import get_path
from types import MappingProxyType
from typing import Any, TypeAlias

from lightning_d9m.engine.ledger.command import SEEDED
from lightning_d9m.engine.ledger.differences import Divergence, list_varying_ops
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.reader import holds_record
from lightning_d9m.engine.ledger.format.records import Digests, StepDigests
from lightning_d9m.engine.ledger.keys import Item
from lightning_d9m.errors import CommandError, LedgerError, file_errors, written_whole
from lightning_d9m.text import describe_names, escape, pluralize
from lightning_d9m.tools.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.tools.launch.runs import RunResult, Runs
from lightning_d9m.tools.segments.segment import (
    HASH_SEED,
    RecordedRun,
    Segment,
    find_first_fit,
    find_resume,
)

CHECK_JSON = "check.json"
_HASH_FIELD = f"variable.{HASH_SEED}"  # python.hash_randomized says whether it matters
_COMPILED_FOLDER = "compiled"
COMPILED = "D9M_COMPILED"  # the variable that names it to the jobs of a check
_FOLLOW_SECONDS = 1.0  # a poll reads the whole ledger
_STATES = Digests | StepDigests
_REASONS = {
    "transient": "A second run of the segment is equal to the ledger: the first had a fault of the "
    "machine, or a race that is rare.",
    "persistent": "Two runs of the segment agree, and differ from the ledger: the ledger, the "
    "checkpoint or this machine is wrong, or the program, its data or its settings have been "
    "changed since.",
    "program": "Two runs of the segment differ from each other, too: the program computes other "
    "values in each run, and `d9m locate` finds where.",
    "unclear": "Two runs of the segment agree, and differ from the ledger. Their stack is not "
    "that of the run, which alone may change results: {}.",
    "unseeded": "The initial weights differ. If neither a seed of the program nor LIGHTNING_D9M=1 "
    "decides them, each run draws others; else the program or the ledger has been changed.",
    "foreign": "The checkpoint is not the one that the ledger names: another run has saved it, or "
    "this one at another step, or the ledger has been changed since.",
    "refused": "The program has other settings than the run: {}.",
    "code": "The program has loaded other code than the run: {}.",
    "device": "Two runs of the segment agree, and differ from the ledger; a run with {} is equal "
    "to it. So this device computes different values: it has a fault, or is of another kind.",
    "same": "A run with {} agrees with them, so this device is not the reason.",
    "devices": "A run with {} differs from them, too, and from the ledger: the bits depend on the "
    "device.",
    "alone": "The segment differs, and a further run failed, which would have told why: {}",
}


@dataclass(frozen=True)
class CheckedSegment:
    """A segment that was checked.

    Attributes:
        number: The number of the ``Segment``.
        first: The global step at which it begins.
        last: The global step at which the next one begins, or the last one of the run.
        verdict: ``"equal"``; ``"transient"``, ``"persistent"`` or ``"program"`` if it differs, or
            ``"unclear"`` if the stack or unseeded weights may be the reason; ``"device"`` if it is
            equal on a second device; ``"refused"`` if it cannot be compared; ``"failed"`` if the
            command failed.
        reason: Why, in a sentence; empty if it is equal.
        equal_until: The global step of the last state before the difference.
        where: The first record that differs; empty without one.
        ledgers: The ledgers of its runs.
        checkpoint: The path of its checkpoint; empty for the beginning of the run.
        label: When its checkpoint was saved; empty where the step says enough.
    """

    number: int
    first: int
    last: int
    verdict: str = "equal"
    reason: str = ""
    equal_until: int = 0
    where: str = ""
    ledgers: Sequence[str] = ()
    checkpoint: str = ""
    label: str = ""

    @classmethod
    def of(cls, segment: Segment, last: int, label: str = "") -> "CheckedSegment":
        """Return what is known of a segment before it is checked."""
        checkpoint = "" if segment.start is None else str(segment.start.path)
        return cls(segment.number, segment.first, last, checkpoint=checkpoint, label=label)

    def explain(self, verdict: str, cause: str = "", *words: str) -> "CheckedSegment":
        """Return it with a verdict, and with the reason that the verdict or ``cause`` has."""
        reason = _REASONS[cause or verdict].format(*words)
        return replace(self, verdict=verdict, reason=reason)


# A run of a segment: what it shows, and how it compares if a second one must explain that.
_Attempt: TypeAlias = tuple[CheckedSegment, Comparison | None]


@dataclass
class CheckReport:
    """The result of a check.

    Attributes:
        output: The folder of the check.
        run: The ledger of the run; ``note_run`` notes it, and what it says of the whole run.
        is_drawn: Whether the segments were chosen at random.
        proof: The SHA-256 of the proof that is checked; empty for a ledger.
        choice: The seed with which another check chooses them again, if there is one.
        there: The numbers of segments that can be run.
        checked: Those that were run.
        limits: Sentences on what the run limits.
        notes: Further sentences.
        problems: Sentences on what contradicts a proof.
        varying_ops: The ops that the settings of the run let vary.
        interrupted: Whether the check ended before all that was asked for.
    """

    output: str = ""
    run: str = ""
    proof: str = ""
    is_drawn: bool = False
    choice: int | None = None
    there: list[int] = field(default_factory=list)
    last_step: int = 0
    checked: list[CheckedSegment] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    varying_ops: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def equal(self) -> list[CheckedSegment]:
        """The segments that are equal."""
        return [own for own in self.checked if own.verdict == "equal"]

    @property
    def verdict(self) -> str:
        """``"equal"``, ``"different"``, or ``"incomplete"``: a command failed, or was stopped."""
        verdicts = {own.verdict for own in self.checked}
        if verdicts <= {"equal", "failed"} and not self.problems:
            is_equal = verdicts == {"equal"} and not self.interrupted
            return "equal" if is_equal else "incomplete"
        return "different"

    @property
    def steps(self) -> int:
        """The number of steps in segments that are equal, each counted once."""
        steps = reached = 0
        for own in sorted(self.equal, key=lambda own: own.first):
            steps += max(0, own.last - max(own.first, reached))
            reached = max(own.last, reached)
        return steps

    @property
    def missed(self) -> float | None:
        """The probability with which such a choice misses a segment that alone is wrong.

        None if the segments were not chosen at random.
        """
        return 1 - len(self.checked) / len(self.there) if self.is_drawn else None

    def note_run(self, recorded: RecordedRun) -> None:
        """Note facts on the whole run, which may have grown since."""
        self.run, self.last_step = str(recorded.ledger.path), recorded.last_step
        self.varying_ops = list_varying_ops(recorded.ledger.header)

    @contextmanager
    def kept(self, folder: Path, show: Callable[[], object]) -> Iterator[None]:
        """Write the result after the body, even if that is interrupted, and show it.

        Of the checkpoints in ``folder``, those before a difference stay.
        """
        # Until the body has ended: a signal or an exception may end it anywhere.
        self.interrupted = True
        try:
            yield
            self.interrupted = False
        finally:
            differing = (Path(own.checkpoint) for own in self.checked if own.verdict != "equal")
            names = tuple(path.name for path in differing if path.parent == folder)
            for path in folder.glob("*"):
                if not path.name.startswith(names):  # ranks may have files beside it
                    _remove(path)
            with suppress(OSError):  # it is not empty, or not there
                folder.rmdir()
            if names:
                self.notes.append(f"The checkpoints before a difference are kept in {folder}.")
            shutil.rmtree(Path(self.output, _COMPILED_FOLDER), ignore_errors=True)
            file = Path(self.output, CHECK_JSON)
            # Before it is printed: the terminal may have been closed.
            # Whole: where ranks of a cluster share the file, a check of segments waits for it.
            with file_errors(LedgerError, f"{file} cannot be written"), written_whole(file) as part:
                part.write_text(json.dumps(self.as_json(), indent=2), encoding="utf-8")
            show()

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        return {
            "verdict": self.verdict,
            "steps": self.steps,
            "share": self.steps / max(1, self.last_step),
            "missed": self.missed,
            "segments": len(self.there),
            **asdict(self),
        }


def list_limits(recorded: RecordedRun, *, follows: bool = False) -> Iterator[str]:
    """Yield sentences on what limits a check of a run, or of one that it ``follows``."""
    # A check that follows a run removes its own links to checkpoints.
    removed = (point.path for point in recorded.points if not (follows or point.is_there))
    gone = [escape(str(path), 200) for path in removed]
    if not recorded.points:
        yield "The run saved no checkpoints, so its one segment is the whole run."
    elif gone:
        yield (
            f"Removed or replaced since: {pluralize(len(gone), 'checkpoint')} of the run, the "
            f"first {gone[0]}; such a segment is part of the one before it."
        )
    if recorded.end is None:
        yield f"The run still trains or was killed; its last state is of step {recorded.last_step}."
    elif not recorded.is_finished:
        error = escape((recorded.end.error or "").partition("\n")[0], 200)
        yield f"An exception ended the run after step {recorded.last_step}: {error}"


def compile_again(output: Path, used: Collection[str]) -> dict[str, str]:
    """Return variables with which the segments of a check run the code that their sources give.

    They share a folder for it below that of the check, or of the check whose job this is. ``used``
    are the packages and modules of the run, as ``Sources`` has them.
    """
    # Who has published the program may have put other code into __pycache__ beside it, and beside
    # its packages: one reads their sources, and the segment would run that.
    folder = Path(os.environ.get(COMPILED) or output / _COMPILED_FOLDER)
    if not folder.exists():
        _link_installed(folder, {name.partition("/")[0] for name in used})
    # Images of containers forbid to write it, so that each segment would compile torch again.
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


def _link_installed(folder: Path, used: Collection[str]) -> None:
    """Link the compiled files of installed packages, and of Python's own modules."""
    # To compile them takes 10 s with Lightning. Who can write there can change this package as
    # well. A wheel may bring compiled files, too, but cannot know when its sources are installed:
    # what Python and pip compile has this time, and other files the hash of their source.
    names = {*used, *sys.stdlib_module_names, "__pycache__"}
    ending = f".{sys.implementation.cache_tag}.pyc"
    for root in (*site.getsitepackages(), site.getusersitepackages(), get_path("stdlib")):
        for place, inner, files in os.walk(root):
            if place == root:
                inner[:] = names.intersection(inner)
            if place.endswith("__pycache__"):
                target = folder.joinpath(*Path(place).parts[1:-1])
                target.mkdir(parents=True, exist_ok=True)
                for name in files:
                    if name.endswith(ending):
                        _link_timed(f"{place}/{name}", f"{target}/{name}")


def _link_timed(path: str, target: str) -> None:
    """Link a compiled file that has the time of its source; without a link, it is compiled."""
    # Texts, as these are some ten thousand files.
    with suppress(OSError), open(path, "rb") as file:  # noqa: PTH123
        if not any(file.read(8)[4:]):
            try:
                os.link(path, target)  # takes a tenth of the time
            except OSError:  # another file system, or another owner
                os.symlink(path, target)  # noqa: PTH211


def check_part(
    recorded: RecordedRun, runs: Runs, segment: Segment, title: str, **options: Any
) -> CheckedSegment:
    """Check one of the segments that ``RecordedRun`` lists; see ``check_segment``."""
    is_last = segment == recorded.list_segments()[-1]
    checked = CheckedSegment.of(segment, recorded.last_step if is_last else segment.stop - 1)
    due = min(segment.stop, recorded.last_step)
    return check_segment(recorded, runs, segment, checked, due, title, **options)


def check_segment(
    recorded: RecordedRun,
    runs: Runs,
    segment: Segment,
    checked: CheckedSegment,
    due: int,
    title: str,
    *,
    second: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> CheckedSegment:
    """Run a segment, and a second time if it differs; compare it with the ledger.

    Args:
        recorded: The run.
        runs: Where its command runs.
        segment: The segment.
        checked: What is known of it.
        due: The step up to which something must be compared.
        title: The name of the segment, for the progress line.
        second: Variables that choose a second device, on which it runs a third time if the first
            two runs agree; empty for none.
        **options: Further arguments of ``run_segment``.
    """
    given = dict(options.pop("variables", {}))
    if recorded.sources is not None:
        given |= compile_again(runs.output, recorded.sources.used)

    def attempt(
        known: CheckedSegment, suffix: str = "", variables: Mapping[str, str] = MappingProxyType({})
    ) -> _Attempt:
        words = {**options, "variables": {**given, **variables}}
        name, what = f"segment-{known.number:03d}{suffix}", f"{title}{suffix.replace('-', ', ')}"
        run = recorded.run(runs, segment, name, what, **words)
        return _compare(recorded, run, segment, known, due)

    try:
        checked, found = attempt(checked)
    except (CommandError, LedgerError) as error:  # of this segment; the others are still run
        return replace(checked, verdict="failed", reason=str(error))
    if found is None:
        return checked
    try:
        return _repeat(attempt, checked, found, second)
    except (CommandError, LedgerError) as error:  # what the first run has shown stays
        return checked.explain("unclear", "alone", str(error))


def _repeat(
    attempt: Callable[..., _Attempt],
    checked: CheckedSegment,
    found: Comparison,
    second: Mapping[str, str],
) -> CheckedSegment:
    """Run a segment that differs again, and return it with the reason."""
    # Two runs that agree with each other rule out chance; see the head of this file.
    repeated, again = attempt(checked, "-again")
    known = checked = replace(checked, ledgers=repeated.ledgers)
    if again is None:  # it is equal, or cannot be compared
        return checked.explain("transient") if repeated.verdict == "equal" else repeated
    if not _agree(found, again):
        return checked.explain("program")
    fields = [entry.field for entry in found.stack if entry.field != _HASH_FIELD]
    is_other = bool(fields) and not found.portable
    checked = checked.explain("persistent")
    if is_other:
        checked = checked.explain("unclear", "", describe_names(fields, len(fields)))
    if not second:
        return checked
    device = " ".join(f"{name}={text}" for name, text in second.items())
    try:
        repeated, other = attempt(known, "-elsewhere", second)
    except (CommandError, LedgerError) as error:  # what two runs have shown stays
        return replace(checked, reason=f"{checked.reason} With {device}: {error}")
    checked = replace(checked, ledgers=repeated.ledgers)
    if other is None and repeated.verdict == "equal":
        return checked.explain("device", "", device)
    said = f"With {device}: {repeated.reason}"  # it cannot be compared
    if other is not None:
        said = _REASONS["same" if _agree(found, other) else "devices"].format(device)
    return replace(checked, reason=f"{checked.reason} {said}")


def _agree(one: Comparison, other: Comparison) -> bool:
    """Return whether two runs that were compared with the ledger are equal to each other."""
    return compare_ledgers(read_ledger(one.actual), read_ledger(other.actual)).equal


@dataclass
class _States:
    """The last step of each rank whose state a comparison has seen, and was equal."""

    until: dict[int, int] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)

    def watch(
        self, rank: int, one: Item | None, other: Item | None, found: Divergence | None
    ) -> None:
        """Note a record, as an observer of ``compare_ledgers``."""
        if found is not None:
            self.differing.add(rank)
        elif one is not None and rank not in self.differing and isinstance(other, _STATES):
            self.until[rank] = other.step


def _compare(
    recorded: RecordedRun, run: RunResult, segment: Segment, checked: CheckedSegment, due: int
) -> _Attempt:
    """Compare a run of a segment; return the comparison, too, if a second run must explain it."""
    ledger = find_first_fit(run)
    checked = replace(checked, ledgers=(*checked.ledgers, str(ledger.path)))
    resumed = find_resume(ledger)
    own = recorded.ledger.files[min(recorded.ledger.files)]
    # Without this, a checkpoint of another run of the same program would pass for this one's.
    if resumed is not None and (
        resumed.step != segment.first or not holds_record(own, resumed.parent_check)
    ):
        return checked.explain("refused", "foreign"), None
    if code := recorded.list_other_code(ledger):
        return checked.explain("refused", "code", describe_names(code, len(code))), None
    states = _States()
    comparison = recorded.compare(run, states.watch)
    if comparison.refusals:
        named = [
            f"{entry.field} is {escape(entry.actual)} and not {escape(entry.expected)}"
            for entry in comparison.refusals
        ]
        return checked.explain("refused", "", "; ".join(named)), None
    first = comparison.first
    equal_until = min(states.until.get(rank, segment.first) for rank in ledger.files)
    problems = [] if first is None else [first.where]
    if equal_until < due:
        problems.append(f"nothing is compared after step {equal_until:,}")
    if not (problems or comparison.equal):
        problems.append("records that only one of both has")
    if not problems:
        return replace(checked, equal_until=equal_until), None
    checked = replace(checked, equal_until=equal_until, where=problems[0])
    is_initial = first is not None and first.moment == "initial" and first.kind == "weights"
    if is_initial and SEEDED not in recorded.ledger.header.program:
        return checked.explain("unclear", "unseeded"), None
    return checked, comparison


def follow_run(
    path: Path,
    folder: Path,
    check: Callable[[RecordedRun, Segment], CheckedSegment],
    patience: float | None,
) -> RecordedRun:
    """Check the segments of a run while it trains, as its checkpoints appear.

    ``folder`` gets links to checkpoints, because the run may remove its own before they are used.
    Segments lie between these: a checkpoint that was removed too soon makes one longer, and no step
    is left out. The checkpoints before a difference stay. A ledger that does not grow for
    ``patience`` seconds counts as that of a killed run. Returns the run at its end.
    """
    kept: dict[int, Path] = {}
    done: set[int] = set()
    grown, last = time.monotonic(), -1
    while True:
        recorded = RecordedRun(path, kept)
        # Read before the links are made: a checkpoint that is written after the last record may be
        # a later one at the same path, whose record is still to come.
        before = recorded.ledger.files[min(recorded.ledger.files)].stat().st_mtime_ns
        limit = before if recorded.end is None else None
        # Not `points`, which has the links once they are made.
        for point in recorded.saved:
            target = folder / f"{point.step}-{point.path.name}"
            if point.is_there and point.step not in kept and _link(point.path, target, limit):
                kept[point.step] = target
        if recorded.last_step != last:
            grown, last = time.monotonic(), recorded.last_step
        is_late = patience is not None and time.monotonic() - grown > patience
        is_over = recorded.end is not None or is_late
        segments = recorded.list_segments()
        if not is_over:  # the last segment is not complete
            segments.pop()
        new = [own for own in segments if own.number not in done]
        for segment in new if is_over else new[:1]:
            done.add(segment.number)
            # A link keeps the file on the disk when the run removes it, so that of each segment
            # goes as soon as nothing needs it: a long run would fill the disk.
            if check(recorded, segment).verdict == "equal" and segment.start is not None:
                _remove(segment.start.path)
        if is_over:
            return recorded
        if not new:
            time.sleep(_FOLLOW_SECONDS)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _link(path: Path, target: Path, before: int | None) -> bool:
    """Link to a file, or to all files of a folder, or copy them; return whether that was done.

    It is not done if one was written after ``before``, in nanoseconds: it may be that of a later
    checkpoint, whose record is still to come.
    """
    is_folder = path.is_dir()
    try:
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(path, target, copy_function=os.link) if is_folder else os.link(path, target)
    except OSError:  # another file system; or the run has removed it, which a copy tells
        with suppress(OSError):
            shutil.copytree(path, target) if is_folder else shutil.copy2(path, target)
        if not target.exists():
            return False
    files = target.rglob("*") if is_folder else [target]
    written = max((file.stat().st_mtime_ns for file in files), default=0)
    if before is None or written <= before:
        return True
    _remove(target)
    return False
