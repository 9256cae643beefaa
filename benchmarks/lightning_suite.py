"""Run Lightning's own tests with ``LIGHTNING_D9M=1``, and list those that break because of it.

    python benchmarks/lightning_suite.py CHECKOUT [--parts PART ...] [--work FOLDER] [--output FILE]
                                         [--again]

CHECKOUT is a clone of Lightning's repository at the release that is installed, or a close one. Its
``tests/tests_pytorch`` run against the installed package, one process for each PART (a folder or a
file there; by default all of them). The environment needs what those tests use, above all
pytest-rerunfailures. Tests of a part that do not pass run once more in two processes without the
others, with the variable and without it. A test breaks if it passes without it only;
"passed_again" lists those that pass with it then. ``UNFAIR`` gives the reasons of those that test
what determinism must change; the exit status is 1 if any other breaks. FOLDER keeps the outcomes
of each part, and a part that is there does not run again. With ``--again`` the output is that of an
earlier run, and only its broken tests in the parts are judged again; "again" says which parts ran.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

RESULTS = Path(__file__).parent / "results"
MODES: dict[str, dict[str, str]] = {"without": {}, "with": {"LIGHTNING_D9M": "1"}}
# Without plugins that Lightning's tests do not expect, and without the tests of files of old
# releases, which the repository does not hold.
_WITHOUT = ("-p", "no:randomly", "-p", "no:cacheprovider", "--color", "no", "--timeout", "300")
_WITHOUT += ("-k", "not legacy")

# Tests of what determinism must change, by pattern of their names, with the reasons.
UNFAIR = {
    "callbacks.test_timer::test_timer_resume_training": (
        "resumes a fit that a Timer ended within an epoch, if 200 ms do not suffice for the epoch"
    ),
    "core.test_metric_result_integration::test_result_collection_reload*": "resumes within a batch",
    "loops.optimization.test_automatic_loop::test_skip_training_step_not_allowed*": (
        "sets the world size to 2 in a single process, in which no second rank can be compared"
    ),
    "loops.test_loops::test_fit_loop_save_and_restore_dataloaders*": (
        "resumes within an epoch of an iterable that does not save its position"
    ),
    "loops.test_training_epoch_loop::test_resume_mid_epoch_warning": (
        "resumes within an epoch of an iterable that does not save its position"
    ),
    "loops.test_training_loop::test_training_starts_with_seed[[]False]": (
        "expects two fits of one process to draw the same numbers; each draws its own"
    ),
    "models.test_restore::test_restarting_mid_epoch_raises_warning*": "resumes within a batch",
    "*test_callback_connector::test_checkpoint_callbacks_are_last": "compares a list of callbacks",
    "*test_callback_connector::test_attach_model_callbacks": "compares a list of callbacks",
    "*test_checkpoint_connector::test_hpc_restore_attempt": (
        "compares the list of all files in the default_root_dir, which holds the ledger too"
    ),
    "*test_data_connector::test_replace_distributed_sampler[[]2]": (
        "compares the class of the batch sampler, which is wrapped so that a run can be resumed"
    ),
    "tuner.test_lr_finder::test_multiple_lr_find_calls_gives_same_results": (
        "expects that the loss does not diverge within ten steps; whether it does depends on the "
        "random numbers, which a fit draws by its seed and its number in the process"
    ),
    "*test_migration::test_migrate_loop_batches_that_stepped*": (
        "edits a checkpoint, and the digests in the checkpoint reveal it"
    ),
}


def list_parts(tests: Path) -> list[str]:
    """Return the folders and files of the tests, by name."""
    return sorted(
        path.name
        for path in tests.iterdir()
        if path.match("test_*.py") or (path.is_dir() and any(path.rglob("test_*.py")))
    )


def run_tests(tests: Path, mode: str, arguments: list[str]) -> dict[str, str] | None:
    """Run tests in one process; return their outcomes, None if the process crashed."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("LIGHTNING_D9M")}
    paths = os.pathsep.join(filter(None, [str(tests.parent), kept.get("PYTHONPATH", "")]))
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **MODES[mode]}
    with tempfile.TemporaryDirectory() as folder:
        environment["XDG_STATE_HOME"] = folder  # ledgers of Trainers that write no files
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", *_WITHOUT, f"--junitxml={report}"]
        # Some tests write into the folder in which they run.
        done = subprocess.run(
            [*command, f"--rootdir={tests}", *arguments], cwd=tests, env=environment, check=False
        )
        if not report.exists():
            print(f"pytest ended with status {done.returncode} and left no report.")
            return None
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


def is_failure(outcome: str) -> bool:
    """Return whether a test neither passed nor was skipped."""
    return bool(outcome) and not outcome.startswith("skipped")


def run_once(tests: Path, part: str, work: Path) -> dict[str, str] | None:
    """Return the outcomes of a part with the variable; run it if it has not run."""
    kept = work / f"{part.replace('/', '.')}.json"
    if not kept.exists():
        kept.write_text(json.dumps(run_tests(tests, "with", [part]), indent=1) + "\n")
    return cast(dict[str, str] | None, json.loads(kept.read_text()))


def name_node(tests: Path, name: str) -> str:
    """Return the name that pytest takes for a test of a report."""
    path, _, test = name.partition("::")
    classes: list[str] = []
    names = path.split(".")
    names = names[1:] if names[0] == tests.name else names
    while names and not tests.joinpath(*names).with_suffix(".py").exists():
        classes.insert(0, names.pop())
    return "::".join(["/".join(names) + ".py", *classes, test])


def find_reason(name: str) -> str | None:
    """Return why a test is unfair, or None if no reason is known."""
    return next((why for pattern, why in UNFAIR.items() if fnmatchcase(name, pattern)), None)


def update(earlier: dict[str, Any], result: dict[str, Any], tests: Path) -> dict[str, Any]:
    """Return an earlier result in which the broken tests of some parts are judged again."""
    parts = tuple(f"{part}::" for part in result["parts"])
    before = earlier["broken"]
    kept = {
        name: why for name, why in before.items() if not name_node(tests, name).startswith(parts)
    }
    broken = kept | result["broken"]
    again = {name: result[name] for name in ("date", "versions", "parts", "passed")}
    passed = earlier["passed"] + len(before) - len(broken)
    return {**earlier, "passed": passed, "broken": broken, "again": again}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--parts", nargs="*", help="default: all")
    parser.add_argument("--work", type=Path, help="default: a temporary folder")
    parser.add_argument("--output", type=Path, default=RESULTS / "lightning-suite.json")
    parser.add_argument("--again", action="store_true", help="update an earlier output")
    options = parser.parse_args()
    tests = options.checkout.resolve() / "tests" / "tests_pytorch"
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    passed = 0
    broken: dict[str, str] = {}
    passed_again: list[str] = []
    crashed: list[str] = []
    parts = options.parts or list_parts(tests)
    for part in parts:
        outcomes = run_once(tests, part, work)
        if outcomes is None:
            crashed.append(part)
            continue
        failed = [name for name, outcome in outcomes.items() if is_failure(outcome)]
        passed += sum(not outcome for outcome in outcomes.values())
        if failed:
            nodes = [name_node(tests, name) for name in failed]
            again, plain = (run_tests(tests, mode, nodes) or {} for mode in ("with", "without"))
            passing = [name for name in failed if plain.get(name) == ""]
            broken |= {name: again.get(name, "missing") for name in passing if again.get(name, "?")}
            passed_again += [name for name in passing if again.get(name) == ""]
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            **{name: version(name) for name in ("lightning", "torch", "lightning-d9m", "pytest")},
            "python": sys.version.split()[0],
        },
        "parts": parts,
        "passed": passed + len(passed_again),
        "broken": {
            name: {"outcome": outcome, "reason": find_reason(name)}
            for name, outcome in broken.items()
        },
        "passed_again": passed_again,
        "crashed": crashed,
    }
    if options.again:
        result = update(json.loads(options.output.read_text()), result, tests)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, entry in result["broken"].items():
        print(f"{name}\n    {entry['outcome']}\n    {entry['reason'] or 'NO REASON'}")
    count = len(result["broken"])
    print(f"{result['passed']} tests pass with LIGHTNING_D9M=1, {count} only without it.")
    return int(bool(crashed) or not all(entry["reason"] for entry in result["broken"].values()))


if __name__ == "__main__":
    sys.exit(main())
