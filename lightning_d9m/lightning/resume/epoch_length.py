"""Detection of loaders that begin a later epoch where the checkpoint was saved.

Some loaders apply the state that they load in every later epoch: a Hugging Face
``IterableDataset`` whose ``set_epoch`` is not called, litData's ``StreamingDataLoader`` 0.2.76.
The epoch after the resumed one then lacks the batches that preceded the checkpoint.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_REMEDY = (
    "Call the dataset's set_epoch() when an epoch starts, if it has one; or save checkpoints at "
    "the end of an epoch, and load with a loader that has no state_dict()."
)


class EpochLength:
    """Compares the length of the epoch after the resumed one with what is left of this one.

    Args:
        batch: The number of batches of the resumed epoch that preceded the checkpoint; 0 if the
            checkpoint was saved between epochs.

    Attributes:
        is_checked: Whether the epoch after the resumed one has ended; later ones tell nothing.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._resumed: int | None = None if batch else 0
        self.is_checked = False

    def end_epoch(self, trainer: "Trainer") -> str | None:
        """Return a problem at the end of an epoch, as sentences; None without one."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        length = int(progress.current.ready)
        if self._resumed is None:
            self._resumed = length
            return None
        checked, self.is_checked = self.is_checked, True
        if checked or length != self._resumed - self._batch:
            return None
        before = f", and the epoch before {self._resumed}" if self._batch else ""
        return (
            f"Epoch {trainer.current_epoch} had {length} batches{before}: its loader began at the "
            f"position that it has from the checkpoint. {_REMEDY}"
        )
