"""``d9m verify CHECKPOINT [LEDGER]``: check offline that a checkpoint is what was saved.

It runs on the CPU and loads only plain values, unless ``--allow-objects`` is given.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_d9m.cli.arguments import declare
from lightning_d9m.errors import CheckpointError, CommandError, LedgerError
from lightning_d9m.ledger.folder import Ledger, read_ledger
from lightning_d9m.ledger.format.records import Digests
from lightning_d9m.output.terminal import print_wrapped
from lightning_d9m.text import describe_names, escape, pluralize

if TYPE_CHECKING:
    from lightning_d9m.lightning.saved_state import LoopPosition, SavedState

_ARGUMENTS = """
checkpoint:CHECKPOINT  a checkpoint that a Trainer saved, or a file of weights, alone (also
    .safetensors) or under the key state_dict
ledger:LEDGER?  the ledger to search (default: the one that the checkpoint names, if it exists)
--allow-objects  also load Python objects, which can run code from the file: use it only for files
    that you trust
--json  print the result as one JSON object
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m verify``."""
    declare(parser, _ARGUMENTS)


def run(arguments: argparse.Namespace) -> int:
    """Verify a checkpoint.

    Returns:
        0 if it is whole and, where a ledger has a record for it, holds the weights of that record;
        else 1.

    Raises:
        CommandError: When there is nothing to check it by, or it holds objects.
        LedgerError: When the ledger that was named cannot be read.
    """
    path: Path = arguments.checkpoint
    if not path.exists():  # before the imports, which take seconds
        raise CommandError(f"No such file: {path}. Give the path of a checkpoint.")
    if path.is_dir():
        raise CommandError(
            f"{path} is a folder. Give the path of a checkpoint in it, or write a sharded one "
            "to one file with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{path} whole.pt`, and give that."
        )
    from lightning_d9m.lightning.checkpoint_io import check_checkpoint, load_checkpoint
    from lightning_d9m.lightning.saved_state import SavedState

    try:
        checkpoint = load_checkpoint(path, allow_objects=arguments.allow_objects)
        has_manifest = check_checkpoint(checkpoint, path)
    except CheckpointError as error:
        found = Verification(path, "damaged", [f"damaged: {error}"])
    else:
        state = SavedState.from_checkpoint(checkpoint)
        ledger = _find_ledger(arguments.ledger, state)
        if not has_manifest and ledger is None:
            raise CommandError(
                f"{path} has no manifest of lightning_d9m, so there is nothing to check it by. "
                "Name the ledger of the run that saved it, or save checkpoints with "
                "DeterminismCallback."
            )
        found = _verify(path, checkpoint, state, ledger, has_manifest=has_manifest)
    if arguments.json:
        print(json.dumps({"ok": found.ok, **asdict(found), "checkpoint": str(path)}, indent=2))
    else:
        print_wrapped(found.lines)
    return 0 if found.ok else 1


@dataclass
class Verification:
    """The result of verifying a checkpoint.

    Attributes:
        checkpoint: Its path.
        verdict: ``"damaged"``; ``"whole"`` if all that was saved is as it was; ``"found"`` or
            ``"not found"`` if its weights were searched for in a ledger; ``"between records"`` if
            the ledger has no record of that step, but all records before it.
        lines: The sentences that are printed.
        tensors: How many tensors the manifest covers; None without a manifest.
        seed: The seed of the run that saved it; None if it is not known.
        epoch: The epoch that a resumed run begins in; None if it is not known.
        step: The number of optimizer steps before; None if it is not known.
        ledger: The ledger that was searched.
        records: The records of the ledger that hold its weights, in words.
    """

    checkpoint: Path
    verdict: str
    lines: list[str]
    tensors: int | None = None
    seed: int | None = None
    epoch: int | None = None
    step: int | None = None
    ledger: str | None = None
    records: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against it."""
        return self.verdict in ("whole", "found", "between records")


def _verify(
    path: Path,
    checkpoint: Mapping[str, Any],
    state: "SavedState | str",
    ledger: Ledger | None,
    *,
    has_manifest: bool,
) -> Verification:
    from lightning_d9m.lightning.checkpoint_io import find_manifest

    manifest = find_manifest(checkpoint) if has_manifest else None
    found = Verification(path, "whole", [])
    if manifest is None:
        found.lines.append("it has no manifest of lightning_d9m")
    else:
        found.tensors = len(manifest["tensors"])
        count = pluralize(found.tensors, "tensor")
        found.lines.append(f"whole: {count} and all other values are as saved")
    if not isinstance(state, str):
        position = state.position
        found.seed, found.epoch, found.step = state.seed, position.epoch, position.step
        found.lines.append(f"saved {_describe_position(position)}, seed {state.seed}")
    elif manifest is not None:
        found.lines.append(state)
    if ledger is None:
        found.lines[0] += f" in {path}"
        found.lines.append("no ledger to find its weights in; name one to search it")
    else:
        found.ledger = str(ledger.path)
        _find_in(ledger, checkpoint, state, found)
    return found


def _describe_position(position: "LoopPosition") -> str:
    if position.phase == "epoch":
        return f"before epoch {position.epoch} at step {position.step}"
    return (
        f"within epoch {position.epoch} after {position.batch} of its batches, at step "
        f"{position.step}"
    )


def _find_ledger(named: Path | None, state: "SavedState | str") -> Ledger | None:
    if named is not None:
        return read_ledger(named)
    position = None if isinstance(state, str) else state.ranks[0].ledger
    try:
        return read_ledger(position.folder) if position else None
    except LedgerError:
        return None  # it was moved


def _find_in(
    ledger: Ledger, checkpoint: Mapping[str, Any], state: "SavedState | str", result: Verification
) -> None:
    """Find the records of a ledger that have the checkpoint's weights."""
    weights = _find_weights(checkpoint)
    rank = min(ledger.files)
    digests = _digest_weights(weights)
    count = 0
    nearest: list[tuple[int, str]] = []
    for record in ledger.line_records(rank):
        if isinstance(record, Digests) and record.groups.get("weights"):
            count += 1
            if not (differing := _list_differing(record, digests)):
                result.records.append(_name_record(record))
            elif isinstance(state, str) or record.step == state.position.step:
                named = describe_names(differing[:4], len(differing))
                nearest.append((len(differing), f"; of {_name_record(record)} differ {named}"))
    between = not isinstance(state, str) and state.position.phase != "epoch"
    if result.records:
        result.verdict = "found"
        shown = ", ".join(map(escape, result.records[:8]))
        found = f"the weights of {result.checkpoint} are those of {shown}"
    elif between and _was_written_for(ledger, rank, state):
        result.verdict = "between records"
        found = (
            f"none of the {count} records of weights was taken where {result.checkpoint} was "
            "saved, but the ledger has the record that was its last at that time"
        )
    else:
        result.verdict = "not found"
        differ = min(nearest)[1] if nearest else ""
        found = f"none of the {count} records holds the weights of {result.checkpoint}{differ}"
    result.lines.insert(0, f"{result.verdict}: {found}")
    result.lines.append(f"ledger: {ledger.path}")


def _find_weights(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights of a Trainer's checkpoint, or those of a file that has nothing else."""
    from torch import Tensor

    if all(isinstance(value, Tensor) for value in checkpoint.values()):
        return checkpoint
    # The last is of a sharded checkpoint that was written to one file.
    for key in ("current_model_state", "state_dict", "model"):
        if isinstance(found := checkpoint.get(key), Mapping) and found:
            return found
    return {}


def _was_written_for(ledger: Ledger, rank: int, state: "SavedState | str") -> bool:
    from lightning_d9m.ledger.resumed_runs import holds_record

    if isinstance(state, str) or rank >= len(state.ranks):
        return False
    position = state.ranks[rank].ledger
    return position is not None and holds_record(ledger.files[rank], position.check)


def _digest_weights(weights: Mapping[str, Any]) -> dict[str, str]:
    from torch import Tensor

    from lightning_d9m.hashing.digest import digest_many
    from lightning_d9m.hashing.training_state import plain_name

    tensors = {plain_name(n): value for n, value in weights.items() if isinstance(value, Tensor)}
    return dict(zip(tensors, digest_many(list(tensors.values())), strict=True))


def _name_record(record: Digests) -> str:
    return f"{record.moment} {record.epoch} (step {record.step})"


def _list_differing(record: Digests, digests: Mapping[str, str]) -> list[str]:
    """Return the names that the checkpoint lacks or has with other digests.

    They are those of all weights of a record, and of the buffers that both have.
    """
    expected = dict(record.groups["weights"])
    buffers = record.groups.get("buffers", {})
    expected |= {name: value for name, value in buffers.items() if name in digests}
    return [name for name, value in expected.items() if digests.get(name) != value]
