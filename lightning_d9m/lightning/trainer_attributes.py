"""Public attributes of a Trainer that Lightning's annotations lack: its connectors set them."""

from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
    from torch import Tensor


class ProgressCounts(Protocol):
    """Lightning's counts of epochs or batches, of which all but the newest have completed."""

    ready: int
    started: int
    processed: int
    completed: int


class LogicalState(Protocol):
    """The state of logical ranks, which a strategy of ours keeps."""

    def capture_metric_states(self) -> dict[str, dict[int, Any]]:
        """Return the states of metrics by path and logical rank."""

    def restore_metric_states(self, states: dict[str, dict[int, Any]]) -> None:
        """Restore the states of metrics, of those logical ranks that are here."""

    def capture_logged(self) -> dict[str, Any]:
        """Return the sums of the logged values of the epoch, of the logical ranks here."""

    def restore_logged(self, parts: list[dict[str, Any]]) -> None:
        """Restore the sums of logged values that all processes captured."""

    def capture_gradients(self) -> dict[str, dict[int, "Tensor"]]:
        """Return the gradients of earlier batches by parameter and logical rank."""

    def restore_gradients(self, gradients: dict[str, dict[int, "Tensor"]]) -> None:
        """Restore the gradients of earlier batches, of those logical ranks that are here."""


def get_logical_ranks(trainer: "Trainer") -> int | None:
    """Return the number of logical ranks, or None without them."""
    number: int | None = getattr(trainer.strategy, "logical_ranks", None)
    return number


def get_logical_state(trainer: "Trainer") -> LogicalState | None:
    """Return the state of logical ranks, or None without them."""
    state: LogicalState = cast(Any, trainer.strategy)
    return None if get_logical_ranks(trainer) is None else state


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
