"""Checkpoints as files: damage is found when one is read, before anything of it is used."""

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_d9m.errors import CheckpointError, CommandError
from lightning_d9m.hashing.checkpoint_digests import Damage, check_manifest, make_manifest
from lightning_d9m.text import describe_names, escape

KEY = "lightning_d9m"

# Under these each rank writes files of its own, in forms of theirs.
_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
_CHUNK = 2**20


def is_sharded(strategy: object) -> bool:
    """Return whether a strategy saves the parts of a model one by one."""
    return any(base.__name__ in _SHARDING for base in type(strategy).__mro__)


@contextmanager
def loads_checked(strategy: Any) -> Iterator[None]:
    """Check every checkpoint that the strategy loads in the body.

    Raises:
        CheckpointError: From the load, when the checkpoint is damaged.
    """
    original: Callable[..., Any] = strategy.load_checkpoint

    def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        with damage_explained(checkpoint_path):
            checkpoint = original(checkpoint_path, *args, **kwargs)
        if not is_sharded(strategy):
            check_checkpoint(checkpoint, checkpoint_path)
        return checkpoint

    strategy.load_checkpoint = load_checkpoint
    try:
        yield
    finally:
        del strategy.load_checkpoint


def save_with_manifest(trainer: Any) -> None:
    """Seal the checkpoint when it is written: until then others may change it."""
    strategy = trainer.strategy
    if is_sharded(strategy) or "save_checkpoint" in vars(strategy):
        return
    original = strategy.save_checkpoint

    def save_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        del strategy.save_checkpoint
        state = checkpoint.get(KEY)
        if state is not None and trainer.is_global_zero:
            state["seal"] = make_manifest(checkpoint)
        return original(checkpoint, *args, **kwargs)

    strategy.save_checkpoint = save_checkpoint


def load_checkpoint(path: Path, *, allow_objects: bool = False) -> dict[str, Any]:
    """Read a checkpoint on the CPU.

    Args:
        path: The file.
        allow_objects: Whether to unpickle Python objects, which can run code from the file.

    Raises:
        CheckpointError: When it cannot be read, or is not a checkpoint.
        CommandError: When it holds objects that may not be loaded, or that cannot be.
    """
    try:
        with damage_explained(path):
            checkpoint = torch.load(path, map_location="cpu", weights_only=not allow_objects)
    except CheckpointError:
        raise
    except Exception as error:
        if objects := _find_objects(path):
            listed = describe_names(objects[:8], len(objects), 8)
            if allow_objects:
                raise CommandError(
                    f"The objects in {path} cannot be loaded ({listed}): {error}. Run the command "
                    "where the program can import them, as with PYTHONPATH=."
                ) from error
            raise CommandError(
                f"{path} is not damaged, but holds Python objects ({listed}), and loading them can "
                "run code from the file. If you trust it, add --allow-objects; a program resumes "
                "from it with fit(..., weights_only=False), or with "
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in its environment."
            ) from error
        raise CheckpointError(f"{path} cannot be read: {escape(str(error), 400)}") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} is no checkpoint of a Trainer: it holds no dict.")
    return checkpoint


def _find_objects(path: Path) -> list[str]:
    """Return the classes and functions in a checkpoint that torch does not load by default."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001 - not a file that torch saved: the first error says why
        return []


@contextmanager
def damage_explained(path: Any) -> Iterator[None]:
    """Raise a ``CheckpointError`` for an error of the body if it is the file that is damaged.

    torch reads a file without looking at its check sums, and fails with whatever its bytes then
    lead to.
    """
    try:
        yield
    except Exception as error:
        damage = _find_damage(path)
        if damage is not None:
            raise CheckpointError(
                f"The checkpoint {path} is damaged: {damage}. Take another copy of it, or an "
                "earlier checkpoint."
            ) from error
        raise


def check_checkpoint(checkpoint: object, path: Any) -> bool:
    """Hold a checkpoint against the seal in it.

    Returns:
        Whether there is one.

    Raises:
        CheckpointError: When it holds other bytes than were saved.
    """
    state = checkpoint.get(KEY) if isinstance(checkpoint, Mapping) else None
    if not isinstance(checkpoint, Mapping) or not isinstance(state, Mapping):
        return False
    if "seal" not in state:
        return False
    rest = {name: value for name, value in state.items() if name != "seal"}
    damage = check_manifest({**checkpoint, KEY: rest}, state["seal"])
    if damage:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {_describe(damage)}. Take another copy of it, or "
            "an earlier checkpoint.",
            names=damage.changed,
        )
    return True


def _describe(damage: Damage) -> str:
    parts = []
    if damage.changed:
        count = len(damage.changed)
        what = "1 tensor holds" if count == 1 else f"{count} tensors hold"
        named = describe_names(damage.changed[:8], count)
        parts.append(f"{what} other bytes than were saved: {named}")
    if damage.missing:
        parts.append(f"{damage.missing} of the tensors that were saved are gone")
    if damage.added:
        named = describe_names(damage.added[:8], len(damage.added))
        parts.append(f"it holds tensors that were not saved: {named}")
    if damage.values:
        parts.append("numbers or texts in it are not those that were saved")
    return "; ".join(parts)


def _find_damage(path: Any) -> str | None:
    """Return what is wrong with a file of torch's, which is a zip archive, or None."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    while stream.read(_CHUNK):
                        pass
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        return f"it is cut short, or bytes of it have changed ({error})"
    except (OSError, ValueError, TypeError, RuntimeError):
        return None  # not there, or not a local file: the error says why
    return None
