"""The state that this package adds to a checkpoint: its types, keys, and what tells damage.

A checkpoint holds it as nested dicts of plain values, which ``torch.load(weights_only=True)``
reads: each struct becomes a dict with the names of its fields as keys. No other file spells these
names. Damage is detected when a file is loaded, before its content is used.
"""

import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, replace
from torch import Tensor

from lightning_d9m.attribute_patches import replace_method
from lightning_d9m.engine.hashing.checkpoint_manifest import (
    check_manifest,
    digest_manifest,
    make_manifest,
)
from lightning_d9m.engine.hashing.training_state import plain_name
from lightning_d9m.errors import CheckpointError, SettingError
from lightning_d9m.integrations.strategies.strategies import is_sharded
from lightning_d9m.integrations.trainer.lightning_private import wrap_resume_start
from lightning_d9m.integrations.trainer.trainer_attributes import KEY, Trainer, ranks_of
from lightning_d9m.text import describe_names, escape

CALLBACKS = "callbacks"
"""Lightning's key of the callbacks' states in a checkpoint."""

FORMAT = 5

MANIFEST_KEY = "manifest"
"""The key within the state that is added last, when the checkpoint is written."""

LOGICAL_RANKS_KEY = "logical_ranks"
"""The key of their number among the settings of a run."""

FROZEN = "frozen"
"""The key of what was frozen among the settings of a run."""

STOPPED = "stopped"
"""The key, among the settings of a run, of whether ``trainer.should_stop`` had ended it."""

GROUPS = "optimizer groups"
"""The key there of the names of the parameters of each group, by optimizer."""

LIMITS = "limits"
"""The key there of the limits of the fit that hooks have changed."""

VALIDATION = "validate."
"""The prefix of the paths of the loaders of validation."""

_HEAD = 512
_PICKLE = b"\x80"  # the first byte

LoopPhase = Literal["epoch", "batch", "cut", "validation", "within"]


def find_state(checkpoint: object) -> Any:
    """Return the stored state in a checkpoint; None without one."""
    callbacks = checkpoint.get(CALLBACKS) if isinstance(checkpoint, Mapping) else None
    return callbacks.get(KEY) if isinstance(callbacks, Mapping) else None


class _Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the state, which a checkpoint holds as a dict."""

    def as_plain(self) -> dict[str, Any]:
        """Return the stored form; tensors in it are not copied."""
        return {name: _to_plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_plain(cls, value: object) -> Any:
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


class LoopPosition(_Stored, frozen=True):
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


class SavedRank(_Stored, frozen=True):
    """The state of one rank.

    Attributes:
        rng: The generators of training, encoded; None restores none.
        generators: The states of the generators that datasets of loaders hold, by path.
        program: What the fit has changed in the program's objects, encoded, by path.
        reset: The metrics of the module that Lightning resets right after the save.
        callback_metrics: The metrics for callbacks and schedulers, by name.
        results: The results that the epoch has logged so far, and how they are reduced over it.
        gradients: The gradients to which later batches are added, by parameter, with logical ranks
            also by logical rank; None for one that a step has used and that is left out.
        train_reload_epoch: The epoch in which the training loaders were last loaded.
        validation_reload_epoch: The epoch in which the validation loaders were last loaded.
        samplers: The states of the user's samplers and datasets, by number of the loader.
        inexact: Reasons why this rank cannot be resumed exactly.
        unknown: The paths of objects that nothing can read: they may have changed.
        ledger: The folder of the ledger, and the check of this rank's last record; None if none
            was open.
        pending: What waits for the next record: the last loss, as ``float.hex()``, and evaluations.
        logged: The sums that its logical ranks have logged, from every rank; see ``LoggedValues``.
        metric_states: The encoded states of metrics by path and logical rank.
    """

    rng: dict[str, Any] | None
    generators: dict[str, Any]
    program: dict[str, Tensor]
    reset: list[str]
    callback_metrics: dict[str, Any]
    results: list[dict[str, Any]]
    gradients: dict[str, Any]
    train_reload_epoch: int | None
    validation_reload_epoch: int | None
    samplers: dict[str, Any]
    inexact: list[str]
    unknown: list[str]
    ledger: dict[str, str] | None
    pending: dict[str, Any]
    logged: list[dict[str, Any]]
    metric_states: dict[str, dict[int, Any]]


EMPTY_RANK = SavedRank(None, {}, {}, [], {}, [], {}, None, None, {}, [], [], None, {}, [], {})
"""The state of a rank that a checkpoint lacks."""


class SavedState(_Stored, frozen=True):
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
    def from_checkpoint(cls, checkpoint: Mapping[str, Any]) -> "SavedState | str":
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
        plain = {name: state[name] for name in state if name != MANIFEST_KEY}
        saved: SavedState = cls.from_plain(plain)
        return saved

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


def check_loads(trainer: Trainer, stack: ExitStack) -> None:
    """Check every checkpoint that the Trainer loads until the stack is closed.

    A load then raises a ``CheckpointError`` if the checkpoint is damaged, or another one than that
    of rank 0.
    """
    strategy = trainer.strategy
    original = strategy.load_checkpoint

    def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            checkpoint = original(checkpoint_path, *args, **kwargs)
        except Exception:
            explain_damage(checkpoint_path)
            raise
        if not is_sharded(strategy):
            check_checkpoint(checkpoint, checkpoint_path)
        return checkpoint

    replace_method(stack, strategy, "load_checkpoint", load_checkpoint)
    if not is_sharded(strategy):  # whose load is a collective call
        wrap_resume_start(trainer, partial(_load_on_all_ranks, trainer), stack)


def _load_on_all_ranks(trainer: Trainer, path: Any, load: Callable[[], Mapping[str, Any]]) -> None:
    """Load the same checkpoint on all ranks, or raise on all: hosts may share no folder."""
    ranks = ranks_of(trainer)
    checkpoint = ranks.raise_on_all(load)
    place = f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
    own = [str(path) if checkpoint else "", place, digest_manifest(find_manifest(checkpoint))]
    rows = ranks.gather_json(own)
    other = next((rank for rank, row in enumerate(rows) if row[1:] != rows[0][1:]), None)
    if other is None:
        return
    texts = [
        f"rank {rank} loads {rows[rank][0]} ({rows[rank][1]})"
        if rows[rank][0]
        else f"rank {rank} found no checkpoint"
        for rank in (0, other)
    ]
    raise CheckpointError(
        f"Ranks would resume from different states: {texts[0]}, and {texts[1]}. Rank 0 saves the "
        "checkpoints. Keep them in a folder that all hosts share, or copy the checkpoint to the "
        "same path on every host."
    )


def add_manifests(
    trainer: Trainer, before: Callable[[dict[str, Any]], object], *, once: bool = False
) -> ExitStack:
    """Add a manifest to the checkpoints with a state that the Trainer writes.

    The manifest is made when a checkpoint is written: until then other callbacks, the datamodule
    and the module may change it.

    With ``once`` only the next checkpoint gets one. ``before`` is called with each of them.

    Returns:
        A stack that restores the strategy when it is closed.
    """
    stack, strategy = ExitStack(), trainer.strategy
    original = strategy.save_checkpoint

    def save_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if once:
            stack.close()
        state = find_state(checkpoint)
        if state is not None and trainer.is_global_zero:
            before(checkpoint)
            state[MANIFEST_KEY] = make_manifest(checkpoint)
        return original(checkpoint, *args, **kwargs)

    if not is_sharded(strategy):
        replace_method(stack, strategy, "save_checkpoint", save_checkpoint)
    return stack


def find_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a Trainer's checkpoint, or those of a file that has nothing else."""
    weights = checkpoint
    if not all(isinstance(value, Tensor) for value in checkpoint.values()):
        # The first is of a sharded checkpoint that was written to one file.
        keys = ("current_model_state", "state_dict", "model")
        tables = (checkpoint.get(key) for key in keys)
        weights = next((own for own in tables if isinstance(own, Mapping) and own), {})
    return {plain_name(n): value for n, value in weights.items() if isinstance(value, Tensor)}


def load_checkpoint(path: Path, *, allow_objects: bool = False) -> dict[str, Any]:
    """Read a checkpoint to the CPU.

    ``allow_objects`` unpickles Python objects, which can run code from the file.

    Raises:
        CheckpointError: If it cannot be read, or is not a checkpoint.
        SettingError: If it is a text file, or holds objects that may not be loaded, or that cannot
            be.
    """
    with suppress(OSError, UnicodeDecodeError), path.open("rb") as file:
        head = file.read(_HEAD)
        if head.decode() and b"\0" not in head:
            raise SettingError(f"{path} is a text file, and not a checkpoint. Name a checkpoint.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=not allow_objects)
    except Exception as error:
        is_pickle, objects = explain_damage(path), list[str]()
        with suppress(Exception):  # not a file that torch saved: the first error says why
            objects = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        if objects:
            listed = describe_names(objects[:8], len(objects), 8)
            if allow_objects:
                raise SettingError(
                    f"The objects in {path} cannot be loaded ({listed}): {error}. Run the command "
                    "where the program can import them, as with PYTHONPATH=."
                ) from error
            raise SettingError(
                f"{path} is not damaged, but holds Python objects ({listed}), and loading them can "
                "run code from the file. If you trust it, add --allow-objects; a program resumes "
                "from it with fit(..., weights_only=False), or with "
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in its environment."
            ) from error
        if is_pickle:
            raise SettingError(
                f"{path} is a pickle, as torch saved before release 1.6, which has no checksums to "
                f"verify, and it cannot be loaded: {escape(str(error), 400)}"
            ) from error
        raise CheckpointError(f"{path} cannot be read: {escape(str(error), 400)}") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} is not a checkpoint of a Trainer: it holds no dict.")
    return checkpoint


def explain_damage(path: Any) -> bool:
    """Raise a ``CheckpointError`` if a file that could not be loaded is damaged.

    torch does not verify the checksums in the file; damaged bytes lead to arbitrary errors. Return
    whether it is a pickle, as torch saved before release 1.6, which has no checksums.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - also of a file that is open already
            if file.read(1) == _PICKLE:
                return True
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    while stream.read(2**20):
                        pass
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as damage:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: it is truncated, or some of its bytes have changed "
            f"({damage}). Copy the file again, or take an earlier checkpoint."
        ) from damage
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError):
        pass  # missing, or not a local file: the error of the load says so
    return False


def check_checkpoint(checkpoint: Any, path: Any) -> bool:
    """Compare a checkpoint with the manifest in it.

    Returns:
        True if it has a manifest.

    Raises:
        CheckpointError: If its content differs from what was saved.
    """
    if (manifest := find_manifest(checkpoint)) is None:
        return False
    rest = {name: own for name, own in find_state(checkpoint).items() if own is not manifest}
    saved = {**checkpoint, CALLBACKS: {**checkpoint[CALLBACKS], KEY: rest}}
    if damage := check_manifest(saved, manifest):
        changed, added = (
            describe_names(names[:8], len(names)) for names in (damage.changed, damage.added)
        )
        count = len(damage.changed)
        differ = "1 tensor differs" if count == 1 else f"{count} tensors differ"
        parts = {
            f"{differ} from what was saved: {changed}": changed,
            f"{damage.missing} of the saved tensors are missing": damage.missing,
            f"it holds tensors that were not saved: {added}": added,
            "numbers or strings in it differ from those that were saved": damage.values,
        }
        listed = "; ".join(text for text, found in parts.items() if found)
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {listed}. Take another copy of it, or an "
            "earlier checkpoint. If you edited it, also delete "
            f'checkpoint["{CALLBACKS}"]["{KEY}"]["{MANIFEST_KEY}"]: it is then loaded unchecked.',
            names=damage.changed,
        )
    return True


def find_manifest(checkpoint: object) -> Mapping[str, Any] | None:
    """Return the manifest in a checkpoint; None without one."""
    state = find_state(checkpoint)
    manifest = state.get(MANIFEST_KEY) if isinstance(state, Mapping) else None
    return manifest if isinstance(manifest, Mapping) else None
