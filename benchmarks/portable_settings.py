"""Run the cases of portable bits and the digits example under many settings of one machine.

    python benchmarks/portable_settings.py [--python PATH ...] [-o FILE]

Each interpreter, which may have another version of torch, runs tests/support/portable_cases.py
under each setting. The digests must be those of portable_digests.json. One epoch of
examples/digits.py must end with the README's digest.
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

ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests" / "support"
SETTINGS = {
    "as the machine is": {},
    "AVX2, two threads": {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"},
    "no vectors, two threads, MKL and oneDNN with SSE4": {
        "ATEN_CPU_CAPABILITY": "default",
        "OMP_NUM_THREADS": "2",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}
READ = """
import sys
from lightning_d9m import read_ledger
print(read_ledger(sys.argv[1]).outcome(0).final.totals["weights"][:16])
"""


def run(python: str, setting: dict[str, str], *arguments: object) -> str:
    """Run an interpreter under a setting, and return what it prints."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **setting, "PYTHONPATH": str(ROOT)}
    command = [python, "-W", "ignore", *map(str, arguments)]
    return subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, check=True
    ).stdout


def train_digits(python: str, setting: dict[str, str]) -> str:
    """Return the digest of the weights after one epoch of the digits example."""
    with tempfile.TemporaryDirectory() as folder:
        switches = {"LIGHTNING_D9M": "1", "LIGHTNING_D9M_PORTABLE": "1"}
        switches["LIGHTNING_D9M_LEDGER_DIR"] = folder
        run(python, setting | switches, ROOT / "examples" / "digits.py", "--epochs", 1)
        return run(python, {}, "-c", READ, Path(folder, "fit-000")).strip()


def main() -> None:
    """Run, and write one row for each interpreter and setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="*", default=[sys.executable])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    expected = json.loads((SUPPORT / "portable_digests.json").read_text())
    (readme,) = re.findall(r"portable digest is (\w{16})", (ROOT / "README.md").read_text())
    lines = [
        f"# Portable bits under settings, {time.strftime('%d %B %Y')}",
        "",
        "| torch | setting | cases equal | digits |",
        "| --- | --- | --- | --- |",
    ]
    for python in arguments.python:
        version = run(python, {}, "-c", "import torch; print(torch.__version__)").strip()
        for name, setting in SETTINGS.items():
            found = json.loads(run(python, setting, SUPPORT / "portable_cases.py"))
            differ = [case for case in expected if found.get(case) != expected[case]]
            equal = f"{len(expected) - len(differ)} of {len(expected)}"
            equal += f" (not {', '.join(differ)})" if differ else ""
            # LIGHTNING_D9M=1 has no effect with torch 2.4.
            old = version.startswith("2.4.")
            digits = "not run" if old else train_digits(python, setting)
            digits = "equal" if digits == readme else digits
            lines.append(f"| {version} | {name} | {equal} | {digits} |")
            print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
