"""Edge cases of the patched ops; check_edge_cases.py runs them."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from patches.cases import GRADIENT_CASES, GradientCase, answer, make_inputs
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
MAX_UNPOOL = torch._C._nn.max_unpool2d  # noqa: SLF001 - it checks less than max_unpool2d
NAN, INF = float("nan"), float("inf")


class EdgeCase(NamedTuple):
    """One call.

    Attributes:
        op: What is called.
        edge: What is special about it.
        call: Returns one tensor or several, or raises; changes none of its inputs.
        reference: What to compare with in place of torch's answer, if the difference is documented.
        strides: Whether the strides are compared.
        on_cpu_only: Whether torch's CUDA kernel does not take the dtype, and ours says so.
    """

    op: str
    edge: str
    call: Callable[[], object]
    reference: Callable[[], object] | None = None
    strides: bool = True
    on_cpu_only: bool = False


Update = Callable[[Tensor, Tensor, Tensor], object]


def make(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return small numbers that every dtype holds."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 11 - (0 if dtype == torch.uint8 else 5)).view(shape).to(dtype)


def list_updates() -> dict[str, tuple[str, Update, bool]]:
    """Return by name the method, a call on (target, index, source), and whether it takes rows."""
    found: dict[str, tuple[str, Update, bool]] = {
        "index_add": ("index_add_", lambda t, i, s: t.index_add_(0, i, s), True),
        "index_add alpha": ("index_add_", lambda t, i, s: t.index_add_(0, i, s, alpha=2), True),
        "scatter_add": ("scatter_add_", lambda t, i, s: t.scatter_add_(0, i, s), False),
        "index_put": ("index_put_", lambda t, i, s: t.index_put_((i,), s, accumulate=True), True),
        "put_": ("put_", lambda t, i, s: t.put_(i, s), False),
        "put_ accumulate": ("put_", lambda t, i, s: t.put_(i, s, accumulate=True), False),
    }
    for kind in ("add", "multiply"):
        found[f"scatter {kind}"] = (
            "scatter_",
            lambda t, i, s, kind=kind: t.scatter_(0, i, s, reduce=kind),
            False,
        )
    for kept in (True, False):
        more = {"include_self": kept}
        mark = "" if kept else " without self"
        for kind in ("sum", "prod", "mean", "amax", "amin"):
            found[f"scatter_reduce {kind}{mark}"] = (
                "scatter_reduce_",
                lambda t, i, s, kind=kind, more=more: t.scatter_reduce_(0, i, s, kind, **more),
                False,
            )
        for kind in ("prod", "mean", "amax", "amin"):
            found[f"index_reduce {kind}{mark}"] = (
                "index_reduce_",
                lambda t, i, s, kind=kind, more=more: t.index_reduce_(0, i, s, kind, **more),
                True,
            )
    return found


def run_update(update: Update, target: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """Return a copy of the target, of the same strides, after the update."""
    copy = target.clone(memory_format=torch.preserve_format)
    if target.dim() and not target.is_contiguous():
        copy = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype).copy_(target)
    update(copy, index, source)
    return copy


def list_update_cases() -> Iterator[EdgeCase]:
    """Return the cases of updates of a tensor by an index."""
    for name, (_, update, takes_rows) in list_updates().items():
        index = torch.tensor([2, 0, 2, 1, 2, 0])
        wide = index if takes_rows else index[:, None].expand(6, 3) % 4
        case = partial(_make_update, name, update)
        for dtype in DTYPES:
            yield case(f"dtype {dtype}", make(dtype, 4, 3), wide, make(dtype, 6, 3))
            yield case("int32 index", make(dtype, 4, 3), wide.int(), make(dtype, 6, 3))
        rows, source = torch.randn(4, 3), torch.randn(6, 3)
        nothing = wide[:0]
        yield case("empty", rows, nothing, source[:0])
        yield case("empty", rows[:, :0], index[:0] if takes_rows else wide[:, :0], source[:, :0])
        yield case("empty", rows[:0], nothing, source[:0])
        yield case("empty", rows[:0], wide, source)
        for scalar in (torch.tensor(0), torch.tensor([0])):
            yield case("0-d", torch.tensor(2.0), scalar, torch.tensor(3.0))
            yield case("0-d", torch.tensor(2.0), scalar, torch.tensor([3.0]))
            yield case("0-d", torch.tensor([2.0]), scalar, torch.tensor(3.0))
        for place in (-1, -4, -5, 4, 100):
            yield case("negative and out of range", rows, torch.full_like(wide, place), source)
        yield case("index larger than source", rows, torch.cat([wide, wide]), source)
        yield case("index smaller than source", rows, wide[:2], source)
        yield case("index of more columns", rows, index[:, None].expand(6, 5), source)
        yield case("index of another dimension", rows, wide[None], source)
        yield case("strided target", torch.randn(3, 4).t(), wide, source)
        yield case("strided target", torch.randn(8, 3)[::2], wide, source)
        yield case("strided source", rows, wide, torch.randn(3, 6).t())
        yield case("strided source", rows, wide, torch.randn(6, 6)[:, ::2])
        yield case("expanded source", rows, wide, torch.randn(3).expand(6, 3))
        yield case("expanded source", rows, wide, torch.tensor(1.5).expand(6, 3))
        yield case("broadcast source", rows, wide, torch.randn(3))
        yield case("broadcast source", rows, wide, torch.randn(1, 3))
        yield case("other dtype", rows, wide, source.double())
        yield case("other dtype", rows, wide.double(), source)
        yield case("overlapping target", torch.randn(3).expand(4, 3), wide, source)
        for number in (INF, -INF, NAN, -0.0):
            filled = source.clone()
            filled[3] = number
            yield case("infinities, NaN, -0.0", rows, wide, filled)
            yield case("infinities, NaN, -0.0", torch.full((4, 3), number), wide, source)
        yield from _list_shared_memory(name, update, wide)


def _make_update(
    name: str, update: Update, edge: str, target: Tensor, index: Tensor, source: Tensor
) -> EdgeCase:
    call = partial(run_update, update, target, index, source)
    is_overlapping = edge.startswith("overlapping")
    if is_overlapping:
        call = partial(update, target, index, source)
    reference = None
    if target.dtype in (torch.float16, torch.bfloat16) and edge.startswith(("dtype", "int32")):
        wider = partial(run_update, update, target.double(), index, source.double())
        reference = partial(_round_to, wider, target.dtype)
    on_cpu_only = name.startswith("index_reduce") and (
        target.is_complex() or target.dtype == torch.bool
    )
    return EdgeCase(name, edge, call, reference, on_cpu_only=on_cpu_only)


def _round_to(wider: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return wider().to(dtype)


def _list_shared_memory(name: str, update: Update, index: Tensor) -> Iterator[EdgeCase]:
    """Return updates in which the target is the source, or a part of it."""

    def share_whole() -> Tensor:
        target = torch.ones(6, 3)
        update(target, index % 4, target)
        return target

    def share_rows() -> Tensor:
        memory = torch.ones(10, 3)
        update(memory[:4], index, memory[2:8])
        return memory

    def share_index() -> Tensor:
        memory = torch.arange(6) % 4
        target = memory if index.dim() == 1 else memory[:, None]
        update(target, target, target.clone())
        return target

    for call in (share_whole, share_rows, share_index):
        yield EdgeCase(name, "shared memory", call)


def list_output_cases() -> Iterator[EdgeCase]:
    """Return calls with ``out=``."""
    index, rows, source = torch.tensor([2, 0, 2]), torch.randn(4, 3), torch.randn(3, 3)
    wide = index[:, None].expand(3, 3)
    calls: dict[str, Callable[..., object]] = {
        "index_add": partial(torch.index_add, rows, 0, index, source),
        "scatter_add": partial(torch.scatter_add, rows, 0, wide, source),
        "scatter add": partial(torch.scatter, rows, 0, wide, source, reduce="add"),
        "scatter_reduce prod": partial(torch.scatter_reduce, rows, 0, wide, source, "prod"),
        "scatter_reduce mean": partial(torch.scatter_reduce, rows, 0, wide, source, "mean"),
        "index_reduce mean": partial(torch.index_reduce, rows, 0, index, source, "mean"),
        "histc": partial(torch.histc, source, 4),
        "median": partial(torch.median, source, 0),
        "nanmedian": partial(torch.nanmedian, source, 0),
    }
    for name, call in calls.items():

        def write(make_out: Callable[[], object], call: Callable[..., object] = call) -> object:
            result = call(out=make_out())
            return tuple(result) if isinstance(result, tuple) else result

        def make_pair(one: Callable[[], Tensor], call: Callable[..., object] = call) -> object:
            if isinstance(call(), Tensor):
                return one()
            return one(), one().long()

        for edge, one in (
            ("out= empty", lambda: torch.empty(0)),
            ("out= of another shape", lambda: torch.empty(2, 2)),
            ("out= of another dtype", lambda: torch.empty(0, dtype=torch.int32)),
            ("out= strided", lambda: torch.empty(3, 4).t()),
            ("out= shared memory", lambda: rows),
            ("out= shared memory", lambda: source),
        ):
            before = rows.clone(), source.clone()

            def restore(
                one: Callable[[], Tensor] = one,
                write: Callable[..., object] = write,
                make_pair: Callable[..., object] = make_pair,
                before: tuple[Tensor, Tensor] = before,
            ) -> object:
                try:
                    result = write(partial(make_pair, one))
                    parts = result if isinstance(result, tuple) else (result,)
                    return tuple(part.clone() for part in parts)
                finally:
                    rows.copy_(before[0])
                    source.copy_(before[1])

            yield EdgeCase(name, edge, restore)


def differentiate(case: GradientCase, image: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of a case by its input."""
    leaf = image.detach().requires_grad_()
    return torch.autograd.grad(case.forward(leaf), leaf, gradient)[0]


def list_gradient_cases() -> Iterator[EdgeCase]:
    """Return the cases of pooling, interpolation and padding."""
    for case in GRADIENT_CASES:
        complex_too = COMPLEX if "flection" in case.label or "cation" in case.label else ()
        for dtype in (*FLOATS, *complex_too):
            real = dtype.to_real() if dtype.is_complex else dtype
            image, gradient = (part.to(dtype) for part in make_inputs(case, real))
            call = partial(differentiate, case, image, gradient)
            if isinstance(answer(call)[0], type):
                continue  # torch's CPU kernel does not take the dtype
            reference = None
            if dtype.itemsize == 2:
                wider = partial(differentiate, case, image.double(), gradient.double())
                reference = partial(_round_to, wider, dtype)
            yield EdgeCase(case.label, f"dtype {dtype}", call, reference)
        image, gradient = make_inputs(case)
        run = partial(differentiate, case)
        wide = torch.zeros(*gradient.shape, 2)
        wide[..., 1] = gradient
        yield EdgeCase(case.label, "strided gradient", partial(run, image, wide[..., 1]))
        ones = torch.ones(()).expand(gradient.shape)
        yield EdgeCase(case.label, "expanded gradient", partial(run, image, ones))
        if "fraction" not in case.label:  # its samples are those of the whole batch
            yield EdgeCase(case.label, "empty", partial(run, image[:0], gradient[:0]))
        yield EdgeCase(case.label, "other shape", partial(run, image, gradient[..., :-1]))
        for number in (INF, -INF, NAN, -0.0):
            filled = gradient.clone()
            filled.view(-1)[gradient.numel() // 2] = number
            yield EdgeCase(case.label, "infinities, NaN, -0.0", partial(run, image, filled))
        if case.has_channels_last:
            form = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
            turned = (part.contiguous(memory_format=form) for part in (image, gradient))
            # CUDA's kernel gives a contiguous gradient where the CPU's keeps the format.
            strides = not case.cpu_keeps_format
            yield EdgeCase(case.label, "channels_last", partial(run, *turned), strides=strides)


def sample(
    mode: str, padding: str, corners: bool, image: Tensor, grid: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of ``grid_sample`` by the image and by the grid."""
    leaves = image.detach().requires_grad_(), grid.detach().requires_grad_()
    outputs = nnf.grid_sample(*leaves, mode, padding, corners)
    return torch.autograd.grad(outputs.square().sum(), leaves)


def list_sample_cases() -> Iterator[EdgeCase]:
    """Return the cases of ``grid_sample``."""
    for dims in (2, 3):
        name = f"grid_sample {dims}d"
        sizes, outputs = (5, 6, 4)[:dims], (4, 7, 3)[:dims]
        for mode in ("bilinear", "nearest", "bicubic")[: 5 - dims]:
            for padding in ("zeros", "border", "reflection"):
                for corners in (False, True):
                    run = partial(sample, mode, padding, corners)
                    for dtype in (torch.float32, torch.float64):
                        image = torch.randn(2, 3, *sizes, dtype=dtype)
                        grid = torch.rand(2, *outputs, dims, dtype=dtype) * 2 - 1
                        yield EdgeCase(name, f"dtype {dtype}", partial(run, image, grid))
                        yield EdgeCase(name, "outside", partial(run, image, grid * 3))
                    turned = image.transpose(1, -1).contiguous().transpose(1, -1)
                    yield EdgeCase(name, "strided", partial(run, turned, grid))
                    yield EdgeCase(name, "expanded", partial(run, image, grid[:1].expand_as(grid)))
                    yield EdgeCase(name, "empty", partial(run, image[:0], grid[:0]))
                    yield EdgeCase(name, "other shape", partial(run, image, grid[:1]))
                    yield EdgeCase(name, "other dtype", partial(run, image, grid.float()))


def list_dtype_cases() -> Iterator[EdgeCase]:
    """Return the cases of losses, lookups, histograms, medians and unpooling in each dtype."""
    places = torch.arange(35) % 6
    index = torch.arange(120).view(2, 3, 4, 5) % 30
    target = torch.arange(24).view(2, 3, 4) % 5
    for dtype in DTYPES:
        edge, rows = f"dtype {dtype}", make(dtype, 5, 7)
        weights, scores = rows.flatten(), make(dtype, 2, 5, 3, 4)
        for dim in (0, -1, 2):
            yield EdgeCase("median", edge, lambda r=rows, d=dim: r.median(d).values)
            yield EdgeCase("nanmedian", edge, lambda r=rows, d=dim: r.nanmedian(d).values)
        yield EdgeCase("histc", edge, partial(torch.histc, rows, 5))
        yield EdgeCase("histc", edge, partial(torch.histc, rows, 5, -2, 3))
        yield EdgeCase("bincount", edge, partial(torch.bincount, places, weights))
        yield EdgeCase("bincount", f"index {dtype}", partial(torch.bincount, weights, places * 1.0))
        image = make(dtype, 2, 3, 4, 5)
        yield EdgeCase("max_unpool2d", edge, partial(MAX_UNPOOL, image, index, [5, 6]))
        table = make(dtype, 6, 3)
        yield EdgeCase("embedding_bag", edge, partial(_embed_bags, table, places))
        yield EdgeCase("embedding", edge, partial(_embed, table, places))
        for reduction in ("mean", "sum", "none"):
            call = partial(nnf.nll_loss, scores, target, reduction=reduction)
            yield EdgeCase("nll_loss2d", edge, call)
    for dtype in (torch.float32, torch.float64):
        scores = torch.randn(9, 2, 5, dtype=dtype).log_softmax(2)
        for infinity in (False, True):
            for lengths in ([9, 7], [9, 0], [2, 2]):
                for kind in (torch.int64, torch.int32):
                    call = partial(_align, scores, lengths, kind, infinity=infinity)
                    yield EdgeCase("ctc_loss", f"dtype {dtype}", call)


def list_value_cases() -> Iterator[EdgeCase]:
    """Return the cases of special values, sizes and indices of the same ops."""
    places = torch.arange(35) % 6
    for number in (INF, -INF, NAN, -0.0):
        edge, rows = "infinities, NaN, -0.0", torch.randn(5, 7)
        rows[2] = number
        yield EdgeCase("median", edge, lambda r=rows: r.median(0).values)
        yield EdgeCase("nanmedian", edge, lambda r=rows: r.nanmedian(1).values)
        yield EdgeCase("histc", edge, partial(torch.histc, rows, 4, -1, 1))
        yield EdgeCase("histc", edge, partial(torch.histc, rows, 4))
        yield EdgeCase("bincount", edge, partial(torch.bincount, places, rows.flatten()))
        image, index = rows.view(1, 1, 5, 7), places.view(1, 1, 5, 7)
        yield EdgeCase("max_unpool2d", edge, partial(MAX_UNPOOL, image, index, [2, 3]))
    for shape in ((0,), (0, 3), (3, 0), ()):
        edge, rows = "empty and 0-d", torch.randn(shape)
        yield EdgeCase("median", edge, lambda r=rows: tuple(r.median(0)))
        yield EdgeCase("nanmedian", edge, lambda r=rows: tuple(r.nanmedian(0)))
        yield EdgeCase("histc", edge, partial(torch.histc, rows, 3, 0, 1))
        yield EdgeCase("bincount", edge, partial(torch.bincount, rows.long(), rows))
    image, index = torch.randn(2, 3, 4, 5), torch.zeros(2, 3, 4, 5, dtype=torch.int64)
    for bad in (-1, 30):
        edge = "negative and out of range"
        yield EdgeCase("max_unpool2d", edge, partial(MAX_UNPOOL, image, index + bad, [5, 6]))
        yield EdgeCase(
            "bincount", edge, partial(torch.bincount, torch.tensor([1, bad]), torch.ones(2))
        )


def list_loss_cases() -> Iterator[EdgeCase]:
    """Return the cases of losses: weights, ignored targets, bad targets, lengths of labels."""
    scores, target = torch.randn(2, 5, 4, 3).log_softmax(1), torch.arange(24).view(2, 4, 3) % 5
    weight = torch.rand(5)
    for reduction in ("none", "sum", "mean"):
        loss = partial(nnf.nll_loss, reduction=reduction)
        for edge, call in {
            "weights": partial(loss, scores, target, weight),
            "ignored": partial(loss, scores, target, ignore_index=2),
            "ignored weights": partial(loss, scores, target, weight, ignore_index=2),
            "all ignored": partial(loss, scores, target * 0, ignore_index=0),
            "empty": partial(loss, scores[:0], target[:0]),
            "out of range": partial(loss, scores, target + 3),
            "negative": partial(loss, scores, target - 4),
            "other sizes": partial(loss, scores, target[:, :2]),
            "other weights": partial(loss, scores, target, torch.ones(2)),
            "other dtype": partial(loss, scores, target.int()),
            "gradient": partial(_differentiate_loss, loss, scores, target),
        }.items():
            yield EdgeCase("nll_loss2d", edge, call)
    forward = torch.ops.aten.nll_loss2d_forward
    yield EdgeCase(
        "nll_loss2d",
        "out= empty",
        lambda: forward.output(
            scores, target, None, 1, -100, output=torch.empty(()), total_weight=torch.empty(())
        ),
    )
    scores = torch.randn(30, 4, 6, dtype=torch.float64).log_softmax(2)
    silent = scores.clone()
    silent[3, 1, 2] = -INF
    targets, lengths, counts = torch.arange(88).view(4, 22) % 5 + 1, [30, 25, 30, 20], [9, 5, 0, 20]
    joined = torch.cat([row[:count] for row, count in zip(targets, counts, strict=True)])
    for infinity in (False, True):
        for edge, given, arguments in (
            ("padded", scores, (targets, lengths, counts)),
            ("joined", scores, (joined, torch.tensor(lengths), torch.tensor(counts))),
            ("silent", silent, (targets, lengths, counts)),
            ("last blank", scores, (targets[:, :5] - 1, lengths, [5, 4, 3, 2], 5)),
            ("no labels", scores, (joined[:0], lengths, [0, 0, 0, 0])),
        ):
            loss = partial(nnf.ctc_loss, reduction="sum", zero_infinity=infinity)
            yield EdgeCase("ctc_loss", edge, partial(_differentiate_loss, loss, given, *arguments))


def _differentiate_loss(loss: Callable[..., Tensor], scores: Tensor, *arguments: object) -> Tensor:
    leaf = scores.detach().requires_grad_()
    return torch.autograd.grad(loss(leaf, *arguments).sum(), leaf)[0]


def list_count_cases() -> Iterator[EdgeCase]:
    """Return the cases of histograms and of counts with weights."""
    normal = torch.randn(1000)
    for edge, arguments in {
        "default": (normal,),
        "range": (normal, 13, -1, 1),
        "float64": (normal.double(), 13, -1.3, 0.7),
        "huge": (normal * 1e30,),
        "strided": (normal[:20].view(4, 5).t(), 3),
        "one value": (torch.ones(2), 3),
        "empty": (torch.empty(0), 3),
        "empty, no bins": (torch.empty(0), 0),
        "empty, reversed": (torch.empty(0), 3, 2, 1),
        "not finite in range": (torch.tensor([1.0, NAN, INF, 0.5, -INF]), 3, 0, 1),
        "no bins": (torch.ones(1), 0),
        "reversed": (torch.ones(1), 3, 2, 1),
        "NaN range": (torch.ones(9), 5, NAN, 1),
    }.items():
        yield EdgeCase("histc", edge, partial(torch.histc, *arguments))
    values, weights = torch.randint(0, 9, (500,)), normal[:500]
    for edge, arguments in {
        "uint8": (values.to(torch.uint8), weights),
        "minlength": (values.int(), weights, 20),
        "strided": (values[::2], weights[::2]),
        "unweighted": (values,),
        "empty": (values[:0], weights[:0], 3),
        "empty, negative": (values[:0], weights[:0], -3),
        "matrix": (torch.tensor([[1]]), torch.ones(1)),
        "lengths": (torch.tensor([1, 2]), torch.ones(1)),
        "floating": (torch.tensor([1.0, 2]), torch.ones(2)),
        "negative minlength": (torch.tensor([1, 2]), torch.ones(2), -1),
        "matrix of weights": (torch.tensor([1, 2]), torch.ones(2, 1)),
    }.items():
        yield EdgeCase("bincount", edge, partial(torch.bincount, *arguments))


def list_row_cases() -> Iterator[EdgeCase]:
    """Return the cases of scans and of medians: each layout, dtype, and bad dimension."""
    row, matrix = torch.randn(300), torch.randn(4, 7)
    holed, holes = row.clone(), matrix.clone()
    holed[7] = holes[1, 3] = holes[1, 5] = NAN
    for name, scan in (("cumprod", torch.cumprod), ("logcumsumexp", torch.logcumsumexp)):
        for values, dim in [
            *((row, 0), (row[::3], -1), (row.view(1, 300, 1), 1), (row.view(300, 1).t(), 1)),
            *((row.view(1, 300), 0), (row.double(), 0), (row.bfloat16(), 0), (row.cfloat(), 0)),
            *((holed, 0), (torch.randn(()), 0), (torch.randn(0), 0), (torch.randn(4, 5), 1)),
            *((torch.arange(1, 9), 0), (row, 1)),
        ]:
            yield EdgeCase(name, "row", partial(scan, values, dim))
            out = torch.empty(0, dtype=values.dtype)
            yield EdgeCase(
                name, "out= empty", lambda s=scan, v=values, d=dim, o=out: s(v, d, out=o.clone())
            )
        yield EdgeCase(name, "gradient", partial(_differentiate_loss, scan, row, 0))
    yield EdgeCase("cumprod", "in place", lambda: row.clone().cumprod_(0))
    yield EdgeCase("cumprod", "float64", partial(torch.cumprod, row, 0, dtype=torch.float64))
    yield EdgeCase("cumprod", "of integers", lambda: torch.arange(1, 9).cumprod(0, dtype=row.dtype))
    for name in ("median", "nanmedian"):
        for arguments in [
            *((matrix, 0), (matrix, -1, True), (matrix.t(), 1), (holes, 1), (holes, 0)),
            *((torch.randn(()), 0, True), (torch.randn(0, 3), 1), (torch.randn(0, 3), 0)),
            *((matrix, 2), (matrix > 0, 1), (matrix.half(), 1), (matrix.cfloat(), 1)),
            *((torch.randperm(28).view(4, 7), 1), (torch.randn(5, 1), 1)),
        ]:
            yield EdgeCase(name, "row", lambda a=arguments, n=name: tuple(getattr(torch, n)(*a)))


def list_place_cases() -> Iterator[EdgeCase]:
    """Return the cases of indices and places of each kind, also those that torch refuses."""
    target, source = torch.randn(4, 5), torch.randn(6, 5)
    where = torch.arange(20).view(5, 4) * 7 % 4
    for edge, (given, dim, index, values) in {
        "transposed": (target.t(), 1, where.t(), source.t()),
        "last dimensions": (target.double(), -2, where, source.double()),
        "narrow": (target, 0, where[:, :2], source),
        "not finite": (target[0], 0, where[0], torch.tensor([INF, 0.0, NAN, -INF])),
        "other dimension": (target, 2, where, source),
        "other ranks": (target, 0, where[0], source),
    }.items():
        for kind in ("add", "multiply", "nope"):
            call = partial(torch.scatter, given, dim, index, values, reduce=kind)
            yield EdgeCase(f"scatter {kind}", edge, call)
        yield EdgeCase("scatter_add", edge, partial(torch.scatter_add, given, dim, index, values))
        for kind in ("prod", "amax", "nope"):
            call = partial(torch.scatter_reduce, given, dim, index, values, kind)
            yield EdgeCase(f"scatter_reduce {kind}", edge, call)
    for edge, (given, indices, values) in {
        "elements": (target, (where[0], where[1]), source[0, :4]),
        "broadcast": (target, (where[:, :1], where[:1]), source[0, 0]),
        "negative": (target, (where[0] - 4,), source[:4]),
        "transposed": (target.t(), (where[0], where[1]), source[0, :4]),
        "mask": (target, (target > 0,), source[0, 0]),
        "later dimension": (target, (None, where[0]), source[:4, :4]),
        "other shapes": (target, (where[0], where[0, :3]), source[0, 0]),
        "too many": (target, (where[0],) * 3, source[0, 0]),
    }.items():
        for accumulate in (True, False):
            # Without a sum, of one value for each place.
            one_each = [one if one is None else one[:1] for one in indices]
            places = indices if accumulate else tuple(one_each)
            call = partial(torch.ops.aten.index_put, given, places, values, accumulate)
            yield EdgeCase("index_put", edge, call)
    for edge, (given, index, values) in {
        "over": (torch.zeros(2, 3).t(), [0, 7], [1.0, 2.0]),
        "under": (torch.zeros(2, 3).t(), [0, -7], [1.0, 2.0]),
        "counts": (torch.zeros(3), [0, 1], [1.0]),
        "empty": (torch.zeros(0), [0], [1.0]),
        "scalar": (torch.zeros(()), [0, -1], [1.0, 2.0]),
        "nothing": (torch.zeros(3), [], []),
    }.items():
        places = torch.tensor(index, dtype=torch.int64), torch.tensor(values)
        yield EdgeCase("put_", edge, partial(torch.Tensor.put, given, *places))


def list_lookup_cases() -> Iterator[EdgeCase]:
    """Return the cases of unpooling volumes and of gradients of lookups."""
    image, index = torch.randn(2, 3, 2, 4, 5), torch.arange(240).view(2, 3, 2, 4, 5) * 7 % 60
    unpool = torch._C._nn.max_unpool3d  # noqa: SLF001 - as above
    for edge, (values, places, more) in {
        "batch": (image, index, ([2] * 3, [0] * 3)),
        "no batch": (image[0], index[0], ([2] * 3, [0] * 3)),
        "half": (image.half(), index, ([2] * 3, [0] * 3)),
        "over": (image, index + 9, ([2] * 3, [0] * 3)),
        "other dtype": (image, index.int(), ([2] * 3, [0] * 3)),
        "other shape": (image, index[0], ([2] * 3, [0] * 3)),
        "strides": (image, index, ([2, 2], [0] * 3)),
        "no stride": (image, index, ([0, 2, 2], [0] * 3)),
        "empty": (image[:0], index[:0], ([2] * 3, [0] * 3)),
        "integers": (image.long(), index, ([2] * 3, [0] * 3)),
    }.items():
        yield EdgeCase("max_unpool3d", edge, partial(unpool, values, places, [2, 5, 6], *more))
    rows, starts = torch.tensor([1, 2, 4, 5, 4, 3, 2, 2, 8]), torch.tensor([0, 4, 4, 8])
    table = torch.randn(9, 6)
    for more in ({"padding_idx": 2}, {}):
        for mode in ("max", "sum"):
            call = partial(nnf.embedding_bag, offsets=starts, mode=mode, **more)
            read = partial(_differentiate_loss, lambda t, c=call: c(rows, t), table)
            yield EdgeCase("embedding_bag", f"{mode} {more}", read)
        for frequency in (True, False):
            call = partial(nnf.embedding, scale_grad_by_freq=frequency, **more)
            read = partial(_differentiate_loss, lambda t, c=call: c(rows, t), table)
            yield EdgeCase("embedding", f"{frequency} {more}", read)


def _embed_bags(table: Tensor, places: Tensor) -> Tensor:
    leaf = table.detach().requires_grad_()
    bags = nnf.embedding_bag(places.view(7, 5), leaf, mode="max")
    return torch.autograd.grad(bags.sum(), leaf)[0]


def _embed(table: Tensor, places: Tensor) -> Tensor:
    leaf = table.detach().requires_grad_()
    return torch.autograd.grad(nnf.embedding(places, leaf, 2).sum(), leaf)[0]


def _align(scores: Tensor, lengths: list[int], kind: torch.dtype, *, infinity: bool) -> Tensor:
    leaf = scores.detach().requires_grad_()
    targets = torch.tensor([[1, 2, 2], [3, 4, 0]], dtype=kind)
    loss = nnf.ctc_loss(leaf, targets, lengths, [3, 2], reduction="none", zero_infinity=infinity)
    return torch.autograd.grad(loss.sum(), leaf)[0]


@cache
def list_cases() -> list[EdgeCase]:
    """Return all cases; the same ones in every process."""
    torch.manual_seed(0)
    return [
        *list_update_cases(),
        *list_output_cases(),
        *list_gradient_cases(),
        *list_sample_cases(),
        *list_dtype_cases(),
        *list_value_cases(),
        *list_loss_cases(),
        *list_count_cases(),
        *list_row_cases(),
        *list_place_cases(),
        *list_lookup_cases(),
    ]
