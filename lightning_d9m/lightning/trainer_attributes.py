"""Public attributes of a Trainer that Lightning's annotations lack: its connectors set them."""

from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


class ProgressCounts(Protocol):
    """Lightning's counts of epochs or batches, of which all but the newest have completed."""

    ready: int
    started: int
    processed: int
    completed: int


def get_logical_ranks(trainer: "Trainer") -> int | None:
    """Return the number of logical ranks, or None without them."""
    number: int | None = getattr(trainer.strategy, "logical_ranks", None)
    return number


def list_callbacks(trainer: "Trainer") -> list["Callback"]:
    """Return the list of callbacks; a callback that is appended takes effect."""
    callbacks: list[Callback] = cast(Any, trainer).callbacks
    return callbacks


def get_datamodule(trainer: "Trainer") -> object:
    """Return the datamodule, or None."""
    return cast(Any, trainer).datamodule


def get_reload_interval(trainer: "Trainer") -> int:
    """Return after how many epochs the loaders are loaded again; 0 if they are loaded once."""
    return int(cast(Any, trainer).reload_dataloaders_every_n_epochs)


def get_epoch_counts(trainer: "Trainer") -> ProgressCounts:
    """Return the counts of a fit's epochs."""
    counts: ProgressCounts = cast(Any, trainer.fit_loop.epoch_progress.current)
    return counts
