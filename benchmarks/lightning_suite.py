"""Run Lightning's own tests without and with ``LIGHTNING_D9M=1``, and list those that break.

    python benchmarks/lightning_suite.py CHECKOUT [--output FILE] [PYTEST ARGUMENT ...]

CHECKOUT is a clone of Lightning's repository at the release that is installed, or a close one. Its
``tests/tests_pytorch`` run against the installed package; without further arguments, all of them.
The environment needs what those tests use, above all pytest-rerunfailures. A test that fails in
both runs, say because an optional package is missing, is not listed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree as ET

RESULTS = Path(__file__).parent / "results"
# Plugins of this environment that Lightning's tests do not expect.
_WITHOUT = ("-p", "no:randomly", "-p", "no:cacheprovider", "--timeout", "300")


def run_suite(checkout: Path, arguments: list[str], variables: dict[str, str]) -> dict[str, str]:
    """Run the tests; return "" for each test that passed, else the first line of its failure."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("LIGHTNING_D9M")}
    paths = os.pathsep.join(filter(None, [str(checkout / "tests"), kept.get("PYTHONPATH", "")]))
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", *_WITHOUT, f"--junitxml={report}"]
        # Some tests write into the folder in which they run.
        done = subprocess.run(
            [*command, f"--rootdir={checkout / 'tests/tests_pytorch'}", *arguments],
            cwd=checkout / "tests" / "tests_pytorch",
            env=environment,
            check=False,
        )
        if not report.exists():
            sys.exit(f"pytest ended with status {done.returncode} and left no report.")
        cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - pytest wrote it just now
        return {
            f"{case.get('classname')}::{case.get('name')}": read_outcome(case) for case in cases
        }


def read_outcome(case: ET.Element) -> str:
    """Return "" for a test that passed, else what its report says."""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            first = (child.get("message") or child.text or "").strip().splitlines()[:1]
            return f"{child.tag}: {''.join(first)[:300]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS / "lightning-suite.json")
    options, arguments = parser.parse_known_args()
    checkout = options.checkout.resolve()
    plain = run_suite(checkout, arguments, {})
    determined = run_suite(checkout, arguments, {"LIGHTNING_D9M": "1"})
    passed = sorted(name for name, outcome in plain.items() if not outcome)
    broken = {name: determined.get(name, "missing") for name in passed if determined.get(name, "?")}
    result = {
        "versions": {name: version(name) for name in ("lightning", "torch", "lightning-d9m")},
        "passed_without": len(passed),
        "broken": broken,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, outcome in broken.items():
        print(f"{name}\n    {outcome}")
    print(f"{len(passed)} tests pass without LIGHTNING_D9M=1; {len(broken)} of them break with it.")


if __name__ == "__main__":
    main()
