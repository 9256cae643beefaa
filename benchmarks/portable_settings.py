"""Run the cases of portable bits and the digits example under many settings of one machine.

    python benchmarks/portable_settings.py [--python NAME=PATH ...] [-o FILE]

Each setting runs tests/support/portable_cases.py and one epoch of examples/digits.py; all digests
must be those of the first setting. The first interpreter also leaves torch one class of operations
after the other (and then all of them): at least one case of each class must differ, or the class
is not needed on this machine. Interpreters with other versions of torch can be named. In the last
setting, plain loops in C (portable_without_mkl.c, built with cc) stand in for MKL's routines.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "support" / "portable_cases.py"
# What the variable LIGHTNING_D9M does where the package is installed.
TRAIN = """
import runpy, sys, lightning_d9m
sys.argv = [sys.argv[1], "--epochs", "1"]
with lightning_d9m.portable():
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
READ_DIGEST = """
import sys
from lightning_d9m import read_ledger
print(read_ledger(sys.argv[1]).outcome(0).final.totals["weights"][:16])
"""
STACK = """
import json, platform, torch
print(json.dumps({"torch": torch.__version__, "best": torch.backends.cpu.get_cpu_capability()}))
"""
# The machine's own, and less; it would crash with vector instructions that it has not.
CAPABILITIES = ("avx512", "avx2", "default")
CAPABILITIES = CAPABILITIES[CAPABILITIES.index(torch.backends.cpu.get_cpu_capability().lower()) :]
SETTINGS: dict[str, dict[str, str]] = {
    f"{name}, {threads} thread{'s' if threads > 1 else ''}": {
        "ATEN_CPU_CAPABILITY": name,
        "OMP_NUM_THREADS": str(threads),
    }
    for name in CAPABILITIES
    for threads in (1, 2)
} | {
    "MKL as on any CPU": {"MKL_CBWR": "COMPATIBLE"},
    "MKL with AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "MKL with SSE4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "oneDNN with SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "oneDNN off": {"TORCH_MKLDNN_ENABLED": "0"},
}
WITHOUT_MKL = "plain loops for MKL"
OF_OTHER_STACKS = ("default, 2 threads",)
CONTROLS: tuple[dict[str, str], ...] = (
    SETTINGS[f"{CAPABILITIES[0]}, 1 thread"],
    SETTINGS["default, 2 threads"] | SETTINGS["MKL as on any CPU"],
)


def run(python: Path, setting: dict[str, str], *arguments: object) -> str:
    """Run an interpreter under a setting, and return what it prints."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **setting, "PYTHONPATH": str(ROOT)}
    command = [str(one) for one in (python, "-W", "ignore", *arguments)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


def build_loops(folder: str) -> dict[str, str]:
    """Return the setting in which plain loops stand in for MKL's routines."""
    library = Path(folder, "loops.so")
    source = Path(__file__).with_name("portable_without_mkl.c")
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-lm"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}


def run_cases(python: Path, setting: dict[str, str], *arguments: str) -> dict[str, str]:
    """Return the digest of each case."""
    found: dict[str, str] = json.loads(run(python, setting, CASES, *arguments))
    return found


def train_digits(python: Path, setting: dict[str, str]) -> str:
    """Return the digest of the weights after one epoch of the digits example."""
    with tempfile.TemporaryDirectory() as folder:
        portable = {"LIGHTNING_D9M_PORTABLE": "1", "LIGHTNING_D9M_LEDGER_DIR": folder}
        run(python, setting | portable, "-c", TRAIN, ROOT / "examples" / "digits.py")
        return run(python, {}, "-c", READ_DIGEST, Path(folder, "fit-000")).strip()


def list_differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the names of the cases that differ."""
    return sorted(name for name in one if one[name] != other.get(name))


def show_controls(python: Path) -> dict[str, Any]:
    """Leave classes to torch; return the cases that then differ between settings."""
    one, other = (json.loads(run(python, setting, CASES, "--controls")) for setting in CONTROLS)
    found = {name: list_differences(one[name], other[name]) for name in one}
    plain = (run_cases(python, setting, "--plain") for setting in CONTROLS)
    return found | {"all": list_differences(*plain)}


def main() -> int:
    """Run all settings, print and write what differs; return 1 if a portable digest does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--settings", nargs="*", default=[*SETTINGS, WITHOUT_MKL], metavar="NAME")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    if WITHOUT_MKL in options.settings:
        SETTINGS[WITHOUT_MKL] = build_loops(folder.name)
    pythons = {"this": Path(sys.executable)}
    pythons |= {
        name: Path(path) for name, _, path in (one.partition("=") for one in options.python)
    }
    (readme,) = re.findall(r"digest is ([0-9a-f]{16})", (ROOT / "README.md").read_text())
    expected: dict[str, str] = {}
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "settings": []}
    for stack, python in pythons.items():
        version = json.loads(run(python, {}, "-c", STACK))
        for name, setting in SETTINGS.items():
            chosen = OF_OTHER_STACKS if stack != "this" else options.settings
            if name not in chosen:
                continue
            found, digits = run_cases(python, setting), train_digits(python, setting)
            expected = expected or found
            row = {"stack": stack, **version, "setting": name, "cases": len(found)}
            row |= {"differ": list_differences(expected, found), "digits": digits}
            print(json.dumps(row), flush=True)
            result["settings"].append(row | {"digits is README's": digits == readme})
    if not options.no_controls:
        result["differ when left to torch"] = show_controls(pythons["this"])
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(one["differ"] or one["digits"] != readme for one in result["settings"]))


if __name__ == "__main__":
    sys.exit(main())
