"""Run quick starts of libraries on Lightning under ``d9m repeat``.

    ENVIRONMENT/bin/python benchmarks/wild/run.py [--programs NAME ...] [--parts PART ...]

The environment has the libraries of requirements.txt and this package. Each program beside this
file runs there, unchanged, in an empty folder. The parts: ``repeat`` runs ``d9m repeat``, and
``interrupt`` runs ``d9m repeat --interrupt``. results/wild.json keeps the results.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from measurement import RESULTS, describe_machine, keep, read_results

HERE = Path(__file__).resolve().parent
PARTS = {"repeat": ["-n", "2"], "interrupt": ["--interrupt"]}
# Of each run, or each segment that resumes.
FIELDS = ("fit", "weights", "label", "first", "verdict", "reason")
# The library of each program.
PROGRAMS = {
    "chemprop_mpnn": "chemprop",
    "gluonts_deepar": "gluonts",
    "monai_unet": "monai",
    "scvi_model": "scvi-tools",
    "pytorch_forecasting_tft": "pytorch-forecasting",
    "torch_geometric_gin": "torch-geometric",
}
# These save instances of classes in their checkpoints.
WITH_OBJECTS = ("chemprop_mpnn", "monai_unet", "pytorch_forecasting_tft")


def repeat(program: str, *arguments: str) -> dict[str, Any]:
    """Run ``d9m repeat`` on a program, on one thread; return its verdict."""
    # None of this package's variables but those given.
    kept = {name: v for name, v in os.environ.items() if not name.startswith("LIGHTNING_D9M")}
    command = [sys.executable, "-m", "lightning_d9m", "repeat", "--json", *arguments, "--"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, sys.executable, str(HERE / f"{program}.py")],
            cwd=folder,
            env=kept | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    if not done.stdout.strip():
        return {"verdict": "failed", "message": done.stderr.strip()[-600:]}
    report = json.loads(done.stdout)
    rows = report.get("checked", report.get("runs"))
    shown = [{key: row[key] for key in FIELDS if key in row} for row in rows]
    return {"arguments": list(arguments), "verdict": report["verdict"], "runs": shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS], choices=[*PROGRAMS])
    parser.add_argument("--parts", nargs="*", default=[*PARTS], choices=[*PARTS])
    options = parser.parse_args()
    file = RESULTS / "wild.json"
    kept = read_results(file).get("programs", {})
    for program in options.programs:
        library = PROGRAMS[program]
        entry = kept.setdefault(program, {}) | {"library": library, "version": version(library)}
        for part in options.parts:
            objects = program in WITH_OBJECTS and part == "interrupt"
            entry[part] = repeat(program, *PARTS[part], *["--allow-objects"] * objects)
        keep(file, {"machine": describe_machine(), "programs": {program: entry}})


if __name__ == "__main__":
    main()
