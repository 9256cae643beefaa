"""Deterministic by construction: no replacement calls what varies on CUDA."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import GRADIENT_CASES, compute_gradient, make_inputs
from patches.construction import Judge, judged

from lightning_d9m.patches.catalog.catalog import OPS, select_ops
from lightning_d9m.patches.registration import patches_applied

OFFERED = [op.name for op in OPS if op.status == "offered"]
REPLACED = select_ops(torch.__version__, include=OFFERED)
LEGACY = "ignore:(index_reduce.* is in beta|The reduce argument of torch.scatter)"

FLOATS, WHERE = torch.randn(40, 6), torch.randint(0, 5, (40, 6))
ROWS, COLUMN = torch.randn(5, 6), WHERE[:, 0]
IMAGE, PIXELS = torch.randn(2, 5, 4, 3).log_softmax(1), torch.randint(0, 5, (2, 4, 3))
LONG = torch.randn(1000)


def sample(dims: int) -> object:
    """Differentiate a sampling by its input and its grid."""
    image = torch.randn(2, 3, *(5, 6, 4)[:dims], requires_grad=True)
    grid = torch.randn(2, *(4, 7, 3)[:dims], dims, requires_grad=True)
    return [
        torch.autograd.grad(
            nnf.grid_sample(image, grid, mode, padding, align_corners=False).sum(), (image, grid)
        )
        for mode in ("bilinear", "nearest", *(["bicubic"] if dims == 2 else []))
        for padding in ("zeros", "border", "reflection")
    ]


def align(infinity: bool) -> object:
    """Differentiate an alignment loss; targets padded and concatenated."""
    scores = torch.randn(9, 2, 5).log_softmax(2).requires_grad_()
    losses = [
        nnf.ctc_loss(scores, torch.tensor([[1, 2, 2], [3, 4, 0]]), [9, 7], [3, 2]),
        nnf.ctc_loss(scores, torch.tensor([1, 2, 2, 3, 4]), [9, 7], [3, 2], zero_infinity=infinity),
    ]
    return torch.autograd.grad(losses, scores)


def embed(mode: str) -> object:
    """Differentiate a lookup by its table."""
    table = torch.randn(5, 3, requires_grad=True)
    if mode == "one":
        return torch.autograd.grad(nnf.embedding(COLUMN, table, 2).sum(), table)
    bags = nnf.embedding_bag(COLUMN.view(8, 5), table, mode=mode)
    return torch.autograd.grad(bags.sum(), table)


CALLS: dict[str, Callable[[], object]] = {
    "losses": lambda: [
        nnf.nll_loss(IMAGE.to(dtype), PIXELS, weight, reduction=reduction)
        for dtype in (torch.float32, torch.bfloat16)
        for weight in (None, torch.rand(5, dtype=dtype))
        for reduction in ("mean", "sum")
    ],
    "alignment": lambda: [align(infinity) for infinity in (True, False)],
    "bags": lambda: embed("max"),
    "embedding": lambda: embed("one"),
    "put_": lambda: [
        target.put_(COLUMN, LONG[:40], accumulate)
        for target in (torch.zeros(5, 6), torch.zeros(6, 5).t())
        for accumulate in (True, False)
    ],
    "max_unpool2d": lambda: torch._C._nn.max_unpool2d(
        FLOATS.view(2, 6, 4, 5), WHERE.view(2, 6, 4, 5), [3, 4]
    ),
    "max_unpool3d": lambda: torch._C._nn.max_unpool3d(
        FLOATS.view(6, 2, 4, 5), WHERE.view(6, 2, 4, 5), [3, 4, 5], [2] * 3, [0] * 3
    ),
    "histc": lambda: [torch.histc(LONG), torch.histc(LONG.double(), 7, -1, 1)],
    "bincount": lambda: (
        [
            torch.bincount(COLUMN, weights)
            for weights in (LONG[:40], LONG[:40].half(), LONG[:40] > 0, COLUMN)
        ]
        + [torch.bincount(COLUMN.repeat(20), LONG[:800], minlength=9)]
    ),  # long runs
    "order": lambda: [
        getattr(torch, name)(values, *arguments)
        for values in (FLOATS, WHERE)
        for name, *arguments in (
            ("median", 1),
            ("nanmedian", 0),
        )
    ],
    "scans": lambda: [
        scan(values, dim)
        for scan in (torch.cumprod, torch.logcumsumexp)
        for values, dim in ((LONG, 0), (LONG[:, None], -2), (FLOATS, 1))
    ],
    "scatter_reduce": lambda: (
        [
            ROWS.to(dtype).scatter_reduce(0, WHERE, FLOATS.to(dtype), "prod", include_self=kept)
            for dtype in (torch.float32, torch.half, torch.int64)
            for kept in (True, False)
        ]
        + [ROWS.clone().scatter_reduce_(0, WHERE, FLOATS, "prod")]
    ),
    "scatter": lambda: [
        getattr(torch.zeros(5, 6), name)(0, WHERE, FLOATS, reduce=reduce)
        for name in ("scatter", "scatter_")
        for reduce in ("add", "multiply")
    ],
    "index_reduce": lambda: [
        getattr(ROWS.to(dtype), name)(0, COLUMN, FLOATS.to(dtype), reduce, include_self=kept)
        for name in ("index_reduce", "index_reduce_")
        for dtype in (torch.float32, torch.half, torch.int64)
        for reduce in ("prod", "mean", "amax", "amin")
        for kept in (True, False)
    ],
    "additions": lambda: [
        *(getattr(ROWS.clone(), f"index_add{mark}")(0, COLUMN, FLOATS) for mark in ("", "_")),
        *(getattr(ROWS.clone(), f"scatter_add{mark}")(0, WHERE, FLOATS) for mark in ("", "_")),
        ROWS.index_put((COLUMN, WHERE[:, 1]), LONG[:40], accumulate=True),
    ],
    "sampling": lambda: [sample(dims) for dims in (2, 3)],
    "sampling-cudnn": lambda: torch.ops.aten.cudnn_grid_sampler_backward(
        torch.randn(2, 3, 5, 6), torch.randn(2, 4, 7, 2), torch.randn(2, 3, 4, 7)
    ),
    **{
        f"{case.label}-{dtype}": lambda case=case, dtype=dtype: compute_gradient(
            case, *(part.to(dtype) for part in make_inputs(case)), patched=False
        )
        for case in GRADIENT_CASES
        for dtype in (torch.float32, torch.float64)
    },
}


@pytest.mark.filterwarnings(LEGACY)
def test_only_what_is_deterministic_on_cuda_is_called(monkeypatch) -> None:
    """Every replacement runs, on none of its paths through an op that is not known to be."""
    with judged(REPLACED, monkeypatch) as (judge, ran), patches_applied("CPU", include=OFFERED):
        for label, call in CALLS.items():
            call()
            assert judge.refused == set(), label
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
    "maximum": lambda: torch.zeros(2).scatter_reduce_(0, DUPLICATES, torch.ones(3), "amax"),
    "matmul": lambda: torch.ones(2, 2) @ torch.ones(2, 2),
}


@pytest.mark.parametrize("call", VARYING.values(), ids=VARYING)
def test_what_varies_on_cuda_is_refused(call: Callable[[], object]) -> None:
    """The test above can fail: by each op that it is to keep out, also in place and by its name."""
    with Judge() as judge:
        call()
    assert judge.refused
