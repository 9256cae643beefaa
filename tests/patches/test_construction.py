"""Deterministic by construction: no replacement calls what varies on CUDA."""

from collections.abc import Callable

import pytest
import torch
from patches.construction import Judge, judged

from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.registration import patches_applied

REPLACED = select_ops(torch.__version__)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_only_what_is_deterministic_on_cuda_is_called(monkeypatch, check, kinds) -> None:
    """Every replacement runs each edge case, on none of its paths through an op that may vary."""
    with judged(REPLACED, monkeypatch) as (judge, ran), patches_applied("CPU"):
        for case in kinds:
            check.run(case)
        torch.ops.aten.cudnn_grid_sampler_backward(
            torch.randn(2, 3, 5, 6), torch.randn(2, 4, 7, 2), torch.randn(2, 3, 4, 7)
        )
        assert judge.refused == set()
    assert ran == {path for op in REPLACED for path in op.kernels.values()}


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
    """The test above can fail: by each op that it is to keep out, also in place and by its name."""
    with Judge() as judge:
        call()
    assert judge.refused
