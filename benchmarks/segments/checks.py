"""Trainings that `d9m check` accepts, by their ledgers or by their proofs: honest ones, not others.

    python benchmarks/segments/checks.py honest [NAME ...]
    python benchmarks/segments/checks.py wrong [NAME ...]
    python benchmarks/segments/checks.py ... --ledger   all segments of ledgers, without proofs

Each training is proved, and a stranger checks the proof, in a copy of its folder. ``honest`` needs
the libraries of ``wild/requirements.txt``. The programs are forks of a process that has imported
torch and Lightning. Results are kept in ``results/checks.json``.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.extend(str(Path(__file__).parents[2] / own) for own in ("benchmarks", "tests/support"))

from forking_python import shared_python
from measurement import RESULTS, describe_machine, keep
from variants import VARIANTS
from wrong_runs import FINAL, SEGMENTS, TRAINED, VARIABLES, list_edits, list_lies, publish, train

from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.proof import training

ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = (
    *("digits.py --epochs 2", "graph.py", "segmentation.py --epochs 1", "fabric.py"),
    *("logical_ranks.py", "plain_torch.py", "accelerate_loop.py", "transformers_trainer.py"),
)
# What a program of an example gets, too, by the end of its name.
_WAYS = {"": {}, ", portable": {"LIGHTNING_D9M_PORTABLE": "1"}}
_WILD = sorted({*(ROOT / "benchmarks/wild").glob("**/*.py")} - {ROOT / "benchmarks/wild/run.py"})
# The program of each honest training with its arguments, and its variables.
HONEST: dict[str, tuple[list[str], dict[str, str]]] = {
    **{name: (["benchmarks/segments/variants.py", name], {}) for name in VARIANTS},
    **{
        f"{words.partition('.')[0]}{way}": (f"examples/{words}".split(), variables)
        for words in _EXAMPLES
        for way, variables in _WAYS.items()
    },
    **{path.stem: ([str(path)], {}) for path in _WILD},
}


# torch has 700 MB, and no check changes it.
hash_once = cache(training.hash_tree)


@contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    """Work in a folder, with its packages, as the process of a command would."""
    packages = str(folder / "site-packages")
    known = {"PYTHONPATH": packages, **VARIABLES}
    paths = mock.patch.object(sys, "path", [packages, *sys.path])
    hashes = mock.patch.object(training, "hash_tree", hash_once)
    with chdir(folder), mock.patch.dict(os.environ, known), paths, hashes:
        yield


def call(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Call a command in a folder; return its JSON, empty if it has an error, and that."""
    end = words.index("--") if "--" in words else len(words)
    with (
        standing_in(folder),
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as said,
    ):
        main([*words[:end], "--json", *words[end:]])
    return json.loads(out.getvalue() or "{}"), said.getvalue()[-500:]


def prove(folder: Path, *options: str) -> str:
    """Prove the run in a folder, unless it is proved; return the error, empty without one."""
    if (folder / "proof.json").exists():
        return ""
    fit = min(folder.glob("run/**/rank-0.jsonl"), default=folder / "run").parent
    found, errors = call(folder, "prove", str(fit), *options)
    return "" if found else errors


def check(folder: Path, of: str, *words: str) -> dict[str, Any]:
    """Check a proof or a ledger; return the verdict and the reasons, each with its place."""
    found, errors = call(folder, "check", of, *words)
    if not found:
        return {"verdict": "error", "reasons": [errors]}
    reasons = list(found["problems"])
    for own in (own for own in found["checked"] if own["verdict"] != "equal"):
        place = f"steps {own['first']} to {own['last']}, {own['verdict']}"
        reasons.append(f"{place}: {own['where'] or own['reason'][-300:]}")
    segments = [len(found["checked"]), found["segments"]]
    return {"verdict": found["verdict"], "segments": segments, "reasons": reasons}


def measure_honest(names: list[str], *, ledger: bool) -> dict[str, Any]:
    """Prove and check honest trainings."""
    results, python = dict[str, Any](), shared_python()
    given = {"LIGHTNING_D9M": "1", "LIGHTNING_D9M_LEDGER_DIR": "run", "LIGHTNING_D9M_PROVABLE": "1"}
    for name in names or HONEST:
        (program, *words), variables = HONEST[name]
        with tempfile.TemporaryDirectory() as root, mock.patch.dict(os.environ, variables):
            folder, copy = Path(root, "published"), Path(root, "stranger")
            folder.mkdir()
            shutil.copy(ROOT / program, folder / "train.py")
            command = [python, "train.py", *words]
            problem = train(command, folder, **given) or (prove(folder) if not ledger else "")
            if problem:
                results[name] = {"verdict": "error", "reasons": [problem]}
            else:
                shutil.copytree(folder, copy, symlinks=True)
                fit = min(copy.glob("run/**/rank-0.jsonl")).parent
                of, count = (str(fit), "all") if ledger else ("proof.json", "2")
                results[name] = check(copy, of, "--segments", count, "--", *command)
        print(name, json.dumps(results[name]), flush=True)
    return results


def measure_wrong(names: list[str], *, ledger: bool) -> dict[str, Any]:
    """Check wrong trainings, changed files, and proofs that lie."""
    results, python = dict[str, Any](), shared_python()
    command = ("--", python, "train.py", "again")
    with tempfile.TemporaryDirectory() as root:

        def make(wrong: str) -> Path:
            place = Path(root, wrong.replace(" ", "-") or "honest")
            return publish(python, place, wrong, LIGHTNING_D9M_PROVABLE="1")

        honest, other = make(""), make("rate")
        raw = Path(shutil.copytree(honest, Path(root, "raw")))
        problem = prove(honest, "--model", FINAL) or prove(other)
        assert not problem, problem
        edits, lies = list_edits(other), list_lies(other)
        for name in names or ["honest", *TRAINED, *edits, *([] if ledger else lies)]:
            if name in TRAINED:
                folder = other if name == "rate" else make(name)
            else:
                source = raw if name in edits else honest
                folder = Path(shutil.copytree(source, Path(root, f"copy of {name}")))
                (edits | lies).get(name, lambda _: None)(folder)
            chosen = ("--segments", "all") if ledger else ("--only", SEGMENTS.get(name, "0,1"))
            problem = "" if ledger else prove(folder)
            results[name] = check(folder, "run" if ledger else "proof.json", *chosen, *command)
            if problem:
                results[name] = {"verdict": "not provable", "reasons": [problem]}
            print(name, json.dumps(results[name]), flush=True)
        if not (names or ledger):
            results |= replay_verdict(honest, other, *command)
    return results


def replay_verdict(honest: Path, other: Path, *command: str) -> dict[str, Any]:
    """Show a verdict on an honest proof as one on another proof, and as one of another check."""
    given = ("--choose", "7", "--segments", "1", "--verdict", str(honest / "verdict.json"))
    check(honest, "proof.json", *given, *command)
    results = {}
    for name, proof, number in (
        ("replayed verdict on another proof", other / "proof.json", "7"),
        ("replayed verdict of another check", honest / "proof.json", "8"),
    ):
        found, _ = call(honest, "verify", "verdict.json", str(proof), "--choose", number)
        verdict = "equal" if found["ok"] else "different"
        results[name] = {"verdict": verdict, "reasons": found["problems"]}
        print(name, json.dumps(results[name]), flush=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=("honest", "wrong"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ledger", action="store_true")
    arguments = parser.parse_args()
    is_honest = arguments.part == "honest"
    measure = measure_honest if is_honest else measure_wrong
    found = measure(arguments.names, ledger=arguments.ledger)
    right = [name for name, own in found.items() if own["verdict"] == "equal"]
    part = arguments.part + (" ledgers" if arguments.ledger else "")
    keep(RESULTS / "checks.json", {part: describe_machine() | {"accepted": len(right)} | found})
    print(f"{len(right)} of {len(found)} accepted")
    sys.exit(int(right != ([*found] if is_honest else ["honest"] * ("honest" in found))))
