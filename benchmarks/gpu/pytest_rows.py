"""A plugin of pytest: each test's result is a row of the journal in ``SUITE_ROWS`` at once.

Tests that a previous call has run are left out, so that a call that was cut off is continued.
"""

import os
from pathlib import Path

import pytest
from suite_client import Journal, lacks

JOURNAL = Journal(Path(os.environ["SUITE_ROWS"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has run."""
    finished = {row["task"] for row in JOURNAL.of_part("tests") if not lacks(row)}
    left = [item for item in items if item.nodeid not in finished]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in finished])
    items[:] = left


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of a test: of its call, or of what failed or was skipped before it."""
    if report.when != "call" and report.passed:
        return
    row = {"part": "tests", "task": report.nodeid, "outcome": report.outcome}
    row |= {"seconds": round(report.duration, 3), **dict(report.user_properties)}
    if report.failed:
        said = report.longreprtext[-2000:]
        row["error"] = str(getattr(report.longrepr, "reprcrash", said)).strip().rpartition("\n")[2]
        row["said"] = said
    JOURNAL.append(row)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Count it as a success if all tests have run before."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
