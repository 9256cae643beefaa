"""Wrong trainings, changed files and lies, each by its name; checks.py tries whether a check sees.

A change gets the folder that is published, with ``train.py``, ``run`` and the file of its proof.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_d9m.engine.hashing.files import hash_file

PROGRAM = Path(__file__).resolve().parents[2] / "tests/support/checked_training.py"
LEDGER = "run/fit-000/rank-0.jsonl"
FINAL = "run/saved/step=60.ckpt"
# A package of the program that a stranger has, too.
PACKAGE = "site-packages/steps.py"
VARIABLES = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
# What checked_training.py can do wrong. All else follows from that, so the proof is one of its run.
TRAINED = (
    *("label", "input", "rate", "beta", "seed", "swapped epoch", "skipped batch", "repeated batch"),
    *("extra step", "early end", "loss", "dropout", "momentum", "batch size", "weight bit"),
    *("gradient bit", "state bit", "batch bit", "generator", "decay", "schedule", "precision"),
    *("frozen", "clipped", "accumulated", "initial weight", "logged", "other data"),
    "one sample more",
)
# The segments that show it, where they are not the first two of those between steps 0, 15, 30, 45
# and 60.
SEGMENTS = {"early end": "3", "extra step": "4", "final digest edited": "3"} | dict.fromkeys(
    (
        *("ulp in a checkpoint", "checkpoint of another run", "checkpoint of another step"),
        *("loss edited", "records removed", "logged"),
    ),
    "2",
)


def train(words: list[str], folder: Path, **variables: str) -> str:
    """Run a program in a folder; return the end of its errors, empty if it ends well."""
    environment = {**os.environ, **VARIABLES, **variables}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stderr[-500:] or "failed" if done.returncode else ""


def publish(python: str, folder: Path, wrong: str = "", **variables: str) -> Path:
    """Train in a new folder, with a package in it; return the folder."""
    facts = (folder / PACKAGE).parent / "steps-1.0.dist-info"
    facts.mkdir(parents=True)
    (folder / PACKAGE).write_text("COUNT = 60\n")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: steps\nVersion: 1.0\n")
    (facts / "RECORD").write_text("steps.py,,\n")
    (folder / "train.py").write_text(f"import steps\n{PROGRAM.read_text()}")
    given = {"PYTHONPATH": str((folder / PACKAGE).parent), "WRONG": wrong, **variables}
    problem = train([python, "train.py", "run"], folder, **given)
    assert not problem, problem
    return folder


def edit_ledger(ledger: Path, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    """Edit the records of a ledger, and make the checks of all records again."""
    from lightning_d9m.engine.ledger.format.records import CHAIN_START, chain_record

    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    edit(records)
    check, lines = CHAIN_START, list[bytes]()
    for record in records:
        record.pop("check", None)
        body = json.dumps(record, separators=(",", ":")).encode()
        line, check = chain_record(body, check)
        lines.append(line)
    ledger.write_bytes(b"".join(lines))


def change_checkpoint(path: Path) -> None:
    """Move a weight to the next number, and make the manifest again."""
    import torch

    from lightning_d9m.engine.hashing.checkpoint_manifest import make_manifest
    from lightning_d9m.integrations.lightning.saved_state import (
        MANIFEST_KEY,
        find_state,
        load_checkpoint,
    )

    checkpoint = load_checkpoint(path)
    weight = checkpoint["state_dict"]["layers.1.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    state = find_state(checkpoint)
    state.pop(MANIFEST_KEY)
    state[MANIFEST_KEY] = make_manifest(checkpoint)
    torch.save(checkpoint, path)


def _edit(kind: str, step: int, change: Callable[[dict[str, Any]], object]) -> Any:
    """Return a function that changes the first record of a kind and a step."""

    def change_first(records: list[dict[str, Any]]) -> None:
        change(next(own for own in records if own["kind"] == kind and own.get("step") == step))

    return lambda folder: edit_ledger(folder / LEDGER, change_first)


def _reverse(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["totals"].update({name: record["totals"][name][::-1]})


def _remove_records(records: list[dict[str, Any]]) -> None:
    records[:] = [own for own in records if own["kind"] != "step" or own["step"] < 46]


def _saved(folder: Path, step: int) -> Path:
    return folder / f"run/saved/step={step}.ckpt"


def list_edits(other: Path) -> dict[str, Callable[[Path], object]]:
    """Return changes of an honest run's files before it is proved; ``other`` has another run."""
    return {
        "ulp in a checkpoint": lambda folder: change_checkpoint(_saved(folder, 30)),
        "checkpoint of another run": lambda folder: shutil.copy(
            _saved(other, 30), _saved(folder, 30)
        ),
        "checkpoint of another step": lambda folder: shutil.copy(
            _saved(folder, 45), _saved(folder, 30)
        ),
        "final digest edited": _edit("digests", 60, _reverse("weights")),
        "step's digest edited": _edit("step", 31, _reverse("weights")),
        "loss edited": _edit("digests", 40, lambda own: own.update(loss=(0.5).hex())),
        "records removed": lambda folder: edit_ledger(folder / LEDGER, _remove_records),
        # It keeps the XXH3 of the state that ends a segment, as who can forge that would.
        "forged digest": _edit("step", 31, _reverse("state_sha256")),
    }


def edit_proof(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the proof by hand."""
    file = folder / "proof.json"
    proof = json.loads(file.read_text())
    change(proof)
    file.write_text(json.dumps(proof))


def train_further(folder: Path, name: str = "layers.1.weight") -> None:
    """Change the final model a little, in a tensor that it may not have had."""
    import torch

    checkpoint = torch.load(folder / FINAL, weights_only=True)
    weights = checkpoint["state_dict"]
    weights[name] = weights.get(name, torch.zeros(2)) + 1e-6
    torch.save(checkpoint, folder / FINAL)


def _hash_again(name: str) -> Callable[[Path], object]:
    """Return a function that puts the hash of a file into the proof that it has now."""

    def change(folder: Path) -> None:
        found = hash_file(folder / name)
        edit_proof(
            folder,
            lambda proof: [
                own["digest"].update(sha256=found)
                for own in proof["subject"]
                if own["name"] == name
            ],
        )

    return change


def _edit_text(name: str, old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def list_lies(other: Path) -> dict[str, Callable[[Path], object]]:
    """Return what a liar does to an honest proof and its files; ``other`` has another proof."""

    def take_ledger(folder: Path) -> None:
        shutil.copy(other / LEDGER, folder / LEDGER)
        _hash_again(LEDGER)(folder)

    def forge_records(folder: Path) -> None:
        _edit("step", 31, _reverse("state_sha256"))(folder)
        _hash_again(LEDGER)(folder)

    def forge_model(folder: Path, *name: str) -> None:
        train_further(folder, *name)
        _hash_again(FINAL)(folder)

    return {
        "other code": _edit_text("train.py", "1e-3", "2e-3"),
        "module changed in place": _edit_text(PACKAGE, "60", "61"),
        "package left out": lambda folder: edit_proof(
            folder, lambda proof: proof["predicate"]["packages"].pop("numpy")
        ),
        "model trained further": train_further,
        "model trained further, its hash made again": forge_model,
        "mean of the model forged": lambda folder: forge_model(folder, "layers.0.1.running_mean"),
        "tensor added to the model": lambda folder: forge_model(folder, "trigger"),
        "records and checks made again": _edit("step", 31, _reverse("weights")),
        "records, checks and their hash made again": forge_records,
        "proof of another run": lambda folder: shutil.copy(other / "proof.json", folder),
        "ledger of another run": take_ledger,
        "checkpoint left out": lambda folder: edit_proof(
            folder, lambda proof: proof["subject"].pop(1)
        ),
        "gap left out": lambda folder: edit_proof(
            folder, lambda proof: proof["predicate"]["uncommitted"].pop("validation data")
        ),
    }
