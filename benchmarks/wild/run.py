"""Run quick starts of libraries on Lightning under ``d9m repeat``, and measure the overhead.

    python benchmarks/wild/run.py ENVIRONMENT [--programs NAME ...] [--parts PART ...]

ENVIRONMENT is the folder of a virtual environment. If it is not there, it is made, with the
libraries of requirements.txt and this package. Each program beside this file runs there, unchanged,
in an empty folder. The parts: ``repeat`` runs ``d9m repeat``, ``interrupt`` runs
``d9m repeat --interrupt``, and ``overhead`` alternates plain fits, fits with torch's deterministic
algorithms alone, and fits with the callback, in one process (see measured.py), and compares their
times. benchmarks/results/wild.json keeps the results; a part that does not run keeps what was
there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WITH_OBJECTS = ("chemprop_mpnn", "monai_unet", "pytorch_forecasting_tft")
OUTPUT = HERE.parent / "results" / "wild.json"
PARTS = ("repeat", "interrupt", "overhead")
# The library of each program, and the Lightning package that it uses.
# Those with objects save instances of classes in their checkpoints: they need --allow-objects.
PROGRAMS = {
    "chemprop_mpnn": ("chemprop", "lightning.pytorch"),
    "gluonts_deepar": ("gluonts", "lightning.pytorch"),
    "monai_unet": ("monai", "lightning.pytorch"),
    "scvi_model": ("scvi-tools", "lightning.pytorch"),
    "pytorch_forecasting_tft": ("pytorch-forecasting", "lightning.pytorch"),
    "torch_geometric_gin": ("torch-geometric", "lightning.pytorch"),
}


def make_environment(folder: Path) -> Path:
    """Return the Python of the environment; make the environment if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*install, "-r", str(HERE / "requirements.txt")], check=True)
        subprocess.run([*install, "-e", str(HERE.parents[1])], check=True)
    return python


def read_versions(python: Path, names: list[str]) -> dict[str, str]:
    """Return the versions of distributions in the environment."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in"
    done = subprocess.run(
        [str(python), "-c", f"{code} sys.argv[1:]}}))", *names],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(done.stdout))


def repeat(python: Path, program: str, *arguments: str) -> dict[str, Any]:
    """Run ``d9m repeat`` on a program; return its verdict."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(str(python), "-m", "lightning_d9m", "repeat", "--json", "-o", "runs"),
                *(*arguments, "--", str(python), str(HERE / f"{program}.py")),
            ],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if not done.stdout.strip():
        return {"verdict": "failed", "message": done.stderr.strip()[-600:]}
    report = json.loads(done.stdout)
    return {
        "arguments": list(arguments),
        "verdict": report["verdict"],
        "runs": [
            {key: row[key] for key in ("label", "fit", "verdict", "weights") if key in row}
            for row in report["runs"]
        ],
        "failed": {
            failure["label"]: failure["error"].splitlines()[-1] for failure in report["failed"]
        },
    }


def environment() -> dict[str, str]:
    """Return the variables of a run: one thread, and none of this package's but those given."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("LIGHTNING_D9M")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def measure(python: Path, program: str, package: str, rounds: int) -> dict[str, Any]:
    """Alternate the modes of a fit; return the time of this package, and ratios of the fits' times.

    That of this package is the time in its hooks, over the rest of the same fit: in the first fit
    of the process, and the median of the others.
    """
    measured = run_measured(python, program, package, rounds)
    times = measured["rounds"]
    first, *others = (found["d9m"] for found in (measured["first"], *times))
    result: dict[str, Any] = {
        "rounds": rounds,
        "own": {
            "first_fit": round(share_of_own(first), 3),
            "first_fit_ms": round(1000 * first["own"], 1),
            "later_fits": round(statistics.median(map(share_of_own, others)), 3),
            "later_fits_ms": round(1000 * statistics.median(fit["own"] for fit in others), 1),
        },
    }
    for clock in ("cpu", "wall"):
        plain = statistics.median(found["plain"][clock] for found in times)
        result[clock] = {
            **compare_modes(times, clock, "d9m", "plain"),
            "over_torch": compare_modes(times, clock, "d9m", "torch"),
            "torch": compare_modes(times, clock, "torch", "plain"),
            "plain_seconds": round(plain, 2),
        }
    return result


def share_of_own(fit: dict[str, float]) -> float:
    """Return the time of this package's hooks over that of the rest of a fit."""
    return fit["own"] / (fit["cpu"] - fit["own"])


def compare_modes(
    times: list[dict[str, dict[str, float]]], clock: str, mode: str, base: str
) -> dict[str, Any]:
    """Return median and quartiles of the ratios of a mode's times to those of another.

    ``"of_least"`` is the ratio of the least times: what else the machine does only adds time.
    """
    own, other = ([found[name][clock] for found in times] for name in (mode, base))
    ratios = [mine / its for mine, its in zip(own, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "of_least": round(min(own) / min(other), 3),
    }


def run_measured(python: Path, program: str, package: str, rounds: int) -> dict[str, Any]:
    """Return what measured.py writes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "times.json")
        subprocess.run(
            [
                *(str(python), str(HERE / "measured.py"), package),
                *(str(HERE / f"{program}.py"), str(rounds), str(output)),
            ],
            cwd=folder,
            env=environment(),
            check=True,
            capture_output=True,
        )
        return dict(json.loads(output.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS], choices=[*PROGRAMS])
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each mode (default: 9)")
    options = parser.parse_args()
    python = make_environment(options.environment.resolve())
    kept = json.loads(OUTPUT.read_text())["programs"] if OUTPUT.exists() else {}
    for program in options.programs:
        library, package = PROGRAMS[program]
        entry = kept.setdefault(program, {})
        entry["library"] = library
        entry["version"] = read_versions(python, [library])[library]
        if "repeat" in options.parts:
            entry["repeat"] = repeat(python, program, "-n", "2")
        if "interrupt" in options.parts:
            entry["interrupt"] = repeat(
                python,
                program,
                *("--interrupt", *(["--allow-objects"] if program in WITH_OBJECTS else [])),
            )
        if "overhead" in options.parts:
            entry["overhead"] = measure(python, program, package, options.rounds)
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": read_versions(python, ["torch", "lightning", "lightning-d9m"])
            | {"python": sys.version.split()[0]},
            "programs": dict(sorted(kept.items())),
        }
        OUTPUT.write_text(json.dumps(result, indent=1) + "\n")
        print(program, json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
