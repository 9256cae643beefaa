"""Patched ops other than the gradients of one input: the answers of the original."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import assert_alike, deterministic_algorithms
from torch import Tensor

from lightning_d9m.errors import D9mError
from lightning_d9m.patches.registration import patches_applied

NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss2d(reduction: str, weighted: bool) -> None:
    """40 terms in another order: 40 roundings at most, of a sum that does not cancel."""
    scores = torch.randn(2, 5, 4, 5).log_softmax(1)
    target = torch.randint(0, 5, (2, 4, 5))
    weight = torch.rand(5) if weighted else None
    for arguments in [{}, {"ignore_index": 2}]:
        assert_alike(
            lambda a=arguments: nnf.nll_loss(scores, target, weight, reduction=reduction, **a),
            tolerance=40,
        )
    assert_alike(
        lambda: torch.autograd.grad(
            nnf.nll_loss(scores.requires_grad_(), target, weight, reduction=reduction).sum(), scores
        )[0]
    )


def test_nll_loss2d_edges() -> None:
    """Empty, all ignored, half, an out variant, and every kind of bad argument."""
    scores, target = torch.randn(2, 5, 4, 3), torch.randint(0, 5, (2, 4, 3))
    assert_alike(lambda: nnf.nll_loss(scores[:0], target[:0]))
    assert_alike(lambda: nnf.nll_loss(scores, target * 0, ignore_index=0))
    assert_alike(lambda: nnf.nll_loss(scores, target + 3))
    assert_alike(lambda: nnf.nll_loss(scores, target - 4))
    assert_alike(lambda: nnf.nll_loss(scores, target, torch.ones(2)))
    assert_alike(lambda: nnf.nll_loss(scores, target.int()))
    assert_alike(lambda: nnf.nll_loss(scores, target[:, :2]))
    with patches_applied("CPU"):
        low = nnf.nll_loss(scores.half(), target)
    reference = nnf.nll_loss(scores.half().double(), target)
    assert abs(low.double() - reference) <= torch.finfo(torch.half).eps * abs(reference)
    op, arguments = torch.ops.aten.nll_loss2d_forward, (scores, target, None, 1, -100)
    assert_alike(
        lambda: op.output(*arguments, output=torch.empty(()), total_weight=torch.empty(())),
        tolerance=24,
    )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64], ids=str
)
def test_put(accumulate: bool, dtype: torch.dtype) -> None:
    """Duplicates and negative positions; strided targets; the functional form."""
    target, source = (torch.randn(*shape).mul(3).to(dtype) for shape in [(4, 5), (3, 7)])
    index = torch.randint(-20, 20, (3, 7))
    # Sums of at most 22 terms are rounded once.
    rounded = accumulate and (dtype.is_floating_point or dtype.is_complex)
    wanted = {"tolerance": 22 if rounded else 0}
    assert_alike(lambda: target.clone().put_(index, source, accumulate), **wanted)
    assert_alike(lambda: target.clone().t().put_(index, source, accumulate), **wanted)
    assert_alike(lambda: target[:, ::2].put(index % 8, source, accumulate), **wanted)


@pytest.mark.parametrize(
    ("target", "index", "source"),
    [
        (torch.zeros(3).expand(2, 3), [0], [1.0]),
        (torch.zeros(3), [5], [1.0]),
        (torch.zeros(3), [-4], [1.0]),
        (torch.zeros(2, 3).t(), [0, 7], [1.0, 2.0]),
        (torch.zeros(2, 3).t(), [0, -7], [1.0, 2.0]),
        (torch.zeros(3), [0, 1], [1.0]),
        (torch.zeros(3), [0], [1]),
        (torch.zeros(0), [0], [1.0]),
        (torch.zeros(()), [0, -1], [1.0, 2.0]),
        (torch.zeros(3), [], []),
    ],
    ids=[
        "overlap",
        "over",
        "under",
        "over-strided",
        "under-strided",
        "counts",
        "dtypes",
        "empty",
        "scalar",
        "nothing",
    ],
)
def test_put_edges(target: Tensor, index: list[int], source: list[float]) -> None:
    """Overlap, out of range, sizes, dtypes, nothing to do."""
    where, values = torch.tensor(index, dtype=torch.int64), torch.tensor(source)
    assert_alike(lambda: target.clone(memory_format=torch.preserve_format).put_(where, values))
    if target.stride() == (0, 1):
        assert_alike(lambda: target.put_(where, values))


def test_max_unpool() -> None:
    """Duplicates: the last wins; batches, none, an empty one; every kind of bad argument."""
    two, three = torch._C._nn.max_unpool2d, torch._C._nn.max_unpool3d
    image, index = torch.randn(2, 3, 4, 5), torch.randint(0, 30, (2, 3, 4, 5))
    assert_alike(lambda: two(image, index, [5, 6]))
    assert_alike(lambda: two(image[0], index[0], [5, 6]))
    assert_alike(lambda: two(image.half(), index, [5, 6]))
    assert_alike(lambda: two(image[:0], index[:0], [5, 6]))
    for bad in [
        (image, index + 1, [5, 6]),
        (image, index - 1, [5, 6]),
        (image, index.int(), [5, 6]),
        (image, index[0], [5, 6]),
        (image[:, :0], index[:, :0], [5, 6]),
        (image, index, [5]),
        (image.long(), index, [5, 6]),
    ]:
        assert_alike(lambda bad=bad: two(*bad))
    image, index = torch.randn(2, 3, 2, 4, 5), torch.randint(0, 60, (2, 3, 2, 4, 5))
    rest = ([2, 2, 2], [0, 0, 0])
    assert_alike(lambda: three(image, index, [2, 5, 6], *rest))
    assert_alike(
        lambda: torch.ops.aten.max_unpool3d.out(image, index, [2, 5, 6], *rest, out=torch.empty(0))
    )
    for bad in [([2, 2], [0, 0, 0]), ([0, 2, 2], [0, 0, 0])]:
        assert_alike(lambda bad=bad: three(image, index, [2, 5, 6], *bad))
    assert_alike(lambda: three(image, index + 9, [2, 5, 6], *rest))
    values = torch.randn(1, 2, 8, 8, dtype=torch.double, requires_grad=True)
    pooled, places = nnf.max_pool2d(values, 2, return_indices=True)
    with patches_applied("CPU"), deterministic_algorithms():
        leaf = pooled.detach().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: nnf.max_unpool2d(x, places, 2), leaf)


DRAWS = torch.Generator().manual_seed(0)
NORMAL = torch.randn(1000, generator=DRAWS)
HISTOGRAMS = {
    "default": (NORMAL,),
    "range": (NORMAL, 13, -1, 1),
    "float64": (NORMAL.double(), 13, -1.3, 0.7),
    "huge": (NORMAL * 1e30,),
    "strided": (NORMAL[:20].view(4, 5).t(), 3),
    "one-value": (torch.ones(2), 3),
    "empty": (torch.empty(0), 3),
    "empty-no-bins": (torch.empty(0), 0),
    "empty-reversed": (torch.empty(0), 3, 2, 1),
    "nan": (torch.tensor([1.0, NAN]), 3),
    "infinity": (torch.tensor([1.0, INF]), 3),
    "not-finite-in-range": (torch.tensor([1.0, NAN, INF, 0.5, -INF]), 3, 0, 1),
    "no-bins": (torch.ones(1), 0),
    "reversed": (torch.ones(1), 3, 2, 1),
    "nan-range": (torch.ones(9), 5, NAN, 1),
    "integers": (torch.tensor([1]), 3),
}


@pytest.mark.parametrize("arguments", HISTOGRAMS.values(), ids=HISTOGRAMS)
def test_histc(arguments: tuple[object, ...]) -> None:
    """Counts are equal: the edges are computed by torch's formula."""
    assert_alike(lambda: torch.histc(*arguments))
    if arguments[0].numel() == 1000:
        assert_alike(lambda: torch.histc(*arguments, out=arguments[0].new_empty(0)))


VALUES, WEIGHTS = torch.randint(0, 9, (500,), generator=DRAWS), NORMAL[:500]
BINCOUNTS = {
    "float32": (VALUES, WEIGHTS),
    "float64": (VALUES, WEIGHTS.double()),
    "half": (VALUES, WEIGHTS.half()),
    "bool": (VALUES, WEIGHTS > 0),
    "integers": (VALUES, VALUES),
    "uint8": (VALUES.to(torch.uint8), WEIGHTS),
    "minlength": (VALUES.int(), WEIGHTS, 20),
    "strided": (VALUES[::2], WEIGHTS[::2]),
    "not-finite": (VALUES, torch.where(WEIGHTS > 2, INF, torch.where(WEIGHTS < -2, NAN, WEIGHTS))),
    "unweighted": (VALUES,),
    "empty": (VALUES[:0], WEIGHTS[:0], 3),
    "empty-negative": (VALUES[:0], WEIGHTS[:0], -3),
    "negative": (torch.tensor([1, -1]), torch.ones(2)),
    "matrix": (torch.tensor([[1]]), torch.ones(1)),
    "lengths": (torch.tensor([1, 2]), torch.ones(1)),
    "floating": (torch.tensor([1.0, 2]), torch.ones(2)),
    "minlength-negative": (torch.tensor([1, 2]), torch.ones(2), -1),
    "weights-matrix": (torch.tensor([1, 2]), torch.ones(2, 1)),
}


@pytest.mark.parametrize("arguments", BINCOUNTS.values(), ids=BINCOUNTS)
def test_bincount(arguments: tuple[object, ...]) -> None:
    """At most 100 terms to a bin, which are rounded once here and after each addition in torch."""
    rounded = len(arguments) > 1 and arguments[1].is_floating_point() and len(arguments[1])
    tolerance = 100 if rounded else 0
    assert_alike(lambda: torch.bincount(*arguments), tolerance=tolerance)


@pytest.mark.parametrize("scan", [torch.cumprod, torch.logcumsumexp])
def test_scans_of_a_row(scan: Callable[..., torch.Tensor]) -> None:
    """The bits of torch's CPU kernel, for every shape of one row, layout and variant."""
    row = torch.randn(300)
    holed = row.clone().index_fill_(0, torch.tensor([7]), NAN)
    for values, dim in [
        (row, 0),
        (row[::3], -1),
        (row.view(1, 300, 1), 1),
        (row.view(300, 1).t(), 1),
        (row.view(1, 300), 0),
        (row.double(), 0),
        (row.bfloat16(), 0),
        (row.cfloat(), 0),
        (holed, 0),
        (torch.randn(()), 0),
        (torch.randn(0), 0),
        (torch.randn(4, 5), 1),
        (torch.arange(1, 9), 0),
        (row, 1),
    ]:
        assert_alike(lambda v=values, d=dim: scan(v, d))
        assert_alike(lambda v=values, d=dim: scan(v, d, out=torch.empty(0, dtype=v.dtype)))
    leaf = row.clone().requires_grad_()
    assert_alike(lambda: torch.autograd.grad(scan(leaf, 0)[-1], leaf)[0])
    assert_alike(lambda: row.clone().cumprod_(0))
    assert_alike(lambda: row.cumprod(0, dtype=torch.float64))
    assert_alike(lambda: torch.arange(1, 9).cumprod(0, dtype=torch.float32))


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_median(name: str) -> None:
    """Without ties values and indices are torch's; NaNs, empty, scalars, out variants, errors."""
    median = getattr(torch, name)
    matrix = torch.randn(4, 7)
    holed = matrix.clone()
    holed[1, 3] = holed[1, 5] = NAN
    for arguments in [
        (matrix, 0),
        (matrix, -1, True),
        (matrix.t(), 1),
        (holed, 1),
        (holed, 0),
        (torch.randn(()), 0, True),
        (torch.randn(0, 3), 1),
        (torch.randn(0, 3), 0),
        (matrix, 2),
        (matrix > 0, 1),
        (matrix.half(), 1),
        (matrix.cfloat(), 1),
        (torch.randperm(28).view(4, 7), 1),
        (torch.randn(5, 1), 1),
    ]:
        assert_alike(lambda a=arguments: tuple(median(*a)))
    empty = torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert_alike(lambda: tuple(median(matrix, 1, out=tuple(part.clone() for part in empty))))
    assert_alike(lambda: tuple(median(matrix, 1, out=(torch.empty(0), torch.empty(0)))))


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_median_of_equal_elements_has_one_index(name: str) -> None:
    """The index is that of the first element that equals the median, and the value is there."""
    matrix = torch.randint(0, 3, (50, 9)).float()
    with patches_applied("CPU"):
        values, indices = getattr(torch, name)(matrix, 1)
    assert torch.equal(matrix.gather(1, indices.unsqueeze(1)).squeeze(1), values)
    assert torch.equal(values, matrix.sort(dim=1).values[:, 4])
    assert indices.tolist() == [
        row.tolist().index(value) for row, value in zip(matrix, values, strict=True)
    ]
    every = torch.full((2, 3), NAN)
    with patches_applied("CPU"):
        values, indices = getattr(torch, name)(every, 1)
    assert values.isnan().all()
    assert indices.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("include_self", [True, False])
def test_scatter_reduce_prod(dtype: torch.dtype, include_self: bool) -> None:
    """Functional, in place and transposed, with duplicates; the other reductions are untouched."""
    target, source = (torch.randn(*shape).mul(2).to(dtype) for shape in [(4, 5), (6, 5)])
    index = torch.randint(0, 4, (5, 4))
    rest = {"include_self": include_self}
    assert_alike(lambda: target.scatter_reduce(0, index, source, "prod", **rest))
    assert_alike(lambda: target.t().scatter_reduce(1, index.t(), source.t(), "prod", **rest))
    assert_alike(lambda: target.clone().scatter_reduce_(-2, index, source, "prod", **rest))
    assert_alike(lambda: target.scatter_reduce(0, index, source, "amax", **rest))


def test_scatter_reduce_prod_edges() -> None:
    """Out of range, wrong shapes and dtypes, scalars, nothing to do, not finite, an out variant."""
    target, source = torch.randn(4), torch.tensor([INF, 0.0, NAN])
    for dim, index, factors in [
        (0, torch.tensor([0, 1, 1]), source),
        (0, torch.tensor([0, 1, 4]), source),
        (0, torch.tensor([0, 1, -1]), source),
        (1, torch.tensor([0]), source),
        (0, torch.tensor([0, 1, 1, 1]), source),
        (0, torch.tensor([[0]]), source),
        (0, torch.tensor([0]), source.double()),
        (0, torch.tensor([0]).int(), source),
        (0, torch.zeros(0, dtype=torch.int64), source),
        (0, torch.tensor(1), torch.tensor(3.0)),
    ]:
        assert_alike(lambda d=dim, i=index, f=factors: target.scatter_reduce(d, i, f, "prod"))
    assert_alike(lambda: target.scatter_reduce(0, torch.tensor([0]), source, "nope"))
    index = torch.tensor([0, 1, 1])
    assert_alike(lambda: torch.scatter_reduce(target, 0, index, source, "prod", out=torch.empty(0)))
    low = torch.full((1,), 3.0, dtype=torch.half)
    with patches_applied("CPU"):
        product = low.scatter_reduce(0, torch.zeros(4, dtype=torch.int64), low.expand(4), "prod")
    assert product.item() == 243.0


SCATTERED, FACTORS = torch.randn(4, 5, generator=DRAWS), torch.randn(6, 5, generator=DRAWS)
WHERE = torch.randint(0, 4, (5, 4), generator=DRAWS)
SCATTERS = {
    "duplicates": (SCATTERED, 0, WHERE, FACTORS),
    "transposed": (SCATTERED.t(), 1, WHERE.t(), FACTORS.t()),
    "float64": (SCATTERED.double(), -2, WHERE, FACTORS.double()),
    "integers": (SCATTERED.mul(9).long(), 0, WHERE, FACTORS.mul(9).long()),
    "bytes": (SCATTERED.mul(9).to(torch.int8), 0, WHERE, FACTORS.mul(9).to(torch.int8)),
    "complex": (SCATTERED.cfloat(), 0, WHERE, FACTORS.cfloat() * (1 + 2j)),
    "narrow": (SCATTERED, 0, WHERE[:, :2], FACTORS),
    "not-finite": (SCATTERED[0], 0, WHERE[0], torch.tensor([INF, 0.0, NAN, -INF])),
    "nothing": (SCATTERED, 0, WHERE[:0], FACTORS),
    "scalar": (torch.tensor(2.0), 0, torch.tensor(0), torch.tensor(3.0)),
    "over": (SCATTERED, 0, WHERE + 1, FACTORS),
    "under": (SCATTERED, 0, WHERE - 1, FACTORS),
    "dim": (SCATTERED, 2, WHERE, FACTORS),
    "shapes": (SCATTERED, 0, WHERE, FACTORS[:2]),
    "ranks": (SCATTERED, 0, WHERE[0], FACTORS),
    "dtypes": (SCATTERED, 0, WHERE, FACTORS.double()),
    "index": (SCATTERED, 0, WHERE.float(), FACTORS),
    "overlap": (SCATTERED[:1].expand(4, 5), 0, WHERE, FACTORS),
}


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("reduce", ["add", "multiply", "nope", None])
@pytest.mark.parametrize("arguments", SCATTERS.values(), ids=SCATTERS)
def test_scatter_that_adds_and_multiplies(
    arguments: tuple[Tensor, int, Tensor, Tensor], reduce: str | None
) -> None:
    """``scatter`` with a reduction, and ``scatter_add`` on request.

    Products as on one CPU thread, but complex ones; sums are rounded once, torch's up to 6 times.
    """
    target, *rest = arguments
    rounded = target.is_complex() or (reduce != "multiply" and target.is_floating_point())
    tolerance = 6 if rounded else 0
    name, more = ("scatter", {"reduce": reduce}) if reduce else ("scatter_add", {})
    fresh = (lambda: target) if 0 in target.stride() else target.clone
    wanted = {"tolerance": tolerance, "include": [] if reduce else ["scatter_add"]}
    assert_alike(lambda: getattr(target, name)(*rest, **more), **wanted)
    assert_alike(lambda: getattr(fresh(), f"{name}_")(*rest, **more), **wanted)
    out = target.new_empty(0)
    assert_alike(lambda: getattr(torch, name)(target, *rest, **more, out=out.clone()), **wanted)


PUTS = {
    "rows": (SCATTERED, (WHERE[0],), FACTORS[:4]),
    "elements": (SCATTERED, (WHERE[0], WHERE[1]), FACTORS[0, :4]),
    "broadcast": (SCATTERED, (WHERE[:, :1], WHERE[:1]), FACTORS[0, 0]),
    "negative": (SCATTERED, (WHERE[0] - 4,), FACTORS[:4]),
    "int32": (SCATTERED, (WHERE[0].int(),), FACTORS[:4]),
    "half": (SCATTERED.half(), (WHERE[0, :1],), FACTORS[:1].half()),
    "transposed": (SCATTERED.t(), (WHERE[0], WHERE[1]), FACTORS[0, :4]),
    "mask": (SCATTERED, (SCATTERED > 0,), FACTORS[0, 0]),
    "later": (SCATTERED, (None, WHERE[0]), FACTORS[:4, :4]),
    "integers": (SCATTERED.long(), (WHERE[0],), FACTORS[:4].long()),
    "nothing": (SCATTERED, (WHERE[0, :0],), FACTORS[:0]),
    "over": (SCATTERED, (WHERE[0] + 9,), FACTORS[:4]),
    "under": (SCATTERED, (WHERE[0] - 9,), FACTORS[:4]),
    "shapes": (SCATTERED, (WHERE[0],), FACTORS[:3]),
    "unlike": (SCATTERED, (WHERE[0], WHERE[0, :3]), FACTORS[0, 0]),
    "dtypes": (SCATTERED, (WHERE[0],), FACTORS[:4].double()),
    "many": (SCATTERED, (WHERE[0],) * 3, FACTORS[0, 0]),
}


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("arguments", PUTS.values(), ids=PUTS)
def test_index_put_on_request(
    arguments: tuple[Tensor, tuple[Tensor, ...], Tensor], accumulate: bool
) -> None:
    """At most 20 terms and the tensor's own in another order; what is unusual goes to torch."""
    target, indices, values = arguments
    if not accumulate:
        indices = tuple(index if index is None else index[:1] for index in indices)
    tolerance = 21 if target.is_floating_point() else 0
    wanted = {"tolerance": tolerance, "include": ["index_put_accumulate"]}
    put, put_ = torch.ops.aten.index_put, torch.ops.aten.index_put_
    assert_alike(lambda: put(target, indices, values, accumulate), **wanted)
    assert_alike(lambda: put_(target.clone(), indices, values, accumulate), **wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["max", "sum"])
def test_embedding_bag(dtype: torch.dtype, padding: int | None, mode: str) -> None:
    """Repeated rows, an empty bag, a padding row; mode sum is torch's own."""
    rows, starts = torch.tensor([1, 2, 4, 5, 4, 3, 2, 2, 8]), torch.tensor([0, 4, 4, 8])
    table = torch.randn(9, 6).to(dtype).requires_grad_()
    gradient = torch.arange(24).view(4, 6).to(dtype)

    def differentiate() -> Tensor:
        output = nnf.embedding_bag(rows, table, starts, mode=mode, padding_idx=padding)
        return torch.autograd.grad(output, table, gradient)[0]

    assert_alike(differentiate)


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_index_reduce(reduce: str, include_self: bool) -> None:
    """Duplicates, places that none goes to, every rank and layout, NaN, and each bad argument."""
    target, index, source = torch.randn(6, 9, 3), torch.randint(0, 7, (20,)), torch.randn(6, 20, 3)
    holed = source.clone()
    holed[2, 3:6] = NAN
    whole = source.mul(9).long()
    for arguments in [
        (target, 1, index, source),
        (target.double(), -2, index.int(), source.double()),
        (target.transpose(0, 2), 1, index, source.transpose(0, 2)),
        (target.mul(9).long(), 1, index, whole),
        (target.mul(9).to(torch.int8), 1, index, whole.to(torch.int8)),
        (target, 1, index, holed),
        (torch.zeros(30, 3, dtype=torch.int64), 0, index, whole[0] // 9 - 2**63),
        (target, 1, index[:0], source[:, :0]),
        (target[:0], 1, index, source[:0]),
        (torch.randn(()), 0, torch.tensor([0]), torch.randn(1)),
        (torch.randn(()), 0, torch.tensor(0), torch.randn(())),
        (target, 1, index + 3, source),
        (target, 1, index - 1, source),
        (target, 3, index, source),
        (target, 1, index[:3], source),
        (target, 1, index[None], source),
        (target, 1, index.float(), source),
        (target, 1, index, source[:2]),
        (target, 1, index, source.double()),
        (target[:, :1].expand(6, 9, 3), 1, index, source),
    ]:
        given = (*arguments[1:], reduce)
        overlapping = 0 in arguments[0].stride()
        # Of at most 21 terms, which are rounded once here and after each addition in torch.
        rounded = {"tolerance": 21 if reduce == "mean" and arguments[0].is_floating_point() else 0}
        assert_alike(
            lambda a=arguments[0], g=given: a.index_reduce(*g, include_self=include_self), **rounded
        )
        assert_alike(
            lambda a=arguments[0], g=given, overlapping=overlapping: (
                a if overlapping else a.clone()
            ).index_reduce_(*g, include_self=include_self),
            **rounded,
        )
    assert_alike(
        lambda: torch.index_reduce(target, 1, index, source, reduce, out=torch.empty(0)),
        tolerance=21 if reduce == "mean" else 0,
    )
    assert_alike(lambda: torch.index_reduce(target, 1, index, source, "sum"))


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
def test_index_reduce_by_dtype() -> None:
    """Half is rounded once, and not after each factor; what no CUDA kernel takes is refused."""
    low, index = torch.full((1,), 1.1, dtype=torch.half), torch.zeros(6, dtype=torch.int64)
    with patches_applied("CPU"):
        product = low.index_reduce(0, index, low.expand(6), "prod")
        with pytest.raises(D9mError, match=r"torch\.complex64 of shape"):
            low.cfloat().view(1, 1).index_reduce(0, index, torch.ones(6, 1).cfloat(), "prod")
    assert torch.equal(product, low.float().pow(7).half())


def test_index_add_on_request() -> None:
    """At most 20 terms and the tensor's own in another order; what is unusual goes to torch."""
    target, index = torch.randn(6, 4, 3), torch.randint(0, 4, (20,))
    source = torch.randn(6, 20, 3)
    for arguments in [
        (target, 1, index, source),
        (target.double(), -2, index.int(), source.double()),
        (target.half(), 1, index, source.half()),
        (target.transpose(0, 2), 1, index, source.transpose(0, 2)),
        (target.long(), 1, index, source.long()),
        (target, 1, index[:0], source[:, :0]),
        (target, 1, index + 1, source),
        (target, 1, index - 1, source),
        (target, 3, index, source),
        (target, 1, index[:3], source),
        (target, 1, index, source[:2]),
        (target, 1, index, source.double()),
        (torch.randn(()), 0, torch.tensor([0]), torch.randn(1)),
    ]:
        tolerance = 21 if arguments[0].is_floating_point() else 0
        wanted = {"include": ["index_add"]}
        assert_alike(
            lambda a=arguments: torch.index_add(*a, alpha=3), tolerance=tolerance, **wanted
        )
        assert_alike(
            lambda a=arguments: a[0].clone().index_add_(*a[1:]), tolerance=tolerance, **wanted
        )
    assert_alike(
        lambda: torch.index_add(target, 1, index, source, out=torch.empty(0)),
        tolerance=21,
        include=["index_add"],
    )


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("frequency", [False, True])
def test_embedding_backward_on_request(padding: int | None, frequency: bool) -> None:
    """Repeated rows, a padding row, scaled by frequency (which is torch's own); three terms."""
    table = torch.randn(5, 3, requires_grad=True)
    rows, gradient = torch.tensor([[0, 2, 2], [4, 0, 0]]), torch.randn(2, 3, 3)

    def differentiate() -> Tensor:
        output = nnf.embedding(rows, table, padding, scale_grad_by_freq=frequency)
        return torch.autograd.grad(output, table, gradient)[0]

    assert_alike(differentiate, tolerance=3, include=["embedding_dense_backward"])
