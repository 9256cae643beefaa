"""Interruptions of a training: save checkpoints, resume, end at a step, look into one.

Commands set variables, which apply to the first fit of a process, so that the program needs no
change:

- ``LIGHTNING_D9M_INTERRUPT``: what to do, see ``_REQUESTS``. ``keep`` saves checkpoints as often as
  costs little, and ``keep:FOLDER`` keeps the pace of the run with its ledgers there, too;
  ``points`` saves at each kind of point of a fit. The others make the run a segment: it
  ends before the program does, and the checkpoints that the program saves are written elsewhere,
  because those of the earlier run have the same names. ``stop:320`` ends after this global step,
  and ``epoch:2`` after this epoch; ``nonfinite:320`` ends as soon as a loss, gradient or weight is
  not finite, ``tape:320`` records the operations of the last step, and ``debug:0:pdb:320:LEDGER``
  lets rank 0 run it in a debugger;
- ``LIGHTNING_D9M_CHECKPOINT_DIR``: the folder for checkpoints and a file that marks the end;
- ``LIGHTNING_D9M_RESUME``: the checkpoint to resume from.

Nothing here imports torch.
"""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_d9m.engine.ledger.format.records import End
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.checkpoint_ring import CheckpointPoints, CheckpointRing
from lightning_d9m.engine.recording.pace import Pace
from lightning_d9m.engine.recording.step_debugger import DEBUGGERS, StepDebugger
from lightning_d9m.errors import SettingError

INTERRUPT = "LIGHTNING_D9M_INTERRUPT"
FOLDER = "LIGHTNING_D9M_CHECKPOINT_DIR"
RESUME = "LIGHTNING_D9M_RESUME"
KEEP = "keep"
POINTS = "points"
TAPE = "tape"
# Files in FOLDER: the mark that the end was reached; that a process has begun its first fit, and
# that a second one has; the first value that is not finite, as JSON; and the operations of a step.
# SAVED_FILES is the folder of what the program has saved in a segment.
MARK = "killed"
_BEGUN = "begun"
SEVERAL = "several"
NONFINITE = "nonfinite"
STEP_FILE = "step.pt"
SAVED_FILES = "saved"
SEVERAL_FITS = (
    "Two processes of the command begin a first fit, and variables reach both, so no part of one "
    "can be run. Give a command that trains this one alone."
)
DIFFERS = "the program differs from the run that it repeats"
WITHIN = "its batch begins with step "

_STEP = r":(?P<step>\d{1,18})"
_DEBUG = rf":(?P<rank>\d{{1,9}}):(?P<debugger>{'|'.join(DEBUGGERS)}){_STEP}:(?P<ledger>.+)"
# By kind of request, what follows it. All but the first two are segments.
_REQUESTS = {
    KEEP: r"(?::(?P<beside>.+))?",
    POINTS: "",
    "stop": _STEP,
    "epoch": r":(?P<epoch>\d{1,18})",
    NONFINITE: _STEP,
    TAPE: _STEP,
    "debug": _DEBUG,
    "debug-anyway": _DEBUG,
}
NEVER = 10**17
"""A step that no training reaches."""


@dataclass(frozen=True)
class InterruptRequest:
    """The variables' requests for a fit.

    Attributes:
        resume: The checkpoint to resume from; None for none.
        folder: The folder for checkpoints and marks; None if nothing is wanted.
        kind: A key of ``_REQUESTS``; empty if nothing is wanted.
        stop: The global step after which a segment ends; None in another run.
        epoch: The epoch after which it ends; None if a step decides.
        debugger: What opens before the step that ends at ``stop``; None for nothing.
        beside: The folder of a run that trains at once; None for none.
    """

    resume: Path | None = None
    folder: Path | None = None
    kind: str = ""
    stop: int | None = None
    epoch: int | None = None
    debugger: StepDebugger | None = None
    beside: Path | None = None

    @property
    def needs_saving(self) -> bool:
        """True if the training must be able to save itself, to resume or to open at a step."""
        return self.resume is not None or self.kind not in ("", KEEP, "stop", "epoch")


def is_segment(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the variables make this process a segment of an earlier run."""
    kind = environment.get(INTERRUPT, "").partition(":")[0]
    return kind in _REQUESTS and kind not in (KEEP, POINTS)


# Variables reach every fit of a program, and only the first is the one that a command means.
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
    kind = request.partition(":")[0]
    match = re.fullmatch(kind + _REQUESTS[kind], request, re.ASCII) if kind in _REQUESTS else None
    if match is None:
        raise SettingError(
            f"The variable {INTERRUPT} is {request!r}; allowed: {KEEP}, {POINTS}, stop:STEP, "
            "epoch:EPOCH, nonfinite:STEP, tape:STEP, or debug:RANK:DEBUGGER:STEP:LEDGER."
        )
    parts = match.groupdict()
    debugger = None
    if "debugger" in parts:
        name, rank, anyway = parts["debugger"], int(parts["rank"]), kind == "debug-anyway"
        debugger = StepDebugger(name, rank, parts["ledger"], opens_anyway=anyway)
    # A segment by its epoch has a step, too, because that makes the run a segment.
    stop = int(parts.get("step") or NEVER) if is_segment(environment) else None
    epoch = int(parts["epoch"]) if "epoch" in parts else None
    beside = Path(parts["beside"]) if parts.get("beside") else None
    return InterruptRequest(path, Path(folder), kind, stop, epoch, debugger, beside)


class Interruption:
    """Lets a training save itself, or ends its process at a point.

    The training calls ``reach`` at each point and ``pass_step`` after each step, on all ranks, and
    ``stop`` at its end. ``before_stop`` closes the ledger with the record that it is given.
    """

    def __init__(
        self,
        request: InterruptRequest,
        ranks: Ranks,
        before_stop: Callable[[End], object] = lambda _: None,
    ) -> None:
        self._request = request
        self._ranks = ranks
        self._before_stop = before_stop
        if self.is_segment and ranks.rank == 0:
            self._begin()
        self._begun = -1  # the step that the debugger was opened for
        self._batch = 0  # the step with which the batch begins that is trained
        self._tape: Any = None  # while the step runs that is recorded
        folder = request.folder or Path()
        self._ring = CheckpointRing(folder, ranks) if request.kind == KEEP else None
        self._points = CheckpointPoints(folder, ranks) if request.kind == POINTS else None
        # Rank 0 alone: the others wait where they communicate with it.
        beside = request.beside if ranks.rank == 0 else None
        self._pace = None if beside is None else Pace(folder.parent, beside)

    @property
    def is_wanted(self) -> bool:
        """True if a later run needs a checkpoint of this one."""
        return self._request.folder is not None and not self.is_segment

    @property
    def is_segment(self) -> bool:
        """True if the run ends before the program does and writes no checkpoints."""
        return self._request.stop is not None

    def _begin(self) -> None:
        """Raise a ``SettingError`` if another process has begun its first fit, too."""
        # Which of them is the part of the run is not known, and the first that ended would end
        # both. Creating the file is atomic, so exactly one process finds that it is the first.
        try:
            self._file(_BEGUN).touch(exist_ok=False)
        except FileExistsError:
            self._file(SEVERAL).write_text("")
            raise SettingError(SEVERAL_FITS) from None

    def reach(self, kind: str, epoch: int) -> Path | None:
        """Return where the training must save itself at a point of a kind; None for nowhere.

        The kinds are ``"epoch"`` at the end of an epoch, ``"step"`` after a step, ``"accumulated"``
        after a batch whose gradients are added to, ``"validation"`` after a batch of a validation,
        and ``"validated"`` at its end.
        """
        if kind == "epoch" and self._request.epoch is not None and epoch >= self._request.epoch:
            self.stop(f"the segment ends after epoch {epoch}")
        return None if self._points is None else self._points.reach(kind)

    def pass_step(self, step: int, save: Callable[[Path], object] | None) -> None:
        """Keep a checkpoint after a step, if it is time, and the pace of another run, or stop."""
        if self._ring is not None and save is not None:
            self._ring.reach(step, save)
        if self._pace is not None:
            self._pace.keep()
        if self._request.stop is not None and step >= self._request.stop:
            if self._tape is not None:
                self._tape.__exit__(None, None, None)
                self._tape.save(self._file(STEP_FILE), step - 1)
            # Manual optimization makes several steps in a batch, and can be entered at the first.
            within = f", {WITHIN}{self._batch}" if self._begun + 1 != self._request.stop else ""
            self.stop(f"the segment ends after step {step}{within}")

    def stop(self, reason: str = "") -> None:
        """End this process, if the run is a segment: what the program does next is not part of it.

        It would write files that the earlier run has written. Without a reason the fit has ended.
        """
        if not self.is_segment:
            return
        self._before_stop(End(status="stopped" if reason else "finished", reason=reason or None))
        # Every rank is killed, after what started them could see that the end was reached: it may
        # end all when one has died. The first wait is for the ledgers of all ranks, the second for
        # the mark.
        self._ranks.raise_on_all(lambda: None)
        if self._ranks.rank == 0:
            self._file(MARK).write_text(reason)
        self._ranks.raise_on_all(lambda: None)
        self._end(0)

    def open_debugger(self, step: int, ledger: Path | None) -> StepDebugger | None:
        """Return the debugger, if this rank must run the step that begins in it.

        All ranks wait before that step until the run has been compared. If the step should be
        recorded, this begins it.
        """
        self._batch = step
        if self._begun >= step or step + 1 != self._request.stop:
            return None
        self._begun = step  # a step may have several batches
        if self._request.kind == TAPE:
            from lightning_d9m.engine.probes.step_tape import StepTape  # it loads torch

            self._tape = StepTape()
            self._tape.__enter__()
        debugger = self._request.debugger
        if debugger is None:
            return None
        if not debugger.may_open(self._ranks, ledger):
            self.leave(DIFFERS)
        return debugger if debugger.rank == self._ranks.rank else None

    def check_finite(self, step: int, kind: str, named: Iterable[tuple[str, Any]]) -> None:
        """End this process if tensors of a step are not finite, in a segment that finds them."""
        if self._request.kind != NONFINITE:
            return
        for name, tensor in named:
            # Of a DTensor each rank looks at its shard: `isfinite` of the whole would be a
            # collective, and a rank that ends would leave the others in it.
            part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if not part.isfinite().all():
                found = {"step": step, "kind": kind, "name": name, "rank": self._ranks.rank}
                self._file(NONFINITE).write_text(json.dumps(found))
                self.leave(f"the {kind} of {name} is not finite in step {step}")

    def leave(self, reason: str = "you left the debugger") -> None:
        """End this process at once. What started the training then ends the other ranks."""
        self._before_stop(End(status="stopped", reason=reason))
        self._file(MARK).write_text(reason)
        self._end(1)

    def _file(self, name: str) -> Path:
        assert self._request.folder is not None, "a segment has one"
        return self._request.folder / name

    def _end(self, status: int) -> None:
        """End this process; one that runs on a terminal is not killed, as the shell would say."""
        shutil.rmtree(self._file(SAVED_FILES), ignore_errors=True)
        # Not by an exception or `sys.exit`: the program could catch it, and its exit handlers and
        # `finally` blocks would write files.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError, ValueError):  # a full disk; the program has closed it
                stream.flush()  # what the program has printed belongs into its log
        if self._request.debugger is not None:
            os._exit(status)
        os.kill(os.getpid(), signal.SIGKILL)
