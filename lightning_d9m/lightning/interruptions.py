"""Variables that interrupt or disturb a Trainer's fit; see ``launch/interruption_points.py``.

``d9m repeat --last-bits`` sets ``LIGHTNING_D9M_LAST_BITS``, a number that changes the last bit of
each weight when a fit begins. It applies to each fit, and the ledger records it.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from lightning_d9m.errors import SettingError
from lightning_d9m.launch.interruption_points import (
    LAST_BITS,
    EpochShape,
    Interruption,
    InterruptionKind,
    read_request,
)
from lightning_d9m.ledger.stack import LAST_BITS_SETTING
from lightning_d9m.lightning.lightning_private import is_search, resume_next_fit
from lightning_d9m.lightning.packages import combined_base
from lightning_d9m.lightning.trainer_attributes import Trainer, ranks_of

_Checkpoint: Any = combined_base("callbacks.Checkpoint")


def apply_interrupt_variables(
    trainer: Trainer, stage: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Apply the variables to a run that begins; called in ``setup``.

    Raises:
        SettingError: If a variable has a value that is not allowed.
    """
    # A Trainer that fits again still has that of its first fit.
    callbacks = [c for c in trainer.callbacks if not isinstance(c, InterruptingCallback)]
    trainer.callbacks = callbacks
    if stage != "fit" or is_search(trainer):
        return
    request = read_request(environment)
    if request.resume is not None:
        resume_next_fit(trainer, request.resume)
    if request.folder is not None:

        def wait() -> None:
            trainer.strategy.checkpoint_io.teardown()  # waits for an asynchronous save

        callbacks.append(InterruptingCallback(Interruption(request, ranks_of(trainer), wait)))


def change_last_bits(
    module: Any, environment: Mapping[str, str] = os.environ
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


class InterruptingCallback(_Checkpoint):  # type: ignore[misc] # as DeterminismCallback
    """Surveys a fit, or saves a checkpoint at a point and kills its process.

    It saves when a ModelCheckpoint would, after all other callbacks. Its base class makes it run
    after the module's hooks at the end of an epoch, too.
    """

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._validation = 0  # batches of validations in this epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Count the validation batches of each epoch."""
        self._validation = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Interrupt after a batch of training."""
        self._reach(trainer, "batch", batch_idx + 1)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Interrupt after a batch of a validation."""
        if not trainer.sanity_checking:
            self._validation += 1
            self._reach(trainer, "validation", self._validation)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Interrupt at the end of a validation."""
        if not trainer.sanity_checking:
            self._reach(trainer, "validated")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Note the batches of the epoch, and interrupt at its end."""
        self._interruption.note_epoch(
            EpochShape(
                epoch=trainer.current_epoch,
                batches=trainer.fit_loop.epoch_loop.batch_progress.current.processed,
                accumulated=trainer.accumulate_grad_batches,
                validation=self._validation,
            )
        )
        self._reach(trainer, "epoch")

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the survey."""
        self._interruption.write_survey()

    def _reach(self, trainer: Trainer, kind: InterruptionKind, number: int = 0) -> None:
        if self._interruption.reach(kind, trainer.current_epoch, number):
            trainer.save_checkpoint(self._interruption.checkpoint)
            self._interruption.end_save()
