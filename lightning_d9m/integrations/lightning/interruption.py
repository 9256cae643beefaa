"""Interruptions of a Trainer that variables ask for. No other training loads it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_d9m.engine.ledger.format.records import End
from lightning_d9m.engine.recording.interruption import Interruption, read_request
from lightning_d9m.engine.recording.run import Run
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.trainer.lightning_private import (
    is_compiled,
    is_search,
    resume_next_fit,
)
from lightning_d9m.integrations.trainer.packages import combined_base
from lightning_d9m.integrations.trainer.trainer_attributes import Trainer, ranks_of

# Lightning runs checkpoint callbacks last, so that those before them have changed what they change.
_Checkpoint: Any = combined_base("callbacks.Checkpoint")


def apply_interrupt_variables(
    trainer: Trainer, stage: str, run: Run, end: Callable[[End], None]
) -> None:
    """Let variables interrupt a run that begins; see ``recording/interruption.py``.

    ``end`` closes the ledger of ``run``.

    Raises:
        SettingError: If a variable has a value that is not allowed.
    """
    # A Trainer that fits again still has that of its first fit.
    callbacks = [c for c in trainer.callbacks if not isinstance(c, InterruptingCallback)]
    # A new list, because the program may hold the old one.
    trainer.callbacks, run.stop = callbacks, None
    # Searches for a learning rate or batch size are fits, too, but not the one that the variables
    # mean.
    if stage != "fit" or is_search(trainer):
        return
    request = read_request()
    run.stop = request.stop
    if request.debugger is not None:
        request.debugger.check_terminal(trainer.global_rank)
    if request.resume is not None:
        resume_next_fit(trainer, request.resume)
    if request.folder is not None:
        interruption = Interruption(request, ranks_of(trainer), end)
        callbacks.append(InterruptingCallback(interruption, run))


class InterruptingCallback(_Checkpoint):  # type: ignore[misc] # as DeterminismCallback
    """Saves checkpoints of a fit, and ends its process at a point.

    It saves when a ModelCheckpoint would, after all other callbacks. Its base class makes it run
    after the module's hooks at the end of an epoch, too.
    """

    def __init__(self, interruption: Interruption, run: Run) -> None:
        self.interruption, self._run = interruption, run
        self._step = 0
        self._begun = 0  # the step that is under way

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Let the next call of ``training_step`` run in a debugger, if it is that of the step."""
        # `global_step` grows within the batch, and a value that is not finite belongs to the step
        # that began.
        self._begun = trainer.global_step
        debugger = self.interruption.open_debugger(self._begun, self._run.folder)
        if debugger is None:
            return
        if is_compiled(pl_module):
            raise SettingError(
                "The module is compiled, and a debugger cannot step through compiled code. Run "
                "the program without torch.compile, or use --trace."
            )
        debugger.attach(pl_module, "training_step", self.interruption.leave)

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        """Look for a loss that is not finite."""
        self.interruption.check_finite(self._begun, "loss", [("training_step", loss)])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Look for gradients that are not finite, which a scaler of gradients expects."""
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            named = pl_module.named_parameters()
            gradients = ((name, weight.grad) for name, weight in named if weight.grad is not None)
            self.interruption.check_finite(self._begun, "gradient", gradients)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Interrupt after a batch of training."""
        self.interruption.check_finite(self._begun, "weight", pl_module.named_parameters())
        # With accumulated gradients, or without an optimizer step, a batch ends no step.
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._reach(trainer, "step")
            self.interruption.pass_step(self._step, trainer.save_checkpoint)
        else:
            self._reach(trainer, "accumulated")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Interrupt after a batch of a validation."""
        if not trainer.sanity_checking:
            self._reach(trainer, "validation")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Interrupt at the end of a validation."""
        if not trainer.sanity_checking:
            self._reach(trainer, "validated")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Interrupt at the end of an epoch."""
        self._reach(trainer, "epoch")

    def _reach(self, trainer: Trainer, kind: str) -> None:
        path = self.interruption.reach(kind, trainer.current_epoch)
        if path is not None:
            trainer.save_checkpoint(path)
