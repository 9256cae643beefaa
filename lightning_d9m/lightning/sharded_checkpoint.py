"""Sharded checkpoints: folders into which each rank of FSDP or tensor parallelism saved shards."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_d9m.errors import CheckpointError, CommandError
from lightning_d9m.text import escape

# Where Lightning puts the weights: FSDPStrategy, then ModelParallelStrategy.
_WEIGHTS = ("model.", "state_dict.")
_INDEX = ".metadata"
_REST = "meta.pt"


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder with the index that torch writes."""
    return (path / _INDEX).is_file()


def load_sharded_checkpoint(path: Path, *, allow_objects: bool) -> dict[str, Any]:
    """Read whole weights, and what Lightning saved beside them, to the CPU of this process.

    ``allow_objects`` unpickles the index, which can run code from the file.

    Raises:
        CheckpointError: If it cannot be read.
        CommandError: If objects may not be loaded.
    """
    if not allow_objects:
        raise CommandError(
            f"{path} is a sharded checkpoint, and torch reads its index {_INDEX} by pickle, which "
            "can run code from the file. If you trust it, add --allow-objects."
        )
    reader = FileSystemReader(path)
    try:
        rest: dict[str, Any] = torch.load(path / _REST, map_location="cpu", weights_only=True)
        index = reader.read_metadata().state_dict_metadata
        weights: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in index.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(_WEIGHTS)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(weights, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause, _ = next(iter(error.failures.values()))
        raise CheckpointError(
            f"The sharded checkpoint {path} cannot be read: {type(cause).__name__} "
            f"{escape(str(cause), 400)}. Restore all of its files."
        ) from error
    named = {name.partition(".")[2]: value for name, value in weights.items()}
    return {**rest, "state_dict": named}
