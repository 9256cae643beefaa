"""A plugin of pytest: each test's result is a line of the file in ``SUITE_ROWS`` at once.

Tests that a previous call has run are left out, so that a call that was cut off is continued.
"""

import json
import os
from pathlib import Path

import pytest

PATH = Path(os.environ["SUITE_ROWS"])


def read_finished() -> set[str]:
    """Return the ids of the tests that have a result."""
    if not PATH.exists():
        return set()
    lines = PATH.read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["test"] for line in lines if line.endswith("}")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has run."""
    finished = read_finished()
    left = [item for item in items if item.nodeid not in finished]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in finished])
    items[:] = left


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of a test: of its call, or of what failed or was skipped before it."""
    if report.when != "call" and report.passed:
        return
    row = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 3),
        **dict(report.user_properties),
    }
    if report.failed:
        row["error"] = report.longreprtext[-2000:]
    with PATH.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Count it as a success if all tests have run before."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
