"""Modules of ``benchmarks/`` that tests share."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def check():
    """Return the module that runs edge cases."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("check_edge_cases")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("edge_cases", "check_edge_cases"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def edge_cases(check):
    """Return the module of cases."""
    return sys.modules["edge_cases"]


@pytest.fixture
def kinds(edge_cases):
    """Return one case of each op and edge; ``benchmarks/check_edge_cases.py`` runs all.

    They are new for each test: a case may resize the tensor that it gives as ``out=``.
    """
    cases = reversed(edge_cases.list_cases())  # the first one of each kind stays
    return [*{(case.op, case.edge): case for case in cases}.values()]
