"""Edge cases of the patched ops: torch's answer, values and errors alike, by nothing that varies.

One case of each kind runs here. ``benchmarks/check_edge_cases.py`` runs all, by the Triton kernels,
too; its result is checked here. The kinds are: each of 12 dtypes, empty and 0-d tensors, negative
and out-of-range indices, indices of another length, shape and dtype, broadcast, strided, expanded
and overlapping tensors, channels_last, ``out=``, shared memory, infinities, NaN and -0.0, and every
kind of argument that torch refuses.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from patches.construction import Judge, judged

from lightning_d9m.control.environment import threads_pinned
from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.registration import patches_applied

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "edge-cases.json"
REPLACED = select_ops(torch.__version__)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_answers_are_torchs_by_ops_that_are_deterministic_on_cuda(kinds, check, monkeypatch):
    """No replacement calls an op that may vary, on none of its paths."""
    with threads_pinned(1), judged(REPLACED, monkeypatch) as (judge, ran):
        differences = check.find_differences(kinds)
        with patches_applied("CPU"):
            torch.ops.aten.cudnn_grid_sampler_backward(
                torch.randn(2, 3, 5, 6), torch.randn(2, 4, 7, 2), torch.randn(2, 3, 4, 7)
            )
    assert [one for one in zip(kinds, differences, strict=True) if one[1]] == []
    assert len({case.op for case in kinds}) > 50
    assert judge.refused == set()
    assert ran == {path for op in REPLACED for path in op.kernels.values()}


def test_a_difference_is_found(edge_cases, check):
    """Of values, dtype, shape, strides and errors."""

    def alternate(*answers):
        turns = iter(answers * 2)

        def call():
            turn = next(turns)
            if isinstance(turn, Exception):
                raise turn
            return turn

        return check.find_differences([edge_cases.EdgeCase("op", "edge", call)])[0]

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


DUPLICATES = torch.tensor([1, 1, 0])
VARYING: dict[str, Callable[[], object]] = {
    "index_add": lambda: torch.zeros(2).index_add_(0, DUPLICATES, torch.ones(3)),
    "scatter_add": lambda: torch.zeros(2).scatter_add(0, DUPLICATES, torch.ones(3)),
    "scatter": lambda: torch.zeros(2).scatter_(0, DUPLICATES, torch.ones(3)),
    "put": lambda: torch.zeros(2).put_(DUPLICATES, torch.ones(3)),
    "index_put": lambda: torch.zeros(2).index_put_((DUPLICATES,), torch.arange(3.0)),
    "cumsum": lambda: torch.ones(3).cumsum(0),
    "cumprod": lambda: torch.ones(3).cumprod(0),
    "logcumsumexp": lambda: torch.ones(1, 3).logcumsumexp(1),
    "sort": lambda: torch.ones(3).sort(),
    "median": lambda: torch.ones(2, 2).median(0),
    "histc": lambda: torch.ones(3).histc(2),
    "bincount": lambda: DUPLICATES.bincount(torch.ones(3)),
    "product": lambda: torch.zeros(2).scatter_reduce(0, DUPLICATES, torch.ones(3), "prod"),
    "maximum": lambda: torch.zeros(2).scatter_reduce_(0, DUPLICATES, -torch.zeros(3), "amax"),
    "matmul": lambda: torch.ones(2, 2) @ torch.ones(2, 2),
}


@pytest.mark.parametrize("call", VARYING.values(), ids=VARYING)
def test_what_varies_on_cuda_is_refused(call: Callable[[], object]) -> None:
    """The first test can fail: by each op that it is to keep out, also in place and by its name."""
    with Judge() as judge:
        call()
    assert judge.refused
