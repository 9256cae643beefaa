"""Run Lightning's own tests with ``LIGHTNING_D9M=1``, and list those that break because of it.

    python benchmarks/libraries/lightning_suite.py CHECKOUT [--files FILE ...] [--partitions N]
                                         [--jobs N] [--work FOLDER] [--output FILE]

CHECKOUT is a clone of Lightning's repository at the release that is installed, or a close one. Its
``tests/tests_pytorch`` run against the installed package. The environment needs what those tests
use, above all pytest-rerunfailures. Whole files run: each partition shuffles them by its number and
gives every twelve to one process, of which ``--jobs`` run at once. No test gets a second try. Files
in which tests fail run again without the variable; a test breaks if it passes there. ``UNFAIR``
gives the reasons of those that test what determinism must change; the exit status is 1 if any other
breaks. FOLDER keeps the outcomes of each group, and a group that is there does not run again.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

RESULTS = Path(__file__).parents[1] / "results"
MODES: dict[str, dict[str, str]] = {"without": {}, "with": {"LIGHTNING_D9M": "1"}}
# Without plugins that Lightning's tests do not expect, and without the tests of files of old
# releases, which the repository does not hold.
_WITHOUT = ("-p", "no:randomly", "-p", "no:cacheprovider", "--color", "no", "--timeout", "300")
_WITHOUT += ("-k", "not legacy", "--continue-on-collection-errors")
_FILES = 12  # of one process

# Tests of what determinism must change, by pattern of their names, with the reasons.
UNFAIR = {
    "callbacks.test_timer::test_timer_resume_training": (
        "resumes a fit that a Timer ended within an epoch, if 200 ms do not suffice for the epoch"
    ),
    "callbacks.test_stochastic_weight_avg::test_swa_resume_training_from_checkpoint*": (
        "expects that counts of a callback begin again after a resume, which restores them"
    ),
    "core.test_metric_result_integration::test_result_collection_reload*": "resumes within a batch",
    "loops.optimization.test_automatic_loop::test_skip_training_step_not_allowed*": (
        "sets the world size to 2 in a single process, in which no second rank can be compared"
    ),
    "loops.test_loops::test_fit_loop_save_and_restore_dataloaders*": (
        "expects that a list of the module is empty after a resume, which restores what the fit "
        "had put there; or resumes in an epoch of an iterable that does not save its position"
    ),
    "*test_resume_mid_epoch_warning": "resumes within an epoch of an iterable without a position",
    "loops.test_training_loop::test_training_starts_with_seed[[]False]": (
        "expects two fits of one process to draw the same numbers; each draws its own"
    ),
    **dict.fromkeys(
        (
            "callbacks.test_callbacks::test_callbacks_configured_in_model",
            "models.test_hooks::test_trainer_model_hook_system_fit_no_val_and_resume_max_*",
            "*test_manual_optimization::test_step_with_optimizer_closure_with_different_frequencies",
        ),
        "compares the list of all calls; a resumable fit asks for the state once more",
    ),
    "loops.test_double_iter_in_iterable_dataset::test_resume_training_with": (
        "resumes a training on what another process puts into a queue"
    ),
    "models.test_restore::test_restarting_mid_epoch_raises_warning*": "resumes within a batch",
    "*test_callback_connector::test_checkpoint_callbacks_are_last": "compares a list of callbacks",
    "*test_callback_connector::test_attach_model_callbacks": "compares a list of callbacks",
    "*test_hpc_restore_attempt": "lists all files, and the ledger is one",
    "*test_replace_distributed_sampler[[]2]": "compares the class of a sampler, which is wrapped",
    "trainer.test_trainer::test_fit_ckpt_path_epoch_restored*": (
        "expects that counts of the module begin again after a resume, which restores them"
    ),
    "tuner.test_lr_finder::test_multiple_lr_find_calls_gives_same_results": (
        "expects that the loss does not diverge within ten steps; whether it does depends on the "
        "random numbers, which a fit draws by its seed and its number in the process"
    ),
    **dict.fromkeys(
        (
            "tuner.test_lr_finder::test_call_to_trainer_method*",
            "tuner.test_lr_finder::test_exponential_vs_linear_mode_gradient_difference",
            "tuner.test_lr_finder::test_suggestion_*",
            "tuner.test_lr_finder::test_trainer_arg_str*",
            "tuner.test_lr_finder::test_tuner_lr_find*",
        ),
        "expects that the loss does not diverge within a few steps; without the variable that "
        "depends on the seed, too (results/lightning-lr-finder.md)",
    ),
    "*test_migration::test_migrate_loop_batches_that_stepped*": (
        "edits a checkpoint, and the digests in the checkpoint reveal it"
    ),
}


def list_groups(files: list[str], partition: int) -> list[list[str]]:
    """Return the files of each process of a partition."""
    shuffled = random.Random(partition).sample(sorted(files), len(files))  # noqa: S311 - an order
    return [shuffled[at : at + _FILES] for at in range(0, len(shuffled), _FILES)]


def run_tests(tests: Path, mode: str, arguments: list[str]) -> dict[str, str] | None:
    """Run tests in one process; return their outcomes, None if the process crashed."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("LIGHTNING_D9M")}
    folders = [str(tests.parent), kept.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, folders))
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


def list_failing(files: list[str], outcomes: dict[str, str] | None) -> list[str]:
    """Return the files in which tests failed, in order; all, if the process crashed."""
    if outcomes is None:
        return files
    failed = [name for name, outcome in outcomes.items() if is_failure(outcome)]
    modules = {file: file.removesuffix(".py").replace("/", ".") for file in files}
    return [
        file
        for file, module in modules.items()
        if any(name.startswith((f"{module}.", f"{module}::")) for name in failed)
    ]


def run_group(tests: Path, work: Path, name: str, files: list[str]) -> dict[str, Any]:
    """Return the outcomes of a group by mode; run it if it has not run."""
    kept = work / f"{name}.json"
    if not kept.exists():
        found = {"with": run_tests(tests, "with", files)}
        again = list_failing(files, found["with"])
        if again:
            found["without"] = run_tests(tests, "without", again)
        kept.write_text(json.dumps(found, indent=1) + "\n")
    return cast(dict[str, Any], json.loads(kept.read_text()))


def count_partition(
    tests: Path, work: Path, files: list[str], partition: int, jobs: int
) -> dict[str, Any]:
    """Run a partition; return how many tests pass, and those that break with their outcomes."""
    passed, broken, crashed = 0, dict[str, str](), list[list[str]]()
    groups = list_groups(files, partition)

    def run_one(number: int) -> dict[str, Any]:
        return run_group(tests, work, f"{partition}-{number:02d}", groups[number])

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(run_one, range(len(groups))))
    for group, outcomes in zip(groups, found, strict=True):
        plain = outcomes.get("without") or {}
        if outcomes["with"] is None:
            crashed.append(group)
            continue
        passed += sum(not outcome for outcome in outcomes["with"].values())
        broken |= {
            name: outcome
            for name, outcome in outcomes["with"].items()
            if is_failure(outcome) and plain.get(name) == ""
        }
    return {"passed": passed, "broken": broken, "crashed": crashed}


def find_reason(name: str) -> str | None:
    """Return why a test is unfair, or None if no reason is known."""
    return next((why for pattern, why in UNFAIR.items() if fnmatchcase(name, pattern)), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--files", nargs="*", help="below tests_pytorch; default: all")
    parser.add_argument("--partitions", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes that run at once")
    parser.add_argument("--work", type=Path, help="default: a temporary folder")
    parser.add_argument("--output", type=Path, default=RESULTS / "lightning-suite.json")
    options = parser.parse_args()
    tests = options.checkout.resolve() / "tests" / "tests_pytorch"
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    every = [str(path.relative_to(tests)) for path in tests.rglob("test_*.py")]
    files = options.files or every
    counted = [
        count_partition(tests, work, files, n + 1, options.jobs) for n in range(options.partitions)
    ]
    names = sorted({name for found in counted for name in found["broken"]})
    broken = {}
    for name in names:
        outcomes = [found["broken"].get(name, "") for found in counted]
        broken[name] = {"outcomes": outcomes, "reason": find_reason(name)}
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            **{name: version(name) for name in ("lightning", "torch", "lightning-d9m", "pytest")},
            "python": sys.version.split()[0],
        },
        "files": len(files),
        "passed": [found["passed"] for found in counted],
        "broken": broken,
        "crashed": [found["crashed"] for found in counted],
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, entry in broken.items():
        print(f"{name}\n    {entry['outcomes']}\n    {entry['reason'] or 'NO REASON'}")
    for found in counted:
        print(f"{found['passed']} tests pass with LIGHTNING_D9M=1, {len(found['broken'])} do not.")
    unfair = all(entry["reason"] for entry in broken.values())
    return int(not unfair or any(found["crashed"] for found in counted))


if __name__ == "__main__":
    sys.exit(main())
