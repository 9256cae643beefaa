"""The state that this package adds to a checkpoint: its types, and the keys under which it lies.

A checkpoint holds it as nested dicts of plain values, which ``torch.load(weights_only=True)``
reads: each struct becomes a dict with the names of its fields as keys. No other file spells these
names.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, replace
from torch import Tensor

from lightning_d9m.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Self

KEY = "lightning_d9m"
"""The key of the state among those of the callbacks in a checkpoint."""

CALLBACKS = "callbacks"
"""Lightning's key of the callbacks' states in a checkpoint."""

FORMAT = 4

MANIFEST_KEY = "manifest"
"""The key within the state that is added last, when the checkpoint is written."""

LOGICAL_RANKS_KEY = "logical_ranks"
"""The key of their number among the settings of a run."""

FROZEN = "frozen"
"""The key of what was frozen among the settings of a run."""

VALIDATION = "validate."
"""The prefix of the paths of the loaders of validation."""

LoopPhase = Literal["epoch", "batch", "cut", "validation", "within"]


def find_state(checkpoint: Mapping[str, Any]) -> Any:
    """Return the stored state in a checkpoint; None without one."""
    callbacks = checkpoint.get(CALLBACKS)
    return callbacks.get(KEY) if isinstance(callbacks, Mapping) else None


class _Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint holds as a dict."""

    def as_plain(self) -> dict[str, Any]:
        """Return the stored form; tensors in it are not copied."""
        return {name: _to_plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_plain(cls, value: object) -> "Self":
        """Read the stored form.

        Raises:
            CheckpointError: If it has other fields, or values of other types.
        """
        try:
            return convert(value, cls)
        except ValidationError as error:
            raise CheckpointError(
                f"The lightning_d9m state of the checkpoint is damaged: {error}. Take another copy "
                "of the checkpoint, or an earlier one."
            ) from error


def _to_plain(value: Any) -> Any:
    if isinstance(value, _Stored):
        return value.as_plain()
    return [_to_plain(part) for part in value] if type(value) is list else value


class LoopPosition(_Stored):
    """The position of a fit.

    Attributes:
        epoch: The next epoch, or the current one.
        step: The global step.
        batch: The number of trained batches of the epoch.
        phase: ``"epoch"`` between two epochs, ``"batch"`` between two batches, ``"cut"`` too, where
            ``max_steps`` ended the fit, ``"validation"`` in an unfinished validation,
            ``"within"`` while a batch is trained.
    """

    epoch: int
    step: int
    batch: int
    phase: LoopPhase


class SavedResult(_Stored):
    """A value that a step has logged, and how it is reduced over the epoch.

    Attributes:
        key: Lightning's key of the result.
        arguments: The arguments with which it was logged.
        reduce_fx: The name of the function that reduces it over the epoch.
        synced: Whether the ranks reduce it.
        rank_zero_only: Whether only rank 0 logs it.
        is_tensor: Whether a tensor was logged; otherwise a metric object was.
        value: The reduction so far, of a tensor.
        count: The number of samples so far, of a tensor that is averaged.
        updates: The number of updates.
        cache: Its value for the last batch, encoded, if that is a plain value.
        has_reset: Whether Lightning has reset it since the last update.
    """

    key: str
    arguments: dict[str, Any]
    reduce_fx: str
    synced: bool
    rank_zero_only: bool
    is_tensor: bool
    value: Tensor | None
    count: Tensor | None
    updates: int
    cache: Tensor | None
    has_reset: bool


class SavedLedger(_Stored):
    """A position in a ledger.

    The check is that of this rank's last record.
    """

    folder: str
    check: str


class PendingRecords(_Stored):
    """Values that wait for the next record of the ledger.

    The loss is the last one, as ``float.hex()``.
    """

    loss: str | None
    evaluations: list[dict[str, Any]]


class SavedRank(_Stored):
    """The state of one rank.

    Attributes:
        rng: The generators of training, encoded; None restores none.
        generators: The states of the generators that datasets of loaders hold, by path.
        program: What the fit has changed in the program's objects, encoded, by path.
        reset: The metrics of the module that Lightning resets right after the save.
        callback_metrics: The metrics for callbacks and schedulers, by name.
        results: The results that the epoch has logged so far.
        gradients: The gradients to which later batches are added, by parameter, with logical ranks
            also by logical rank; None for one that a step has used and that is left out.
        train_reload_epoch: The epoch in which the training loaders were last loaded.
        validation_reload_epoch: The epoch in which the validation loaders were last loaded.
        samplers: The states of the user's samplers and datasets, by number of the loader.
        inexact: Reasons why this rank cannot be resumed exactly.
        ledger: The position in the ledger; None if none was open.
        pending: Values that wait for the next record.
        logged: The sums that its logical ranks have logged, from every rank; see ``LoggedValues``.
        metric_states: The encoded states of metrics by path and logical rank.
    """

    rng: dict[str, Any] | None
    generators: dict[str, Any]
    program: dict[str, Tensor]
    reset: list[str]
    callback_metrics: dict[str, Any]
    results: list[SavedResult]
    gradients: dict[str, Any]
    train_reload_epoch: int | None
    validation_reload_epoch: int | None
    samplers: dict[str, Any]
    inexact: list[str]
    ledger: SavedLedger | None
    pending: PendingRecords
    logged: list[dict[str, Any]]
    metric_states: dict[str, dict[int, Any]]


_NOTHING = PendingRecords(None, [])
EMPTY_RANK = SavedRank(None, {}, {}, [], {}, [], {}, None, None, {}, [], None, _NOTHING, [], {})
"""The state of a rank that a checkpoint lacks."""


class SavedState(_Stored):
    """The state of a run.

    Attributes:
        seed: The seed of the run.
        fit: The ordinal of the fit in its process.
        settings: The settings of the run; with the seed and ``fit`` they select its random streams.
        world_size: The number of ranks.
        position: Where the checkpoint was saved.
        ranks: The state of each rank; of one that is not rank 0 it holds only its own.
        format: The version of these types.
    """

    seed: int
    fit: int
    settings: dict[str, Any]
    world_size: int
    position: LoopPosition
    ranks: list[SavedRank]
    format: int = FORMAT

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any]) -> "Self | str":
        """Read the state from a checkpoint.

        Returns:
            The state; or a sentence that says why there is none that this version reads.

        Raises:
            CheckpointError: If the state is damaged.
        """
        state = find_state(checkpoint)
        if not isinstance(state, Mapping):
            return (
                "The checkpoint has no lightning_d9m state: it was saved without "
                "DeterminismCallback."
            )
        found = state.get("format")
        if found != FORMAT:
            return (
                f"The checkpoint's state has format {found!r}; this version reads {FORMAT}. Resume "
                "with the version of lightning_d9m that saved it."
            )
        return cls.from_plain({name: state[name] for name in state if name != MANIFEST_KEY})

    @property
    def is_untrained(self) -> bool:
        """Whether the checkpoint was saved before training, as the learning rate finder does.

        No ledger was open then, and no generator had been used that an epoch does not seed.
        """
        return all(rank.ledger is None for rank in self.ranks)

    @property
    def logical_ranks(self) -> int | None:
        """The number of logical ranks, if the run had them."""
        return self.settings.get(LOGICAL_RANKS_KEY)

    def fits(self, world_size: int, logical_ranks: int | None) -> bool:
        """Return whether a run gets the same data; with logical ranks, on any number of ranks."""
        same = self.logical_ranks == logical_ranks
        return same and (logical_ranks is not None or self.world_size == world_size)

    def of_rank(self, rank: int, world_size: int, logical_ranks: int | None) -> SavedRank:
        """Return the state of a rank; an empty one if its data have changed."""
        if not self.fits(world_size, logical_ranks):
            return EMPTY_RANK
        if logical_ranks is None:
            return self.ranks[rank] if rank < len(self.ranks) else EMPTY_RANK
        # Between steps all ranks are alike, but for what belongs to logical ranks.
        first = self.ranks[0]
        return replace(
            first,
            ledger=(self.ranks[rank] if rank < len(self.ranks) else first).ledger,
            logged=[sums for part in self.ranks for sums in part.logged],
            gradients=_merge([part.gradients for part in self.ranks]),
            metric_states=_merge([part.metric_states for part in self.ranks]),
        )


def _merge(parts: list[dict[str, dict[int, Any]]]) -> dict[str, dict[int, Any]]:
    """Join values by name and logical rank."""
    merged: dict[str, dict[int, Any]] = {}
    for part in parts:
        for name, by_rank in part.items():
            merged.setdefault(name, {}).update(by_rank)
    return merged
