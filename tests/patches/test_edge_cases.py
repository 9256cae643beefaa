"""Edge cases of the patched ops: the original's answer, values and errors alike.

One case of each kind runs here. ``benchmarks/check_edge_cases.py`` runs all, by the Triton kernels,
too; its result is checked here. The kinds are: each of 12 dtypes, empty and 0-d tensors, negative
and out-of-range indices, indices of another length, shape and dtype, broadcast, strided, expanded
and overlapping tensors, channels_last, ``out=``, shared memory, infinities, NaN and -0.0, and every
kind of argument that torch refuses.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from lightning_d9m.control.torch_flags import threads_pinned

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "edge-cases.json"
PARTS = 4


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_answers_are_the_originals(kinds, check, part):
    with threads_pinned(1):
        found = [(case.op, case.edge, check.find_difference(case)) for case in kinds[part::PARTS]]
    assert [one for one in found if one[2]] == []
    assert len({op for op, _, _ in found}) > 50


def test_a_difference_is_found(edge_cases, check):
    """Of values, dtype, shape, strides and errors."""

    def alternate(*answers):
        turns = iter(answers * 2)

        def call():
            turn = next(turns)
            if isinstance(turn, Exception):
                raise turn
            return turn

        return check.find_difference(edge_cases.EdgeCase("op", "edge", call))

    one = torch.ones(2, 3)
    for other in (one + 1e-4, one.double(), one[:1], one.t().contiguous().t(), RuntimeError("no")):
        assert alternate(one, other)
        assert alternate(other, one)
        assert alternate(other, other) is None
    assert alternate(RuntimeError("no"), RuntimeError("yes"))


def test_the_results_are_those_of_the_cases(edge_cases):
    """As many of each kind as there are now, by torch ops and by kernels, without a difference."""
    record = json.loads(RESULTS.read_text())
    if record["torch"] != torch.__version__:
        pytest.skip("another torch has other operations and dtypes")
    cases = edge_cases.list_cases()
    assert record["cases_by_edge"] == Counter(case.edge for case in cases)
    assert record["cases"] == len(cases)
    assert record["differences"] == []
    assert set(record["cases_by_kernel"]) == {"kernels:accumulate", "kernels:add_taps"}
