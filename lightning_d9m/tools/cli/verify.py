"""``d9m verify CHECKPOINT [LEDGER]``: check offline that a checkpoint is what was saved.

It runs on the CPU and loads only plain values, unless ``--allow-objects`` is given. The verdict is
``damaged``; ``whole`` if all that was saved is as it was; ``found`` or ``not found`` if its weights
were searched for in a ledger; ``between records`` if the ledger has no record of that step, but all
records before it.

``d9m verify VERDICT PROOF`` checks that a verdict of ``d9m check --verdict`` is one on that proof.
"""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_d9m.engine.ledger.folder import Ledger, read_ledger
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.engine.ledger.kinds import EXCEPTION
from lightning_d9m.errors import CheckpointError, LedgerError, SettingError, file_errors
from lightning_d9m.text import describe_moment, describe_names, escape, pluralize
from lightning_d9m.tools.cli.arguments import SIGNER, refuse_options, whole_number
from lightning_d9m.tools.output.columns import print_result
from lightning_d9m.tools.output.terminal import wrap_on_terminal

ARGUMENTS = f"""
checkpoint:CHECKPOINT  a checkpoint that a Trainer saved, or a file of weights, alone (also
    .safetensors) or under the key state_dict; or a verdict of d9m check
ledger:LEDGER?  the ledger to search (default: the one that the checkpoint names, if it exists); or
    the proof that the verdict is on
{SIGNER.strip()}
--choose SEED  the number with which the segments of the verdict must have been chosen
--allow-objects  also load Python objects, which can run code from the file: use it only for files
    that you trust
--json  print the result as one JSON object
"""
EXAMPLE = "d9m verify checkpoints/last.ckpt"
SETTINGS: dict[str, dict[str, object]] = {"choose": {"type": whole_number(0)}}


def run(arguments: argparse.Namespace) -> int:
    """Verify a checkpoint.

    Returns:
        0 if it is whole and, where a ledger has a record for it, holds the weights of that record;
        else 1.

    Raises:
        SettingError: When there is nothing to check it by, or it holds objects.
        LedgerError: When the ledger that was named cannot be read.
    """
    path: Path = arguments.checkpoint
    if _is_statement(path):  # before the imports, which take seconds
        return _verify_verdict(arguments)
    refuse_options(arguments, ["signer", "choose"], f"{path} is not a verdict of d9m check")
    # Here, because they load torch and Lightning: `d9m --help` and a wrong path answer at once.
    from lightning_d9m.integrations.lightning.resume.saved_run import read_state
    from lightning_d9m.integrations.lightning.saved_state import check_checkpoint, load_checkpoint

    facts: dict[str, Any] = {"checkpoint": str(path), "verdict": "damaged", "records": []}
    facts |= dict.fromkeys(("tensors", "seed", "epoch", "step", "ledger"))
    try:
        checkpoint = load_checkpoint(path, allow_objects=arguments.allow_objects)
        has_manifest = check_checkpoint(checkpoint, path)
    except CheckpointError as error:
        lines = [f"damaged: {error}"]
    else:
        state = read_state(checkpoint)
        ledger = _find_ledger(arguments.ledger, state)
        if not has_manifest and ledger is None:
            raise SettingError(
                f"{path} has no manifest of lightning_d9m, so there is nothing to check it by. "
                "Name the ledger of the run that saved it, or save checkpoints with "
                "DeterminismCallback."
            )
        facts["verdict"] = "whole"
        lines = _describe(checkpoint, state, facts)
        if ledger is None:
            lines[0] += f" in {path}"
            lines.append("no ledger to find its weights in; name one to search it")
        else:
            facts |= {"ledger": str(ledger.path), **_search(ledger, checkpoint, state, path)}
            found = f"{facts['verdict']}: {facts.pop('said')}"
            lines = [found, *lines, f"ledger: {ledger.path}"]
    is_ok = facts["verdict"] in ("whole", "found", "between records")
    facts = {"ok": is_ok, **facts, "lines": lines}
    print_result(arguments.format, facts, wrap_on_terminal(lines))
    return int(not is_ok)


def _is_statement(path: Path) -> bool:
    """Return whether a file is a verdict, and not a checkpoint.

    Raises:
        SettingError: If it is a folder, or is not there.
    """
    if not path.exists():
        raise SettingError(f"No such file: {path}. Give the path of a checkpoint.")
    # Lightning saves a folder with DeepSpeed, and with FSDP for sharded state dicts.
    if path.is_dir():
        raise SettingError(
            f"{path} is a folder. Give the path of a checkpoint in it, or write a sharded one "
            "to one file with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{path} whole.pt`, and give that."
        )
    with file_errors(LedgerError, f"{path} cannot be read"), path.open("rb") as file:
        # No checkpoint begins so, whatever its name: safetensors may, with the size of its header.
        return (begin := file.read(2)).startswith(b"{") and begin != b"{\0"


def _find_ledger(named: Path | None, state: Any) -> Ledger | None:
    """Return the ledger that is named, or else that of the checkpoint, if it is there."""
    if named is not None:
        return read_ledger(named)
    if not isinstance(state, str) and (position := state.ranks[0].ledger):
        with suppress(LedgerError):  # it was moved
            return read_ledger(position["folder"])
    return None


def _verify_verdict(arguments: argparse.Namespace) -> int:
    from lightning_d9m.tools.proof.training import UNSIGNED, check_verdict

    path, proof = arguments.checkpoint, arguments.ledger
    if proof is None:
        raise SettingError(f"Name the proof that {path} is on: d9m verify {path} proof.json")
    said, notes, problems = check_verdict(path, proof, arguments.signer, arguments.choose)
    facts = {"ok": not problems, "verdict": str(path), "proof": str(proof), "says": said}
    lines = [*(problems or [f"{path} is a verdict that {proof} holds: {said}."]), *notes]
    lines = lines if arguments.signer else [*lines, UNSIGNED]
    print_result(arguments.format, facts | {"problems": problems}, wrap_on_terminal(lines))
    return int(bool(problems))


def _describe(checkpoint: Mapping[str, Any], state: Any, facts: dict[str, Any]) -> list[str]:
    """Return sentences on a whole checkpoint; note what it holds in ``facts``."""
    from lightning_d9m.integrations.lightning.saved_state import find_manifest

    lines = ["it has no manifest of lightning_d9m"]
    if (manifest := find_manifest(checkpoint)) is not None:
        facts["tensors"] = len(manifest["tensors"])
        count = pluralize(facts["tensors"], "tensor")
        lines = [f"whole: {count} and all other values are as saved"]
    if not isinstance(state, str):
        at = state.position
        facts |= {"seed": state.settings["seed"], "epoch": at.epoch, "step": at.step}
        place = f"before epoch {at.epoch}"
        if at.phase != "epoch":
            place = f"within epoch {at.epoch} after {at.batch} of its batches,"
        lines.append(f"saved {place} at step {at.step}, seed {state.settings['seed']}")
    elif manifest is not None:
        lines.append(state)
    return lines


def _search(
    ledger: Ledger, checkpoint: Mapping[str, Any], state: Any, path: Path
) -> dict[str, Any]:
    """Return the verdict, the records of a ledger that have the weights, and what is said of it."""
    from lightning_d9m.engine.hashing.digest import digest_many
    from lightning_d9m.engine.ledger.format.reader import holds_record
    from lightning_d9m.integrations.lightning.saved_state import find_weights

    # The lowest rank: rank 0 writes the checkpoint, and a single file may be that of another rank.
    rank = min(ledger.files)
    states = (own for own in ledger.line_records(rank) if isinstance(own, Digests))
    names = next((own.groups["weights"] for own in states if own.groups.get("weights")), ())
    tensors = find_weights(checkpoint, names)
    digests = dict(zip(tensors, digest_many(list(tensors.values())), strict=True))
    count, records = 0, list[str]()
    nearest: list[tuple[int, str]] = []
    for record in ledger.line_records(rank):
        if not isinstance(record, Digests) or not record.groups.get("weights"):
            continue
        count += 1
        # All weights of the record, and the buffers that both have.
        buffers = record.groups.get("buffers", {})
        expected = {**record.groups["weights"]} | {n: buffers[n] for n in buffers if n in digests}
        differing = [name for name in expected if digests.get(name) != expected[name]]
        # A weight that a module shares with another one has a second name in the file.
        shared = {*record.groups["weights"].values(), *buffers.values()}
        differing += [name for name in digests.keys() - expected if digests[name] not in shared]
        where = describe_moment(record.moment, record.epoch, record.step)
        if not differing:
            # An exception may come after a record of the same weights, which says more.
            records += [where] if record.moment != EXCEPTION or not records else []
        # At another step most weights differ, which says nothing of the cause.
        elif isinstance(state, str) or record.step == state.position.step:
            nearest.append((len(differing), _describe_differing(differing, digests, where)))
    last = None  # the record that was the last one when the checkpoint was saved
    if not isinstance(state, str) and state.position.phase != "epoch" and rank < len(state.ranks):
        last = state.ranks[rank].ledger
    if records:
        verdict, said = "found", f"the weights of {path} are those of {', '.join(records[:8])}"
    elif last is not None and holds_record(ledger.files[rank], last["check"]):
        verdict = "between records"
        said = (
            f"none of the {count} records of weights was taken where {path} was "
            "saved, but the ledger has the record that was its last at that time"
        )
    else:
        differ = min(nearest)[1] if nearest else ""
        verdict = "not found"
        said = f"none of the {count} records holds the weights of {path}{differ}"
    return {"verdict": verdict, "records": records, "said": said}


def _describe_differing(names: Sequence[str], digests: Mapping[str, Any], where: str) -> str:
    """Say which tensors of a file are not those of a record, and apart from them what it lacks."""
    lacking = [name for name in names if name not in digests]
    said = ""
    if differing := [name for name in names if name in digests]:
        said = f"; of {where} differ {describe_names(differing[:4], len(differing))}"
    if lacking:
        said += f"; it has no tensor named {describe_names(lacking[:4], len(lacking))}"
        # A module that wraps another one, as that of DDP does, puts a prefix before its names.
        first = f".{lacking[0]}"
        alike = [n for n in digests if f".{n}".endswith(first) or first.endswith(f".{n}")]
        said += "".join(f", but {escape(name)}" for name in alike[:1])
    return said
