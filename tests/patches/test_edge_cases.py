"""Edge cases of the patched ops: the original's answer, values and errors alike.

``benchmarks/check_edge_cases.py`` runs all of them, also by the Triton kernels; every seventh runs
here. The kinds are those of a review of the replacements: each of 12 dtypes, empty and 0-d tensors,
negative and out-of-range indices, indices of another length, shape and dtype, broadcast, strided,
expanded and overlapping tensors, channels_last, ``out=``, shared memory, infinities, NaN and -0.0.
"""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from lightning_d9m.control.torch_flags import threads_pinned

FOLDER = Path(__file__).parents[2] / "benchmarks"
EVERY = 7


@pytest.fixture(scope="module")
def modules():
    """Return the module of cases, the one that runs them, and all cases."""
    sys.path.insert(0, str(FOLDER))
    try:
        cases, check = map(importlib.import_module, ("edge_cases", "check_edge_cases"))
        yield cases, check, cases.list_cases()
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("edge_cases", "check_edge_cases"):
            sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_answers_are_the_originals(modules):
    _, check, cases = modules
    with threads_pinned(1):
        found = [(case.op, case.edge, check.find_difference(case)) for case in cases[::EVERY]]
    assert [one for one in found if one[2]] == []
    assert len({op for op, _, _ in found}) > 50


def test_a_difference_is_found(modules):
    """Of values, dtype, shape, strides and errors."""
    module, check, _ = modules

    def alternate(*answers):
        turns = iter(answers * 2)

        def call():
            turn = next(turns)
            if isinstance(turn, Exception):
                raise turn
            return turn

        return check.find_difference(module.EdgeCase("op", "edge", call))

    one = torch.ones(2, 3)
    for other in (one + 1e-4, one.double(), one[:1], one.t().contiguous().t(), RuntimeError("no")):
        assert alternate(one, other)
        assert alternate(other, one)
        assert alternate(other, other) is None
    assert alternate(RuntimeError("no"), RuntimeError("yes"))


def test_the_results_are_those_of_the_cases(modules):
    """As many of each kind as there are now, by torch ops and by kernels, without a difference."""
    record = json.loads((FOLDER / "results" / "edge-cases.json").read_text())
    if record["torch"] != torch.__version__:
        pytest.skip("another torch has other operations and dtypes")
    *_, cases = modules
    assert record["cases_by_edge"] == Counter(case.edge for case in cases)
    assert record["cases"] == len(cases)
    assert record["differences"] == []
    assert set(record["cases_by_kernel"]) == {"sums:accumulate", "taps:apply"}
