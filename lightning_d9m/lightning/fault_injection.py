"""Fault injection by environment variables: survey a fit, kill it at a point, or resume it.

``d9m repeat --interrupt`` sets the variables. They apply to the first fit of a process, so that the
user's program needs no change:

- ``LIGHTNING_D9M_INTERRUPT``: ``survey``, or a point such as ``batch:1:7``; see
  :class:`InterruptionPoint`;
- ``LIGHTNING_D9M_CHECKPOINT_DIR``: the folder for the survey, or for the checkpoint and a file that
  marks that the point was reached;
- ``LIGHTNING_D9M_RESUME``: the checkpoint to resume from, as ``fit(ckpt_path=...)`` does.

``d9m repeat --last-bits`` sets ``LIGHTNING_D9M_LAST_BITS``, a number that changes the last bit of
each weight when a fit begins. It applies to each fit, and the ledger records it.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_d9m.errors import SettingError
from lightning_d9m.launch.interruption_points import (
    CHECKPOINT,
    LAST_BITS,
    MARK,
    EpochShape,
    InterruptionPoint,
    read_request,
    write_survey,
)
from lightning_d9m.ledger.stack import LAST_BITS_SETTING
from lightning_d9m.lightning.lightning_private import is_search, resume_next_fit
from lightning_d9m.lightning.packages import combined_base
from lightning_d9m.lightning.trainer_attributes import list_callbacks

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint as _Checkpoint
else:
    _Callback = combined_base("callbacks.Callback")
    _Checkpoint = combined_base("callbacks.Checkpoint")


def apply_interrupt_variables(
    trainer: "Trainer", stage: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Apply the variables to a run that begins; called in ``setup``.

    Raises:
        SettingError: If a variable has a value that is not allowed.
    """
    # A Trainer that fits again still has those of its first fit.
    trainer.callbacks = [  # type: ignore[attr-defined] # set in its constructor
        callback
        for callback in list_callbacks(trainer)
        if not isinstance(callback, EpochShapeCallback | CheckpointAndKill)
    ]
    if stage != "fit" or is_search(trainer):
        return
    request = read_request(environment)
    if request.resume is not None:
        resume_next_fit(trainer, request.resume)
    if request.folder is not None:
        list_callbacks(trainer).append(
            EpochShapeCallback(request.folder)
            if request.point is None
            else CheckpointAndKill(request.folder, request.point)
        )


def change_last_bits(
    module: "LightningModule", environment: Mapping[str, str] = os.environ
) -> dict[str, str | int]:
    """Move each weight to the next number above or below, as the variable's number draws it.

    Returns:
        The setting that the ledger records; empty if the variable is not set.

    Raises:
        SettingError: If the variable is not a whole number.
    """
    text = environment.get(LAST_BITS)
    if not text:
        return {}
    if not text.isdecimal():
        raise SettingError(f"{LAST_BITS} is {text!r}; allowed: digits, such as 1.")
    generator = torch.Generator().manual_seed(int(text))
    with torch.no_grad():
        for weight in module.parameters():
            upwards = torch.randint(2, weight.shape, generator=generator).bool()
            limit = torch.where(upwards, torch.inf, -torch.inf).to(weight)
            weight.copy_(torch.nextafter(weight, limit))
    return {LAST_BITS_SETTING: int(text)}


class EpochShapeCallback(_Callback):
    """Records at which points a fit can be interrupted; changes nothing.

    The record is written into the folder when the training ends.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._epochs: list[EpochShape] = []
        self._validation = 0

    def on_validation_batch_end(self, trainer: "Trainer", *_: Any, **__: Any) -> None:
        """Count the batch."""
        self._validation += not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Record the numbers of batches in the epoch."""
        self._epochs.append(
            EpochShape(
                epoch=trainer.current_epoch,
                batches=cast(Any, trainer.fit_loop.epoch_loop.batch_progress.current).processed,
                accumulated=trainer.accumulate_grad_batches,
                validation=self._validation,
            )
        )
        self._validation = 0

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Write the record."""
        if trainer.is_global_zero:
            write_survey(self._folder, self._epochs)


class CheckpointAndKill(_Checkpoint):
    """Saves a checkpoint at a point, and kills its process there.

    It saves when a ModelCheckpoint would, after all other callbacks. Its base class makes it run
    after the module's hooks at the end of an epoch, too.

    The folder is for the checkpoint and for the file that marks the reached point.
    """

    def __init__(self, folder: Path, point: InterruptionPoint) -> None:
        self._folder = folder
        self._point = point
        self._validation = 0
        self._remaining: int | None = None

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Count the validation batches of each epoch."""
        self._validation = 0

    def on_train_batch_end(
        self,
        trainer: "Trainer",
        pl_module: "LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Kill the process some batches after the point, or act if this is the point."""
        if self._remaining is not None:
            self._remaining -= 1
            if self._remaining == 0:
                self._kill(trainer)
        self._act_at(trainer, "batch", batch_idx + 1)

    def on_validation_batch_end(self, trainer: "Trainer", *_: Any, **__: Any) -> None:
        """Act if this is the point."""
        if not trainer.sanity_checking:
            self._validation += 1
            self._act_at(trainer, "validation", self._validation)

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Act if this is the point."""
        if not trainer.sanity_checking:
            self._act_at(trainer, "validated", 0)

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Act if this is the point."""
        self._act_at(trainer, "epoch", 0)

    def _act_at(self, trainer: "Trainer", kind: str, number: int) -> None:
        point = self._point
        if (kind, trainer.current_epoch, number) != (point.kind, point.epoch, point.number):
            return
        if self._remaining is None:
            trainer.save_checkpoint(self._folder / CHECKPOINT)
            self._remaining = point.later
            if self._remaining == 0:
                self._kill(trainer)

    def _kill(self, trainer: "Trainer") -> None:
        """Kill this process with SIGKILL, on every rank."""
        trainer.strategy.checkpoint_io.teardown()  # waits for an asynchronous save
        if trainer.is_global_zero:
            (self._folder / MARK).write_text(str(self._point))
        # A launcher ends all ranks when one has died; that must not happen before the file exists.
        trainer.strategy.barrier("lightning_d9m.interruption")
        os.kill(os.getpid(), signal.SIGKILL)
