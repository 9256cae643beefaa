"""Interruptions of a training: survey, save and kill, resume, keep checkpoints, stop at a step.

Commands set variables, which apply to the first fit of a process, so that the program needs no
change:

- ``LIGHTNING_D9M_INTERRUPT``: ``survey``; a point such as ``batch:1:7`` at which the training is
  saved and killed, see :class:`InterruptionPoint`; ``keep``, which saves checkpoints as often as
  costs little; or ``stop:320``, which makes the run a segment: it ends after this global step, and
  the checkpoints that the program saves are not written, because those of the earlier run have the
  same names. ``nonfinite:320`` is a segment that ends as soon as a loss, gradient or weight is not
  finite, and ``debug:0:pdb:320:LEDGER`` one whose last step rank 0 runs in a debugger;
- ``LIGHTNING_D9M_CHECKPOINT_DIR``: the folder for the survey, or for checkpoints and a file that
  marks that the point was reached;
- ``LIGHTNING_D9M_RESUME``: the checkpoint to resume from.

Nothing here imports torch.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_d9m.engine.ledger.format.records import End
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.checkpoint_ring import CheckpointRing
from lightning_d9m.engine.recording.step_debugger import DEBUGGERS, StepDebugger
from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.text import pluralize

INTERRUPT = "LIGHTNING_D9M_INTERRUPT"
FOLDER = "LIGHTNING_D9M_CHECKPOINT_DIR"
RESUME = "LIGHTNING_D9M_RESUME"
# Seed of a change of the last bits of all weights, and the setting with which a ledger records it.
LAST_BITS = "LIGHTNING_D9M_LAST_BITS"
# Files in FOLDER: the epochs' shapes, the checkpoint, and the mark that the point was reached.
SURVEY = "survey"
KEEP = "keep"
CHECKPOINT = "interrupted.ckpt"
MARK = "killed"
# The first value that is not finite, as JSON.
NONFINITE = "nonfinite"
DIFFERS = "the program differs from the run that it repeats"

InterruptionKind = Literal["epoch", "batch", "validation", "validated"]
_PLURALS = {"batch": "batches", "step": "steps"}
_STOP = re.compile(r"(stop|nonfinite):(\d{1,18})", re.ASCII)
_DEBUG = re.compile(
    rf"debug(-anyway)?:(\d{{1,9}}):({'|'.join(DEBUGGERS)}):(\d{{1,18}}):(.+)", re.ASCII
)
_PATTERN = re.compile(
    rf"({'|'.join(get_args(InterruptionKind))}):(\d+)(?::(\d+))?(?:\+(\d+))?", re.ASCII
)


@dataclass(frozen=True)
class InterruptionPoint:
    """A point within a fit.

    Attributes:
        kind: ``"epoch"`` at the end of an epoch, ``"batch"`` after a batch of training,
            ``"validation"`` after a batch of a validation, ``"validated"`` at a validation's end.
        epoch: The epoch, counted from 0.
        number: Number of batches of the epoch's training or validation that are done; 0 at an end.
        later: Number of further batches that are trained before the process is killed.
    """

    kind: InterruptionKind
    epoch: int
    number: int = 0
    later: int = 0

    def __str__(self) -> str:
        number = f":{self.number}" if self.number else ""
        return f"{self.kind}:{self.epoch}{number}" + (f"+{self.later}" if self.later else "")


@dataclass(frozen=True)
class EpochShape:
    """The batches of an epoch.

    Attributes:
        epoch: Its number, counted from 0.
        batches: Number of training batches.
        accumulated: Number of batches for each optimizer step.
        validation: Number of validation batches within the epoch.
        unit: ``"batch"``, or ``"step"`` if steps of the optimizer are counted in place of batches.
    """

    epoch: int
    batches: int
    accumulated: int
    validation: int
    unit: str = "batch"


@dataclass(frozen=True)
class InterruptRequest:
    """The variables' requests for a fit.

    Attributes:
        resume: The checkpoint to resume from; None for none.
        folder: The folder for the survey, checkpoints and marks; None if nothing is wanted.
        point: Where to save and kill; None for nowhere.
        surveys: Whether to write the shapes of the epochs.
        keeps: Whether to save checkpoints from time to time.
        stop: The global step after which to stop; None for none.
        debugger: What opens before the step that ends at ``stop``; None for nothing.
        finds_nonfinite: Whether to stop at the first value that is not finite.
    """

    resume: Path | None = None
    folder: Path | None = None
    point: InterruptionPoint | None = None
    surveys: bool = False
    keeps: bool = False
    stop: int | None = None
    debugger: StepDebugger | None = None
    finds_nonfinite: bool = False


def is_segment(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the variables make this process a segment of an earlier run."""
    kind = environment.get(INTERRUPT, "").partition(":")[0]
    return kind in ("stop", "nonfinite", "debug", "debug-anyway")


class _FaultState:
    """The number of fits that this process has begun."""

    fits = 0


def find_checkpoint(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the checkpoint from which the variables let the next fit resume; None if none.

    Raises:
        SettingError: If it does not exist.
    """
    resume = environment.get(RESUME)
    if not resume or _FaultState.fits:
        return None
    if not Path(resume).exists():
        raise SettingError(f"The variable {RESUME} is '{resume}', which does not exist.")
    return Path(resume)


def read_request(environment: Mapping[str, str] = os.environ) -> InterruptRequest:
    """Return what the variables ask of the fit that begins; only of the first in a process.

    Raises:
        SettingError: If a variable has a value that is not allowed.
    """
    path = find_checkpoint(environment)
    _FaultState.fits += 1
    if _FaultState.fits > 1:
        return InterruptRequest()
    request = environment.get(INTERRUPT)
    if not request:
        return InterruptRequest(path)
    if not (folder := environment.get(FOLDER)):
        raise SettingError(
            f"The variable {INTERRUPT} is {request!r} and {FOLDER} is not set. Set it to a "
            "folder for the checkpoint."
        )
    if request in (SURVEY, KEEP):
        surveys = request == SURVEY
        return InterruptRequest(path, Path(folder), surveys=surveys, keeps=not surveys)
    if (stop := _STOP.fullmatch(request)) is not None:
        finds = stop[1] == "nonfinite"
        return InterruptRequest(path, Path(folder), stop=int(stop[2]), finds_nonfinite=finds)
    if (found := _DEBUG.fullmatch(request)) is not None:
        anyway, rank, name, step, ledger = found.groups()
        debugger = StepDebugger(name, int(rank), ledger, opens_anyway=anyway is not None)
        return InterruptRequest(path, Path(folder), stop=int(step), debugger=debugger)
    return InterruptRequest(path, Path(folder), parse_point(request))


def parse_point(text: str) -> InterruptionPoint:
    """Parse an interruption point.

    Raises:
        SettingError: If the text is not a valid one.

    >>> parse_point("batch:1:7+3")
    InterruptionPoint(kind='batch', epoch=1, number=7, later=3)
    """
    match = _PATTERN.fullmatch(text)
    if match is None or (match[1] in ("batch", "validation")) != (match[3] is not None):
        raise SettingError(
            f"The variable {INTERRUPT} is {text!r}; allowed: {SURVEY}, {KEEP}, stop:STEP, "
            "nonfinite:STEP, debug:RANK:DEBUGGER:STEP:LEDGER, epoch:E, validated:E, batch:E:N or "
            "validation:E:N, with whole numbers, and +N after it for N batches more."
        )
    kind: InterruptionKind = match[1]  # type: ignore[assignment]
    return InterruptionPoint(kind, int(match[2]), int(match[3] or 0), int(match[4] or 0))


class Interruption:
    """Surveys a training, saves it, or ends its process at a point.

    The training calls ``reach`` at each point, on all ranks. If that returns True, it saves itself
    to ``checkpoint`` and calls ``end_save``. It calls ``pass_step`` after each step, with a
    function that saves it, and ``stop`` at its end. ``before_kill`` waits for a save in the
    background; ``before_stop`` closes the ledger with the record that it is given.
    """

    def __init__(
        self,
        request: InterruptRequest,
        ranks: Ranks,
        before_kill: Callable[[], object] = lambda: None,
        before_stop: Callable[[End], object] = lambda _: None,
    ) -> None:
        self._request = request
        self._ranks = ranks
        self._before_kill = before_kill
        self._before_stop = before_stop
        self._shapes: list[EpochShape] = []
        self._remaining: int | None = None  # batches until the kill
        self._begun = -1  # the step that the debugger was opened for
        self._ring: CheckpointRing | None = None
        if request.keeps and request.folder is not None:
            self._ring = CheckpointRing(request.folder, ranks)

    @property
    def is_wanted(self) -> bool:
        """True if this run, or the one after a survey, needs a checkpoint."""
        return self._request.folder is not None and not self.is_segment

    @property
    def is_segment(self) -> bool:
        """True if the run stops at a step and writes no checkpoints."""
        return self._request.stop is not None

    @property
    def checkpoint(self) -> Path:
        """The path of the checkpoint."""
        assert self._request.folder is not None, "there is a point"
        return self._request.folder / CHECKPOINT

    def pass_step(self, step: int, save: Callable[[Path], object] | None) -> None:
        """Keep a checkpoint after a step, if it is time, or stop there."""
        if self._ring is not None and save is not None:
            self._ring.reach(step, save)
        if self._request.stop is not None and step >= self._request.stop:
            self.stop(f"the segment ends after step {step}")

    def stop(self, reason: str = "the segment ends with the fit") -> None:
        """End this process, if the run is a segment: what the program does next is not part of it.

        It would write files that the earlier run has written.
        """
        if self.is_segment:
            self._before_stop(End(status="stopped", reason=reason))
            self._kill(reason)

    def open_debugger(self, step: int, ledger: Path | None) -> StepDebugger | None:
        """Return the debugger, if this rank must run the step that begins in it.

        All ranks wait before that step until the run has been compared.
        """
        debugger = self._request.debugger
        if debugger is None or self._begun >= step or step + 1 != self._request.stop:
            return None
        self._begun = step  # a step may have several batches
        if not debugger.may_open(self._ranks, ledger):
            self.leave(DIFFERS)
        return debugger if debugger.rank == self._ranks.rank else None

    def check_finite(self, step: int, kind: str, named: Iterable[tuple[str, Any]]) -> None:
        """End this process if tensors of a step are not finite, in a segment that finds them."""
        if not self._request.finds_nonfinite:
            return
        for name, tensor in named:
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a shard
            if not own.isfinite().all():
                found = {"step": step, "kind": kind, "name": name, "rank": self._ranks.rank}
                self.checkpoint.with_name(NONFINITE).write_text(json.dumps(found))
                self.leave(f"the {kind} of {name} is not finite in step {step}")

    def leave(self, reason: str = "you left the debugger") -> None:
        """End this process at once. What started the training then ends the other ranks."""
        self._before_stop(End(status="stopped", reason=reason))
        self.checkpoint.with_name(MARK).write_text(reason)
        self._end(1)

    def _end(self, status: int) -> None:
        """End this process; one that runs on a terminal is not killed, as the shell would say."""
        if self._request.debugger is not None:
            os._exit(status)
        os.kill(os.getpid(), signal.SIGKILL)

    def reach(self, kind: InterruptionKind, epoch: int, number: int = 0) -> bool:
        """Return whether the training must save itself now; kill it if this is the last batch."""
        point = self._request.point
        if point is None:
            return False
        if self._remaining is None:
            return (kind, epoch, number) == (point.kind, point.epoch, point.number)
        self._count_down(int(kind == "batch"))
        return False

    def end_save(self) -> None:
        """Count the batches to the kill from now on."""
        assert self._request.point is not None, "it was reached"
        self._remaining = self._request.point.later
        self._count_down(0)

    def note_epoch(self, shape: EpochShape) -> None:
        """Note the batches of an epoch that is done."""
        self._shapes.append(shape)

    def write_survey(self) -> None:
        """Write the shapes of the epochs for ``read_survey``, if they were asked for."""
        folder = self._request.folder
        if folder is not None and self._request.surveys and self._ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SURVEY).write_text(json.dumps([asdict(shape) for shape in self._shapes]))

    def _count_down(self, batches: int) -> None:
        """Kill this process, if no batch remains."""
        assert self._remaining is not None, "it was saved"
        self._remaining -= batches
        if not self._remaining:
            self._kill(str(self._request.point))

    def _kill(self, reached: str) -> None:
        """Kill this process with SIGKILL, on every rank, after it has marked what was reached."""
        self._before_kill()
        # A launcher ends all ranks when one has died; that must not happen before the file exists.
        self._ranks.raise_on_all(lambda: None)
        if self._ranks.rank == 0:
            self.checkpoint.with_name(MARK).write_text(reached)
        self._ranks.raise_on_all(lambda: None)
        self._end(0)


def read_survey(folder: Path) -> list[EpochShape]:
    """Return the shapes of the epochs of a command's first fit.

    Raises:
        CommandError: If the fit has not written them.
    """
    try:
        entries = json.loads((folder / SURVEY).read_text())
        return [EpochShape(**entry) for entry in entries]
    except FileNotFoundError:
        raise CommandError(
            "The command's first fit did not report where it can be interrupted: it did not train "
            "to its end, ran outside the process that the command starts (as under ddp_spawn), or "
            "is a loop that does not call the recorder's epoch()."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(f"{folder / SURVEY} cannot be read: {error}") from error


def choose_points(epochs: Sequence[EpochShape]) -> Iterator[tuple[InterruptionPoint, str]]:
    """Yield one point of each kind that a fit has, near its middle, and its description."""
    middle = len(epochs) // 2
    if middle > 0:
        number = epochs[middle - 1].epoch
        yield InterruptionPoint("epoch", number), f"killed at the end of epoch {number}"
    if shape := _nearest(epochs, lambda shape: shape.batches > shape.accumulated):
        # After an optimizer step, with more training after the checkpoint.
        step = shape.accumulated
        done = max(step, shape.batches // 2 // step * step)
        later = shape.batches - done + 1 if shape is not epochs[-1] else 0
        yield (
            InterruptionPoint("batch", shape.epoch, done, later),
            f"saved after {shape.unit} {done} of {shape.batches} of epoch {shape.epoch}, killed "
            + (f"{pluralize(later, shape.unit, _PLURALS[shape.unit])} later" if later else "there"),
        )
    if shape := _nearest(epochs, lambda shape: min(shape.accumulated, shape.batches) > 1):
        within = [n for n in range(1, shape.batches) if n % shape.accumulated]
        done = within[len(within) // 2]
        yield (
            InterruptionPoint("batch", shape.epoch, done),
            f"killed after batch {done} of epoch {shape.epoch}, between accumulated batches",
        )
    if shape := _nearest(epochs, lambda shape: shape.validation > 0):
        done = max(1, shape.validation // 2)
        yield (
            InterruptionPoint("validation", shape.epoch, done),
            f"killed in epoch {shape.epoch}'s validation, after batch {done} of {shape.validation}",
        )
        yield (
            InterruptionPoint("validated", shape.epoch),
            f"killed at the end of epoch {shape.epoch}'s validation",
        )


def _nearest(
    epochs: Sequence[EpochShape], condition: Callable[[EpochShape], bool]
) -> EpochShape | None:
    """Return the epoch nearest to the middle that meets a condition; None if none does."""
    middle = len(epochs) // 2
    found = [(abs(n - middle), n) for n, shape in enumerate(epochs) if condition(shape)]
    return epochs[min(found)[1]] if found else None
