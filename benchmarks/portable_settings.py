"""Run the cases of portable bits and the digits example under many settings of one machine.

    python benchmarks/portable_settings.py [--python PATH ...] [--once PATH ...] [-o FILE]

Each setting runs tests/support/portable_cases.py, whose digests must be those of
portable_digests.json; some run one epoch of examples/digits.py, whose digest must be the README's.
Other interpreters, with other versions of torch, run the settings of ``MATRIX``: capabilities,
threads, and MKL or plain loops in C (portable_without_mkl.c, built with cc) for its routines;
those of ``--once`` run one of them.

The first interpreter also leaves torch one class of operations after the other (and then all of
them): at least one case of each class must differ, or the class is not needed on this machine. The
loops count only if plain torch's cases differ with them. FILE is Markdown: what it says below
``EARLIER`` stays.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CASES = ROOT / "tests" / "support" / "portable_cases.py"
GOLDEN = CASES.with_name("portable_digests.json")
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
print(json.dumps({"torch": torch.__version__, "python": platform.python_version()}))
"""
# The machine's own, and less; it would crash with vector instructions that it has not.
CAPABILITIES: tuple[str, ...] = ("avx512", "avx2", "default")
CAPABILITIES = CAPABILITIES[CAPABILITIES.index(torch.backends.cpu.get_cpu_capability().lower()) :]
WITHOUT_MKL = ", plain loops for MKL"
MATRIX: dict[str, dict[str, str]] = {
    f"{name}, {threads} thread{'s' if threads > 1 else ''}{loops}": {
        "ATEN_CPU_CAPABILITY": name,
        "OMP_NUM_THREADS": str(threads),
    }
    for loops in ("", WITHOUT_MKL)
    for name in CAPABILITIES
    for threads in (1, 2)
}
RESTRICTED = {
    "MKL as on any CPU": {"MKL_CBWR": "COMPATIBLE"},
    "MKL with AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "MKL with SSE4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "oneDNN with SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "oneDNN off": {"TORCH_MKLDNN_ENABLED": "0"},
}
ONE = "default, 2 threads"
FIRST = f"{CAPABILITIES[0]}, 1 thread"
CONTROLS: tuple[dict[str, str], ...] = (
    MATRIX[FIRST],
    MATRIX[ONE] | RESTRICTED["MKL as on any CPU"],
)
WITH_DIGITS = {ONE, FIRST, FIRST + WITHOUT_MKL}
# Torch 2.13 draws and differentiates these otherwise than torch before it.
NEW_IN_TORCH = (2, 13), {"cumprod", "trunc_normal_"}
TITLE = "# Portable bits under the settings of one machine"
EARLIER = "\n## Earlier"


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
    library = str(Path(folder, "loops.so"))
    source = str(Path(__file__).with_name("portable_without_mkl.c"))
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-lm"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": library}


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


def show_controls(python: Path) -> dict[str, list[str]]:
    """Leave classes to torch; return the cases that then differ between settings."""
    one, other = (json.loads(run(python, setting, CASES, "--controls")) for setting in CONTROLS)
    found = {name: list_differences(one[name], other[name]) for name in one}
    plain = (run_cases(python, setting, "--plain") for setting in CONTROLS)
    return found | {"all": list_differences(*plain)}


def run_stack(
    python: Path, settings: dict[str, dict[str, str]], loops: dict[str, str], with_digits: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row of the table for each setting of an interpreter."""
    stack = json.loads(run(python, {}, "-c", STACK))
    expected: dict[str, str] = json.loads(GOLDEN.read_text())
    version, changed = NEW_IN_TORCH
    old = tuple(map(int, stack["torch"].split(".")[:2])) < version
    stack["without MKL"] = 0
    if any(WITHOUT_MKL in name for name in settings):
        plain = [run_cases(python, one, "--plain") for one in ({}, loops)]
        stack["without MKL"] = len(list_differences(*plain))
    for name, given in settings.items():
        if WITHOUT_MKL in name and not stack["without MKL"]:
            continue  # the loops were not loaded
        setting = given | (loops if WITHOUT_MKL in name else {})
        found = run_cases(python, setting)
        differ = list_differences(expected, found)
        row = {"setting": name, "cases": len(found), "differ": differ}
        row["explained"] = old and set(differ) <= changed
        yield stack | row | {"digits": train_digits(python, setting) if name in with_digits else ""}


def format_table(rows: list[dict[str, Any]], controls: dict[str, list[str]], readme: str) -> str:
    """Return the result as Markdown."""
    first = (
        f"{time.strftime('%d %B %Y')}, {read_processor()}, by `benchmarks/portable_settings.py`. "
        "The digests of all cases are compared with `tests/support/portable_digests.json`, the "
        f"digest of one epoch of `examples/digits.py` with the README's, {readme}."
    )
    lines = [
        first,
        "",
        "| torch, Python | setting | cases equal | digits |",
        "| --- | --- | ---: | --- |",
    ]
    for row in rows:
        names = ", ".join(f"`{name}`" for name in row["differ"])
        equal = f"{row['cases'] - len(row['differ'])} of {row['cases']}"
        why = f" (not {names}, new in torch 2.13)" if row["explained"] else f" (not {names})"
        digits = "equal" if row["digits"] == readme else row["digits"] or "not run"
        stack = f"{row['torch']}, {row['python']}"
        lines.append(f"| {stack} | {row['setting']} | {equal}{why if names else ''} | {digits} |")
    loops = {f"{row['torch']}: {row['without MKL']}": None for row in rows if row["without MKL"]}
    lines += [
        "",
        f"Cases of plain torch that differ with the loops, by its version: {', '.join(loops)}.",
    ]
    if controls:
        lines += ["", f"Cases that differ if torch computes a class, {CONTROLS[0]} against"]
        lines += [f"{CONTROLS[1]}:", "", "| class | cases that differ |", "| --- | --- |"]
        classes = {name: found for name, found in controls.items() if name != "all"}
        lines += [f"| {name} | {', '.join(found)} |" for name, found in classes.items()]
        lines += [f"| all | {len(controls['all'])} cases |"]
    return "\n".join(lines) + "\n"


def read_processor() -> str:
    """Return the processor's name."""
    (name,) = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[:1]
    return str(name)


def main() -> int:
    """Run all settings, print and write what differs; return 1 if a portable digest does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", default=[], metavar="PATH")
    parser.add_argument("--once", action="append", default=[], metavar="PATH")
    parser.add_argument("--settings", nargs="*", default=[*MATRIX, *RESTRICTED], metavar="NAME")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--no-digits", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "portable-settings.md")
    options = parser.parse_args()
    (readme,) = re.findall(r"digest is ([0-9a-f]{16})", (ROOT / "README.md").read_text())
    rows: list[dict[str, Any]] = []
    controls: dict[str, list[str]] = {}

    def write() -> None:
        text = format_table(rows, controls, readme)
        before = options.output.read_text() if options.output.exists() else ""
        earlier = "".join(before.partition(EARLIER)[1:])
        options.output.write_text(f"{TITLE}\n\n{text}{earlier}")

    with tempfile.TemporaryDirectory() as folder:
        loops = build_loops(folder)
        for place, python in enumerate((sys.executable, *options.python, *options.once)):
            known = MATRIX if place else MATRIX | RESTRICTED
            is_once = python in options.once
            chosen = [ONE] if is_once else options.settings
            digits = set() if is_once or options.no_digits else WITH_DIGITS
            settings = {name: one for name, one in known.items() if name in chosen}
            for row in run_stack(Path(python), settings, loops, digits):
                print(json.dumps(row), flush=True)
                rows.append(row)
                write()
            if not place and not options.no_controls:
                controls = show_controls(Path(python))
                write()
    return int(any(wrong(row, readme) for row in rows))


def wrong(row: dict[str, Any], readme: str) -> bool:
    """Return whether a row has a digest that it should not have."""
    return row["digits"] not in ("", readme) or bool(row["differ"] and not row["explained"])


if __name__ == "__main__":
    sys.exit(main())
