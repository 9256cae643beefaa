"""A return to a step of a run: the part before it runs again, is compared, and stops there.

``StepDebugger`` is the other side, in the process of the program.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_d9m.engine.ledger.folder import Ledger, list_fits, read_ledger
from lightning_d9m.engine.ledger.format.records import Batch, Digests, StepDigests
from lightning_d9m.engine.ledger.keys import Item
from lightning_d9m.engine.recording.interruption_points import FOLDER, MARK, NONFINITE
from lightning_d9m.engine.recording.step_debugger import ANSWER, ARRIVED, ENTER
from lightning_d9m.errors import CommandError, LedgerError, SettingError, file_errors
from lightning_d9m.tools.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.tools.launch.run import Runs, run_in_terminal
from lightning_d9m.tools.segments.segment import (
    RecordedRun,
    SavedPoint,
    Segment,
    find_first_fit,
    has_resumed,
    run_segment,
)

# Of a run that was killed, nobody knows where it ended.
_NEVER = 10**17
_SETTINGS = ("probes", "probe_steps")


@dataclass(frozen=True)
class PartCheck:
    """The comparison of a part of a run with the run, as far as both are recorded.

    Attributes:
        comparison: The comparison.
        last: The last step whose state was compared; None if none was.
        resumed: Whether the part began at a checkpoint.
    """

    comparison: Comparison
    last: int | None
    resumed: bool

    @property
    def differs(self) -> bool:
        """Whether something differs, or the runs cannot be compared."""
        different = self.comparison.verdict == "different"
        return different or bool(self.comparison.refusals)

    def as_json(self) -> dict[str, object]:
        """Return the check as JSON types."""
        return {"differs": self.differs, "last": self.last, "resumed": self.resumed}


@dataclass(frozen=True)
class Nonfinite:
    """The first value that is not finite.

    Attributes:
        step: The global step in which it is computed.
        kind: ``"loss"``, ``"gradient"`` or ``"weight"``.
        name: The name of the parameter, or of the method that returned the loss.
        rank: The rank that has it.
    """

    step: int
    kind: str
    name: str
    rank: int


def find_segment(recorded: RecordedRun, step: int) -> Segment:
    """Return the segment that ends after a step, from the last checkpoint at or before it.

    Raises:
        SettingError: If the run did not reach the step, or cannot be stopped at one.
    """
    header, last = recorded.ledger.header, recorded.last_step
    if "every_n_steps" in header.settings:
        raise SettingError(
            f"{recorded.ledger.path} was written by the optimizers of a loop without a Recorder, "
            "which cannot be stopped at a step. Add lightning_d9m.Recorder to the loop; see "
            "docs/loops.md."
        )
    end = recorded.ledger.outcome(min(recorded.ledger.files)).end
    # A run that failed has begun the step after its last one.
    steps = last if recorded.is_finished else last + 1
    if end is not None and step >= steps:
        raise SettingError(
            f"The run {recorded.ledger.path} has no step {step}; allowed: 0 to {steps - 1}."
        )
    return Segment(recorded.find_start(step), step + 1)


def check_part(recorded: RecordedRun, part: Ledger) -> PartCheck:
    """Compare a run's part, which may still be under way, with the run."""
    compared: list[int] = []

    def note(_: int, one: Item | None, other: Item | None, __: object) -> None:
        if isinstance(one, Digests | StepDigests | Batch) and other is not None:
            compared.append(one.step)

    comparison = compare_ledgers(recorded.ledger, part, watch=note)
    return PartCheck(comparison, max(compared, default=None), has_resumed(part))


def debug_step(
    recorded: RecordedRun,
    segment: Segment,
    command: Sequence[str],
    folder: Path,
    *,
    debugger: str,
    rank: int,
    may_enter: Callable[[PartCheck], bool],
) -> list[PartCheck]:
    """Run a segment on the terminal, whose last step a rank runs in a debugger.

    ``may_enter`` is called when the step is reached; if it returns False, the run ends there.

    Returns:
        The comparison before the step, and where it ran that after it.

    Raises:
        CommandError: If the command does not reach the step.
        LedgerError: If a ledger cannot be read, or the folder not be written.
    """
    shared = folder / "segment"
    with file_errors(LedgerError, f"The folder {shared} cannot be made"):
        shared.mkdir(parents=True)
        os.mkfifo(shared / ANSWER)
    variables = replace(segment, kind=f"debug:{rank}:{debugger}").variables
    # For reading too: it is open before the program opens it, and closed if this process ends.
    pipe = [os.open(shared / ANSWER, os.O_RDWR)]
    checks: list[PartCheck] = []

    def answer_and_stop() -> bool:
        if pipe and (shared / ARRIVED).exists():
            try:
                checks.append(check_part(recorded, _read_first_fit(folder)))
                if may_enter(checks[0]):
                    os.write(pipe[0], ENTER.encode())
            finally:
                os.close(pipe.pop())
        return (shared / MARK).exists()

    try:
        status = run_in_terminal(
            command, folder, {**variables, FOLDER: str(shared)}, answer_and_stop
        )
    finally:
        for left in pipe:
            os.close(left)
    if not checks:
        ended = "ended well" if not status else f"failed (exit status {status})"
        raise CommandError(
            f"The command {ended} before its first fit reached step {segment.stop - 1}."
        )
    return [checks[0], *(check_part(recorded, _read_first_fit(folder)) for _ in checks)]


def trace_step(recorded: RecordedRun, segment: Segment, runs: Runs) -> tuple[PartCheck, Ledger]:
    """Run a segment and record all probes of its last step; return the ledger.

    Raises:
        CommandError: As ``run_segment``.
    """
    steps = f"{segment.stop - 1}:{segment.stop}"
    variables = {"LIGHTNING_D9M_PROBES": "all", "LIGHTNING_D9M_PROBE_STEPS": steps}
    run = run_segment(runs, segment, "trace", f"step {segment.stop - 1}", variables=variables)
    ledger = find_first_fit(run)
    assert ledger is not None, "run_segment has found it"
    return check_part(recorded, ledger), ledger


def find_nonfinite(
    recorded: RecordedRun, runs: Runs, holds_finite: Callable[[Path], bool]
) -> tuple[SavedPoint | None, Nonfinite | None]:
    """Run from the last checkpoint with finite weights until something is not finite.

    ``holds_finite`` returns whether the weights of a checkpoint are finite; False if it cannot be
    read.

    Returns:
        The checkpoint, None for the beginning; and the first value, None if all are finite.

    Raises:
        CommandError: As ``run_segment``.
    """
    there = (point for point in reversed(recorded.points) if point.is_there)
    start = next((point for point in there if holds_finite(point.path)), None)
    last = recorded.ledger.outcome(min(recorded.ledger.files)).end
    stop = _NEVER if last is None else recorded.last_step + 1
    run_segment(runs, Segment(start, stop, "nonfinite"), "nonfinite", "first value not finite")
    found = runs.output / "nonfinite/segment" / NONFINITE
    if not found.exists():
        return start, None
    facts: Mapping[str, object] = json.loads(found.read_text())
    return start, Nonfinite(**facts)  # type: ignore[arg-type] # as Interruption.check_finite has it


def _read_first_fit(folder: Path) -> Ledger:
    fits = map(read_ledger, list_fits(folder))
    return next(fit for fit in fits if fit.header.fit == 0)
