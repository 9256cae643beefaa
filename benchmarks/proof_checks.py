"""Which proofs does `d9m check` accept: honest ones of many libraries, and none that lies.

    python benchmarks/proof_checks.py honest [NAME ...]   needs wild/requirements.txt
    python benchmarks/proof_checks.py lies [NAME ...]

Each training is proved, and a stranger, in a copy of its folder, checks the proof. The results are
in results/proof-honest.json and results/proof-lies.json, where others keep theirs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE / "wild")]

import segments
from measurement import describe_machine, keep
from variants import VARIANTS

EXAMPLES = HERE.parent / "examples"
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
    **{"LIGHTNING_D9M": "1", "LIGHTNING_D9M_PROVABLE": "1", "LIGHTNING_D9M_LEDGER_DIR": "run"},
    **{"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
}


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command in a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    return subprocess.run([*words], cwd=folder, env=environment, **options)


def prove(folder: Path, *options: str) -> str:
    """Prove the run in a folder; return the error, empty without one."""
    fit = min(folder.glob("run/**/rank-0.jsonl"), default=folder / "run").parent
    words = [sys.executable, "-m", "lightning_d9m", "prove", str(fit), "--json", *options]
    return run(folder, *words).stderr if not (folder / "proof.json").exists() else ""


def check(folder: Path, *words: str) -> dict[str, Any]:
    """Check the proof in a folder; return what the command prints."""
    command = [sys.executable, "-m", "lightning_d9m", "check", "proof.json", "--json", *words]
    done = run(folder, *command)
    if not done.stdout.strip():
        return {"verdict": "error", "checked": [], "problems": [done.stderr.strip()[-500:]]}
    return dict(json.loads(done.stdout))


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
    for name in names or HONEST:
        program, *words = HONEST[name]
        with tempfile.TemporaryDirectory() as root:
            folder, copy = Path(root, "published"), Path(root, "stranger")
            folder.mkdir()
            shutil.copy(HERE / program, folder / "train.py")
            command = [sys.executable, "train.py", *words]
            done = run(folder, *command, **VARIABLES)
            problem = done.stderr[-500:] if done.returncode else prove(folder)
            if problem:
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


if __name__ == "__main__":
    part, *rest = sys.argv[1:] or ["lies"]
    sys.exit({"honest": measure_honest}[part](rest))
