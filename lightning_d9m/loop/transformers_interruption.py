"""Interruptions of Hugging Face's ``Trainer``, which saves and loads its checkpoints itself."""

import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_d9m.launch.interruption_points import (
    InterruptionKind,
    InterruptRequest,
    find_checkpoint,
)
from lightning_d9m.loop.interruption import Interruption
from lightning_d9m.loop.recorder import Recorder

if TYPE_CHECKING:
    from transformers import TrainerCallback


class TrainerInterruption(Interruption):
    """Lets the Trainer save at a point, keeps its checkpoint, and kills the process."""

    _is_saving = False

    @property
    def is_wanted(self) -> bool:
        """True if this run, or the one after a survey, needs a checkpoint."""
        return self._request.folder is not None

    def resume(self) -> None:
        """Do nothing: the Trainer has loaded its checkpoint."""

    def end_epoch(self, epoch: int, loaders: int) -> None:
        """Note the number of steps in an epoch that is done."""
        super().end_epoch(epoch, max(1, loaders))
        self._steps = 0

    def reach(self, kind: InterruptionKind, epoch: int) -> bool:
        """Return whether the Trainer must save a checkpoint; kill the process if it is time.

        Call it for ``"batch"`` after each step, and for ``"epoch"`` after each epoch.
        """
        number = self._steps if kind == "batch" else 0
        if number:
            self._count_down()
        self._is_saving = self._is_point(kind, epoch, number)
        return self._is_saving

    def keep(self, checkpoint: Path) -> None:
        """Copy the checkpoint that the Trainer has saved, if it was for a point."""
        if not self._is_saving:
            return
        self._is_saving = False
        self._wait_for_ranks()  # each adds its files
        copies = self._ranks.rank == 0
        self._ranks.raise_on_all(
            lambda: shutil.copytree(checkpoint, self._checkpoint) if copies else None
        )
        self._end_save()


class TransformersRecorder(Recorder):
    """The recorder of a Trainer."""

    interruption: TrainerInterruption

    def _interrupt(self, request: InterruptRequest) -> Interruption:
        self.interruption = TrainerInterruption(request, {}, self._ranks)
        return self.interruption


def resume_first_training(callback: "TrainerCallback") -> None:
    """Let the first training in this process resume, if a variable names a checkpoint.

    The Trainer asks no callback from where it resumes, so its method ``train`` is replaced until a
    Trainer with this callback calls it.
    """
    if find_checkpoint() is None:
        return
    from transformers import Trainer

    original = Trainer.train

    @functools.wraps(original)
    def train(
        self: Trainer, resume_from_checkpoint: str | bool | None = None, *rest: Any, **more: Any
    ) -> Any:
        if callback in self.callback_handler.callbacks:
            Trainer.train = original
            path = find_checkpoint()
            resume_from_checkpoint = resume_from_checkpoint if path is None else str(path)
        return original(self, resume_from_checkpoint, *rest, **more)

    Trainer.train = train
