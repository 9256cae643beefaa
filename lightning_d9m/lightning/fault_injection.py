"""A fit that is steered by variables: surveyed, killed at a place after a checkpoint, or resumed.

``d9m repeat --interrupt`` sets the variables. They steer the first fit of a process, so that the
user's program is not changed:

- ``LIGHTNING_D9M_INTERRUPT``: ``survey``, or a point such as ``batch:1:7``; see
  :class:`InterruptionPoint`;
- ``LIGHTNING_D9M_CHECKPOINT_DIR``: the folder that then receives the survey, or the checkpoint and
  a mark that the place was reached;
- ``LIGHTNING_D9M_RESUME``: a checkpoint that the fit goes on from, as ``fit(ckpt_path=...)`` does.
"""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_d9m.errors import SettingError
from lightning_d9m.launch.interruption_points import (
    CHECKPOINT,
    FOLDER,
    INTERRUPT,
    MARK,
    RESUME,
    SURVEY,
    EpochShape,
    InterruptionPoint,
    parse_point,
)
from lightning_d9m.lightning.lightning_private import resume_next_fit
from lightning_d9m.lightning.packages import combined_base

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Checkpoint as _Checkpoint
else:
    _Callback = combined_base("callbacks.Callback")
    _Checkpoint = combined_base("callbacks.Checkpoint")


class _FaultState:
    """How many fits this process has begun."""

    fits = 0


def apply_interrupt_variables(
    trainer: Any, stage: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Let the variables steer a run that begins; called in ``setup``.

    Raises:
        SettingError: When a variable has a value that is not allowed.
    """
    if stage != "fit":
        return
    _FaultState.fits += 1
    if _FaultState.fits > 1:
        return
    if path := environment.get(RESUME):
        _resume(trainer, Path(path))
    if request := environment.get(INTERRUPT):
        if not (folder := environment.get(FOLDER)):
            raise SettingError(
                f"The variable {INTERRUPT} is {request!r} and {FOLDER} is not set. Set it to a "
                "folder that receives the checkpoint."
            )
        trainer.callbacks.append(
            EpochShapeCallback(Path(folder))
            if request == SURVEY
            else CheckpointAndKill(Path(folder), parse_point(request))
        )


def _resume(trainer: "Trainer", path: Path) -> None:
    """Let the fit that is being set up resume from a checkpoint."""
    if not path.exists():
        raise SettingError(f"The variable {RESUME} is '{path}', which is not there.")
    resume_next_fit(trainer, path)


class EpochShapeCallback(_Callback):
    """Notes where a fit can be interrupted, and changes nothing.

    Args:
        folder: Receives what was found when the training ends.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._epochs: list[EpochShape] = []
        self._validation = 0

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Count it."""
        self._validation += not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Note what the epoch consisted of."""
        self._epochs.append(
            EpochShape(
                epoch=trainer.current_epoch,
                batches=trainer.fit_loop.epoch_loop.batch_progress.current.processed,
                accumulated=trainer.accumulate_grad_batches,
                validation=self._validation,
            )
        )
        self._validation = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write it down."""
        if trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            epochs = [asdict(epoch) for epoch in self._epochs]
            (self._folder / SURVEY).write_text(json.dumps(epochs))


class CheckpointAndKill(_Checkpoint):
    """Saves a checkpoint at a place, and kills its process there.

    It saves where a ModelCheckpoint would, after all other callbacks; at the end of an epoch after
    the module too, which is what its base class brings about.

    Args:
        folder: Receives the checkpoint and the mark that the place was reached.
        place: The place.
    """

    def __init__(self, folder: Path, place: InterruptionPoint) -> None:
        self._folder = folder
        self._place = place
        self._validation = 0
        self._left: int | None = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Count validations by epoch."""
        self._validation = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See whether it is the place, or far enough from it."""
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._die(trainer)
        self._pass(trainer, "batch", batch_idx + 1)

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """See whether it is the place."""
        if not trainer.sanity_checking:
            self._validation += 1
            self._pass(trainer, "validation", self._validation)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """See whether it is the place."""
        if not trainer.sanity_checking:
            self._pass(trainer, "validated", 0)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """See whether it is the place."""
        self._pass(trainer, "epoch", 0)

    def _pass(self, trainer: Any, kind: str, number: int) -> None:
        place = self._place
        if (kind, trainer.current_epoch, number) != (place.kind, place.epoch, place.number):
            return
        if self._left is None:
            trainer.save_checkpoint(self._folder / CHECKPOINT)
            self._left = place.later
            if self._left == 0:
                self._die(trainer)

    def _die(self, trainer: Any) -> None:
        """End this process as ``kill -9`` does, on every rank."""
        trainer.strategy.checkpoint_io.teardown()  # waits for one that is still being written
        if trainer.is_global_zero:
            (self._folder / MARK).write_text(str(self._place))
        # A launcher ends all ranks when one has gone: not before the mark is there.
        trainer.strategy.barrier("lightning_d9m.interruption")
        os.kill(os.getpid(), signal.SIGKILL)
