"""A plugin of pytest: each test's result is a row of the journal in ``SUITE_ROWS`` at once.

Tests that a previous process has run are left out, so that one that was cut off is continued.
"""

import os
from pathlib import Path

import pytest
from suite_journal import Journal

JOURNAL = Journal(Path(os.environ["SUITE_ROWS"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has run."""
    ended = [item for item in items if JOURNAL.has_ended("tests", item.nodeid)]
    config.hook.pytest_deselected(items=ended)
    items[:] = [item for item in items if item not in ended]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins."""
    JOURNAL.begin("tests", nodeid)


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
    """Count failures as rows, and it as a success if all tests have run before."""
    if exitstatus in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.OK
