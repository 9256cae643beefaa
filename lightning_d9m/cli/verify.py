"""``d9m verify CHECKPOINT [LEDGER]``: whether a checkpoint is what was saved, without training.

It runs on the CPU, and loads nothing but plain values.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_d9m.errors import CheckpointError, CommandError, LedgerError
from lightning_d9m.ledger.folder import Ledger, read_ledger
from lightning_d9m.ledger.records import Digests
from lightning_d9m.text import escape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint that a Trainer saved")
    parser.add_argument(
        "ledger",
        type=Path,
        nargs="?",
        help="the ledger to find it in (default: the one that it names, if that is there)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Verify a checkpoint.

    Returns:
        0 when it is whole and, where a ledger has a record for it, the weights are those of that
        record; 1 when not.

    Raises:
        CommandError: When there is nothing to check it by.
        LedgerError: When the ledger that was named cannot be read.
    """
    from lightning_d9m.lightning.checkpoint_io import KEY, check_checkpoint, load_checkpoint

    path: Path = arguments.checkpoint
    if not path.is_file():
        raise CommandError(f"There is no checkpoint at {path}: it is no file. Check the name.")
    try:
        checkpoint = load_checkpoint(path)
        sealed = check_checkpoint(checkpoint, path)
    except CheckpointError as error:
        print(error)
        return 1
    state = checkpoint.get(KEY)
    state = state if isinstance(state, Mapping) else {}
    ledger = _find_ledger(arguments.ledger, state)
    if not sealed and ledger is None:
        raise CommandError(
            f"{path} holds no seal of lightning_d9m, so there is nothing to check it by. Name the "
            "ledger of the run that saved it, or save checkpoints with DeterminismCallback."
        )
    print(f"{path}: {_describe_seal(checkpoint) if sealed else 'holds no seal of lightning_d9m'}")
    if state:
        print(f"saved {_describe_place(state['place'])}, seed {state['seed']}")
    if ledger is None:
        print("no ledger to find its weights in: name one to do so")
        return 0
    return _find_in(ledger, checkpoint, state)


def _describe_seal(checkpoint: Mapping[str, Any]) -> str:
    count = len(checkpoint["lightning_d9m"]["seal"]["tensors"])
    return f"whole: {count} tensors and all other values are those that were saved"


def _describe_place(place: Mapping[str, Any]) -> str:
    epoch, step = place["epoch"], place["step"]
    if place["moment"] == "epoch":
        return f"before epoch {epoch} at step {step}"
    return f"within epoch {epoch} after {place['batch']} of its batches, at step {step}"


def _find_ledger(named: Path | None, state: Mapping[str, Any]) -> Ledger | None:
    if named is not None:
        return read_ledger(named)
    ranks = state.get("ranks") or [{}]
    standing = ranks[0].get("ledger")
    try:
        return None if not standing else read_ledger(standing["folder"])
    except LedgerError:
        return None  # it was moved


def _find_in(ledger: Ledger, checkpoint: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    """Find the records of a ledger that hold the checkpoint's weights; return the exit status."""
    weights = checkpoint.get("current_model_state") or checkpoint.get("state_dict") or {}
    rank = min(ledger.files)
    digests = _digest_weights(weights)
    found, count = [], 0
    for record in ledger.records(rank):
        if isinstance(record, Digests) and record.groups.get("weights"):
            count += 1
            if _holds(record, digests):
                found.append(f"{record.moment} {record.epoch} (step {record.step})")
    if found:
        print(f"{ledger.path}: its weights are those of {', '.join(map(escape, found[:8]))}")
        return 0
    between = bool(state) and state["place"]["moment"] != "epoch"
    if between and _was_written_for(ledger, rank, state):
        print(
            f"{ledger.path}: none of its {count} records of weights was taken where this was "
            "saved; it does hold the record that was its last then"
        )
        return 0
    print(f"{ledger.path}: none of its {count} records holds these weights")
    return 1


def _was_written_for(ledger: Ledger, rank: int, state: Mapping[str, Any]) -> bool:
    from lightning_d9m.ledger.resumed_runs import holds_check

    ranks = state.get("ranks") or []
    standing = (ranks[rank].get("ledger") if rank < len(ranks) else None) or {}
    return "check" in standing and holds_check(ledger.files[rank], standing["check"])


def _digest_weights(weights: Mapping[str, Any]) -> dict[str, str]:
    from torch import Tensor

    from lightning_d9m.hashing.digest import digest_many
    from lightning_d9m.hashing.model_tensors import plain_name

    tensors = {plain_name(n): value for n, value in weights.items() if isinstance(value, Tensor)}
    return dict(zip(tensors, digest_many(list(tensors.values())), strict=True))


def _holds(record: Digests, digests: Mapping[str, str]) -> bool:
    """Whether all weights of a record are in the checkpoint, and buffers where both have them."""
    expected = dict(record.groups["weights"])
    buffers = record.groups.get("buffers", {})
    expected |= {name: value for name, value in buffers.items() if name in digests}
    return all(digests.get(name) == value for name, value in expected.items())
