"""Proofs that `d9m check` accepts: honest ones of many libraries, and none that lies.

    python benchmarks/proof_checks.py honest [NAME ...]   needs wild/requirements.txt
    python benchmarks/proof_checks.py lies [NAME ...]

Each training is proved, and a stranger, in a copy of its folder, checks the proof; the programs are
forks of a process that has imported torch and Lightning. The results are kept in
results/proof-honest.json and results/proof-lies.json.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from importlib.metadata import Distribution
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parent / own) for own in ("", "wild", "../tests/support"))

import segments
from forking_python import shared_python
from measurement import describe_machine, keep
from variants import VARIANTS

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.proof import training

HERE = Path(__file__).resolve().parent
# The program of each honest training, and its arguments, by name.
HONEST: dict[str, list[str]] = {name: ["wild/variants.py", name] for name in VARIANTS} | {
    Path(program).stem: [program, *words]
    for program, *words in (
        *(("../examples/digits.py",), ("../examples/segmentation.py",), ("../examples/graph.py",)),
        *(("../examples/fabric.py",), ("../examples/accelerate_loop.py",)),
        *(("../examples/plain_torch.py",), ("../examples/transformers_trainer.py",)),
        *(("../examples/logical_ranks.py",), ("wild/chemprop_mpnn.py",)),
        *(("wild/gluonts_deepar.py",), ("wild/monai_unet.py",), ("wild/torch_geometric_gin.py",)),
        *(("wild/pytorch_forecasting_tft.py",), ("wild/loops/skorch_net.py",)),
        *(("wild/loops/ignite_loop.py",), ("wild/loops/pyro_svi.py",)),
    )
}
VARIABLES = {
    "LIGHTNING_D9M": "1",
    "LIGHTNING_D9M_PROVABLE": "1",
    "LIGHTNING_D9M_LEDGER_DIR": "run",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}
os.environ["OMP_NUM_THREADS"] = "1"  # also for checks


READ = training.hash_package


@cache
def hash_once(name: str) -> str:
    """Return the hash of a package, which does not change meanwhile."""
    return READ(Distribution.from_name(name))


training.hash_package = lambda package: hash_once(package.name)
training.packages_distributions = cache(training.packages_distributions)


def train(folder: Path, *words: str, **variables: str) -> str:
    """Run a program in a folder, recorded for a proof; return the error, empty without one."""
    environment = {**os.environ, **VARIABLES, **variables}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stderr[-500:] if done.returncode else ""


def call(folder: Path, *words: str) -> tuple[str, str]:
    """Call a command in a folder; return what it prints, and its errors."""
    with chdir(folder), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        main([*words, "--json"] if "--" not in words else [*words])
    return out.getvalue(), errors.getvalue()


def prove(folder: Path, *options: str) -> str:
    """Prove the run in a folder, unless it is proved; return the error, empty without one."""
    if (folder / "proof.json").exists():
        return ""
    fit = min(folder.glob("run/**/rank-0.jsonl"), default=folder / "run").parent
    printed, errors = call(folder, "prove", str(fit), *options)
    return "" if printed else errors


def check(folder: Path, *words: str) -> dict[str, Any]:
    """Check the proof in a folder; return what the command prints."""
    printed, errors = call(folder, "check", "proof.json", "--json", *words)
    known = {"verdict": "error", "checked": [], "problems": [errors[-500:]]}
    return dict(json.loads(printed)) if printed else known


def list_reasons(found: dict[str, Any]) -> list[str]:
    """Return why a proof is not accepted, each reason with its place."""
    places = [
        f"steps {own['first']} to {own['last']}, {own['verdict']}: {own['where'] or own['reason']}"
        for own in found["checked"]
        if own["verdict"] != "equal"
    ]
    return [*found["problems"], *places]


def measure_honest(names: list[str]) -> int:
    """Prove and check honest trainings; return 1 if one is not accepted."""
    results: dict[str, Any] = {}
    python = shared_python()
    for name in names or HONEST:
        program, *words = HONEST[name]
        with tempfile.TemporaryDirectory() as root:
            folder, copy = Path(root, "published"), Path(root, "stranger")
            folder.mkdir()
            shutil.copy(HERE / program, folder / "train.py")
            command = [python, "train.py", *words]
            if problem := train(folder, *command) or prove(folder):
                results[name] = {"verdict": "error", "reasons": [problem]}
            else:
                shutil.copytree(folder, copy, symlinks=True)
                found = check(copy, "--segments", "2", "--", *command)
                left = json.loads((folder / "proof.json").read_text())["predicate"]["uncommitted"]
                results[name] = {
                    "verdict": found["verdict"],
                    "segments": [len(found["checked"]), found.get("segments", 0)],
                    "reasons": list_reasons(found),
                    "uncommitted": sorted(left),
                }
        print(name, json.dumps(results[name]), flush=True)
    keep(HERE / "results/proof-honest.json", {"machine": describe_machine(), **results})
    return int(any(own["verdict"] != "equal" for own in results.values()))


def edit_proof(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the proof by hand."""
    file = folder / "proof.json"
    proof = json.loads(file.read_text())
    change(proof)
    file.write_text(json.dumps(proof))


def train_further(folder: Path) -> None:
    """Change the final model a little."""
    import torch

    path = folder / "run/saved/step=60.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"]["layers.1.weight"] += 1e-6
    torch.save(checkpoint, path)


def replace_ledger(folder: Path, other: Path) -> None:
    """Take the ledger of another run, and make its hash in the proof again."""
    ledger = "run/fit-000/rank-0.jsonl"
    shutil.copy(other / ledger, folder / ledger)
    found = hash_file(folder / ledger)
    edit_proof(
        folder,
        lambda proof: [
            own["digest"].update(sha256=found) for own in proof["subject"] if own["name"] == ledger
        ],
    )


def list_lies(other: Path) -> dict[str, Callable[[Path], object]]:
    """Return what a liar does to an honest proof and its files; ``other`` is another proved run."""
    return {
        "other code": lambda folder: (folder / "train.py").write_text(
            (folder / "train.py").read_text().replace("1e-3", "2e-3")
        ),
        "package changed in place": lambda folder: edit_proof(
            folder, lambda proof: proof["predicate"]["packages"].update(numpy="0" * 64)
        ),
        "model trained further": train_further,
        "proof of another run": lambda folder: shutil.copy(other / "proof.json", folder),
        "ledger of another run": lambda folder: replace_ledger(folder, other),
        "checkpoint left out": lambda folder: edit_proof(
            folder, lambda proof: proof["subject"].pop(1)
        ),
        "gap left out": lambda folder: edit_proof(
            folder, lambda proof: proof["predicate"]["uncommitted"].pop("validation data")
        ),
    }


def forge(folder: Path) -> None:
    """Keep the XXH3 of a state that ends a segment, and change its SHA-256, as a forger would."""

    def change(records: list[dict[str, Any]]) -> None:
        record = next(own for own in records if own["kind"] == "step" and own["step"] == 31)
        record["totals"]["state_sha256"] = record["totals"]["state_sha256"][::-1]

    segments.edit_ledger(folder / "fit-000/rank-0.jsonl", change)


# The segments that a check needs, where they are not the first two of those between steps 0, 15,
# 30, 45 and 60.
SEGMENTS = {"early end": "3", "extra step": "4", "final digest edited": "3"} | dict.fromkeys(
    (
        *("ulp in a checkpoint", "checkpoint of another run", "checkpoint of another step"),
        *("loss edited", "records removed"),
    ),
    "2",
)


def measure_lies(names: list[str]) -> int:
    """Check proofs of wrong trainings, and changed ones; return 1 if one is accepted."""
    python, results = shared_python(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as root:

        def publish(wrong: str) -> Path:
            folder = Path(root, wrong.replace(" ", "-") or "honest")
            folder.mkdir()
            shutil.copy(segments.PROGRAM, folder / "train.py")
            assert not (problem := train(folder, python, "train.py", "run", WRONG=wrong)), problem
            return folder

        honest, other = publish(""), publish("rate")
        raw = Path(shutil.copytree(honest, Path(root, "raw")))
        assert not prove(honest, "--model", "run/saved/step=60.ckpt")
        assert not prove(other)
        edits = {**segments.list_edits(other / "run"), "forged digest": forge}
        lies = list_lies(other)
        trained = ["other data", "one sample more", *segments.TRAINED]
        for name in names or ["", *trained, *edits, *lies]:
            if name in trained:  # the training was wrong, and all else follows from it
                folder = other if name == "rate" else publish(name)
            else:
                source = raw if name in edits else honest
                folder = Path(shutil.copytree(source, Path(root, f"copy of {name}")))
                if name:
                    (edits | lies)[name](folder if name in lies else folder / "run")
            problem = prove(folder)  # again, for changed files
            chosen = ("--only", SEGMENTS.get(name, "0,1"))
            found = check(folder, *chosen, "--", python, "train.py", "again")
            reasons = [problem] if problem else list_reasons(found)
            verdict = "not provable" if problem else found["verdict"]
            results[name or "honest"] = {"verdict": verdict, "reasons": reasons}
            print(name or "honest", json.dumps(results[name or "honest"]), flush=True)
    keep(HERE / "results/proof-lies.json", {"machine": describe_machine(), **results})
    return int(any((own["verdict"] == "equal") != (n == "honest") for n, own in results.items()))


if __name__ == "__main__":
    part, *rest = sys.argv[1:] or ["lies"]
    sys.exit({"honest": measure_honest, "lies": measure_lies}[part](rest))
