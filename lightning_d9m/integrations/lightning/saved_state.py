"""Files of checkpoints: their manifests, by which damage is detected before content is used."""

import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.attribute_patches import AttributePatches, replace_method
from lightning_d9m.engine.hashing.checkpoint_manifest import check_manifest, digest_manifest
from lightning_d9m.engine.hashing.training_state import plain_name
from lightning_d9m.engine.ledger.format.records import Checkpoint
from lightning_d9m.engine.recording.run import Run
from lightning_d9m.errors import CheckpointError, SettingError
from lightning_d9m.integrations.strategies.strategies import is_sharded
from lightning_d9m.integrations.trainer.lightning_private import wrap_resume_start
from lightning_d9m.integrations.trainer.trainer_attributes import KEY, Trainer, ranks_of
from lightning_d9m.text import describe_names, escape, quote

CALLBACKS = "callbacks"
"""Lightning's key of the callbacks' states in a checkpoint."""

_OF_TRAINER = "pytorch-lightning_version"  # a key of each checkpoint of a Trainer
MANIFEST_KEY = "manifest"
"""The key within the state that is added last, when the checkpoint is written."""


def find_state(checkpoint: object) -> Any:
    """Return the stored state in a checkpoint; None without one."""
    callbacks = checkpoint.get(CALLBACKS) if isinstance(checkpoint, Mapping) else None
    return callbacks.get(KEY) if isinstance(callbacks, Mapping) else None


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
            # Only after an error, because it reads the whole file again.
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
    # Paths may differ between hosts; epoch, step and content may not.
    facts = [str(path) if checkpoint else "", place, digest_manifest(find_manifest(checkpoint))]
    rows = ranks.gather_json(facts)
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


def record_saves(trainer: Trainer, run: Run) -> AttributePatches:
    """Record each checkpoint from which a fit can resume in its ledger; in a segment, write none.

    The checkpoints of a segment would take the place of those of the earlier run. What saving does
    to the training still happens, such as the hooks of the module.

    Returns:
        The patches of the strategy, to be undone.
    """
    patches, strategy = AttributePatches(), trainer.strategy
    save = strategy.save_checkpoint

    def save_and_record(checkpoint: dict[str, Any], filepath: Any, *args: Any, **words: Any) -> Any:
        # Recorded when the file is complete: a process that is killed while it saves leaves no
        # record of it.
        saved = save(checkpoint, filepath, *args, **words)
        # From weights alone no fit resumes.
        if run.is_open and find_state(checkpoint) is not None:
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            run.note_checkpoint(
                Checkpoint(
                    path=str(filepath),
                    epoch=trainer.current_epoch,
                    step=trainer.global_step,
                    batch=progress.ready,
                    manifest=digest_manifest(find_manifest(checkpoint)),
                )
            )
        return saved

    def leave(*_: Any, **__: Any) -> None:
        """Write nothing and remove nothing."""

    if run.stop is None:
        patches.replace(strategy, "save_checkpoint", save_and_record)
    else:
        patches.replace(strategy, "save_checkpoint", leave)
        # Otherwise a ModelCheckpoint would remove the files of the earlier run, to keep its
        # `save_top_k`.
        patches.replace(strategy, "remove_checkpoint", leave)
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_last", None) == "link":
                # It would let the link of the earlier run point to an earlier checkpoint.
                patches.replace(callback, "save_last", True)  # noqa: FBT003 - its value
    return patches


def list_weights(checkpoint: Mapping[Any, Any]) -> dict[Any, dict[str, Tensor]]:
    """Return the tables of tensors in a checkpoint by their keys; one that has nothing else is one.

    A Trainer's checkpoint, or a sharded one that was written to one file, has one with the weights.
    """
    is_table = all(isinstance(value, Tensor) for value in checkpoint.values())
    tables = {"": checkpoint} if is_table else checkpoint
    named = {key: own.items() for key, own in tables.items() if isinstance(own, Mapping)}
    found = {
        key: {plain_name(str(name)): value for name, value in own if isinstance(value, Tensor)}
        for key, own in named.items()
    }
    return {key: own for key, own in found.items() if own}


def find_weights(checkpoint: Mapping[Any, Any], names: Collection[str]) -> dict[str, Tensor]:
    """Return the table of a checkpoint that has the most of the names that a ledger records.

    Raises:
        SettingError: If several have, such as the weights and their average.
    """
    tables = list_weights(checkpoint)
    counts = {key: len(own.keys() & {*names}) for key, own in tables.items()}
    most = max(counts.values(), default=0)
    keys = [key for key, count in counts.items() if count == most]
    if most and len(keys) > 1 and _OF_TRAINER in checkpoint:
        keys = [key for key in keys if key == "state_dict"] or keys  # which the Trainer loads
    if most and len(keys) > 1:
        listed = " and ".join(map(quote, map(str, keys)))
        raise SettingError(
            f"The checkpoint has tensors with the names of the weights in {listed}, and nothing "
            "tells which of them the program loads. Save the one that it loads in a file without "
            "the others."
        )
    return tables[keys[0]] if len(keys) == 1 else {}


def load_checkpoint(path: Path, *, allow_objects: bool = False) -> dict[str, Any]:
    """Read a checkpoint to the CPU.

    ``allow_objects`` unpickles Python objects, which can run code from the file.

    Raises:
        CheckpointError: If it cannot be read, or is not a checkpoint.
        SettingError: If it is a file of another format, or holds objects that may not be loaded,
            or that cannot be.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=not allow_objects)
    except Exception as error:
        is_archive = explain_damage(path)
        objects = list[str]()
        with suppress(Exception):  # not a file that torch saved: the first error says why
            # It reads the names in the pickle without running it.
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
        if not is_archive:
            raise SettingError(
                f"{path} is not a checkpoint: torch.save writes a zip archive since release 1.6, "
                "and this file has another format. Name a checkpoint."
            ) from error
        raise CheckpointError(f"{path} cannot be read: {escape(str(error), 400)}") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} is not a checkpoint of a Trainer: it holds no dict.")
    return checkpoint


def explain_damage(path: Any) -> bool:
    """Raise a ``CheckpointError`` if a file that could not be loaded is damaged.

    torch does not verify the checksums in the file; damaged bytes lead to arbitrary errors. Return
    False if it is a file of another format.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - also of a file that is open already
            # A zip file that was cut keeps its head. `zipfile` reads the end first, and would call
            # a text or a pickle of an old torch a damaged file.
            if file.read(2) not in (b"PK", b""):
                return False
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    # `zipfile` compares the checksum of an entry when the entry ends; torch never
                    # does.
                    while stream.read(2**20):
                        pass
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as damage:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: it is truncated, or some of its bytes have changed "
            f"({damage}). Copy the file again, or take an earlier checkpoint."
        ) from damage
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError):
        pass  # missing, or not a local file: the error of the load says so
    return True


def check_checkpoint(checkpoint: Any, path: Any) -> bool:
    """Compare a checkpoint with the manifest in it.

    Returns:
        True if it has a manifest.

    Raises:
        CheckpointError: If its content differs from what was saved.
    """
    if (manifest := find_manifest(checkpoint)) is None:
        return False
    # The manifest was taken before it was added.
    rest = {name: own for name, own in find_state(checkpoint).items() if own is not manifest}
    saved = {**checkpoint, CALLBACKS: {**checkpoint[CALLBACKS], KEY: rest}}
    problems, changed = check_manifest(saved, manifest)
    if problems:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {'; '.join(problems)}. Take another copy of it, or "
            "an earlier checkpoint. If you edited it, also delete "
            f'checkpoint["{CALLBACKS}"]["{KEY}"]["{MANIFEST_KEY}"]: it is then loaded unchecked.',
            names=changed,
        )
    return True


def find_manifest(checkpoint: object) -> Mapping[str, Any] | None:
    """Return the manifest in a checkpoint; None without one."""
    state = find_state(checkpoint)
    manifest = state.get(MANIFEST_KEY) if isinstance(state, Mapping) else None
    return manifest if isinstance(manifest, Mapping) else None
