"""Edge cases of the patched ops; check_edge_cases.py runs them."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from patches.cases import (
    GRADIENT_CASES,
    SAMPLED,
    GradientCase,
    answer,
    compute,
    evaluate,
    load_infos,
    make_inputs,
)
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
MAX_UNPOOL = torch._C._nn.max_unpool2d  # it checks less than max_unpool2d
# Samples of an op in one dtype, in the others, and those that are kinds of edges of their own.
MOST_SAMPLES, FEW_SAMPLES, KINDS = 16, 2, 5
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


def _reduce(kind: str, index: Tensor, rows: Tensor, source: Tensor, out: Tensor) -> Tensor:
    return torch.scatter_reduce(rows, 0, index, source, kind, out=out)


def list_output_cases() -> Iterator[EdgeCase]:
    """Return calls with ``out=``, each with its own copies of the inputs."""
    index, inputs = torch.tensor([2, 0, 2]), (torch.randn(4, 3), torch.randn(3, 3))
    wide = index[:, None].expand(3, 3)
    calls: dict[str, Callable[..., object]] = {
        "index_add": lambda r, s, out: torch.index_add(r, 0, index, s, out=out),
        "scatter_add": lambda r, s, out: torch.scatter_add(r, 0, wide, s, out=out),
        "scatter add": lambda r, s, out: torch.scatter(r, 0, wide, s, reduce="add", out=out),
        "scatter_reduce prod": partial(_reduce, "prod", wide),
        "scatter_reduce mean": partial(_reduce, "mean", wide),
        "index_reduce mean": lambda r, s, out: torch.index_reduce(r, 0, index, s, "mean", out=out),
        "histc": lambda _, s, out: torch.histc(s, 4, out=out),
        "median": lambda _, s, out: torch.median(s, 0, out=(out, out.long())),
        "nanmedian": lambda _, s, out: torch.nanmedian(s, 0, out=(out, out.long())),
    }
    outputs: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor]], ...] = (
        ("out= empty", lambda *_: torch.empty(0)),
        ("out= of another shape", lambda *_: torch.empty(2, 2)),
        ("out= of another dtype", lambda *_: torch.empty(0, dtype=torch.int32)),
        ("out= strided", lambda *_: torch.empty(3, 4).t()),
        ("out= shared memory", lambda rows, _: rows),
        ("out= shared memory", lambda _, source: source),
    )

    def write(call: Callable[..., object], make_out: Callable[..., Tensor]) -> object:
        given = [part.clone() for part in inputs]
        result = call(*given, out=make_out(*given))
        return tuple(result) if isinstance(result, tuple) else result

    for name, call in calls.items():
        # torch's histc fills its input first, and its medians refuse it; the replacements need not.
        shares = name not in ("histc", "median", "nanmedian")
        for edge, make_out in outputs if shares else outputs[:-1]:
            yield EdgeCase(name, edge, partial(write, call, make_out))


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


def list_torch_cases() -> Iterator[EdgeCase]:
    """Return torch's own samples of the ops in each dtype, and the calls that torch refuses."""
    for info in load_infos():
        if info.name not in SAMPLED:
            continue
        name = f"{info.name.rpartition('.')[2]} {info.variant_test_name}".strip()
        whole = torch.float32 if info.supports_dtype(torch.float32, "cpu") else torch.int64
        # Updates have a case of each dtype already, whose 16-bit sums are compared with wider ones.
        others = () if info.name.startswith(("index_", "scatter")) else DTYPES
        for dtype in dict.fromkeys((whole, *others)):
            if not info.supports_dtype(dtype, "cpu"):
                continue
            smooth = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
            if name == "grid_sample" and dtype.itemsize == 2:
                smooth = False  # a rounded place may lie in another cell, which has other slopes
            samples = list(info.sample_inputs("cpu", dtype, requires_grad=smooth))
            most = min(MOST_SAMPLES if dtype == whole else FEW_SAMPLES, len(samples))
            chosen = Random(0).sample(samples, most)  # no secret
            for number, sample in enumerate(chosen):
                edge = f"sample {number % KINDS}" if dtype == whole else f"dtype {dtype}"
                for kind, run in (("", compute), ("gradient, ", evaluate))[: 1 + smooth]:
                    call = partial(_run_sample, run, info, sample)
                    # CUDA's kernel of max_unpool2d returns a contiguous tensor.
                    strides = "unpool" not in name
                    yield EdgeCase(name, f"{kind}{edge}", call, strides=strides)
        if info.error_inputs_func is not None:
            for number, error in enumerate(info.error_inputs("cpu")):
                call = partial(_run_sample, compute, info, error.sample_input)
                yield EdgeCase(name, f"refused {number}", call)


def _run_sample(run: Callable[..., tuple[Tensor, ...]], info: Any, sample: Any) -> object:
    outputs = run(info, sample)
    # Of several equal values torch's medians return any index.
    return outputs[:1] + outputs[2:] if info.name in ("median", "nanmedian") else outputs


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
    image, grid = torch.randn(0, 3, 5, 6), torch.rand(0, 4, 7, 2)
    sample = partial(nnf.grid_sample, align_corners=False)
    yield EdgeCase("grid_sample", "empty", partial(_differentiate, sample, image, grid))
    scores = torch.randn(9, 2, 5).log_softmax(2)
    for labels, counts in (([1, 2, 2, 3, 4], [3, 2]), ([], [0, 0])):
        arguments = torch.tensor(labels, dtype=torch.int64), [9, 7], counts
        call = partial(_differentiate, nnf.ctc_loss, scores, *arguments)
        yield EdgeCase("ctc_loss", "joined labels", call)
    scores, target = torch.randn(2, 5, 4, 3).log_softmax(1), torch.arange(24).view(2, 4, 3) % 5
    target[1, 0] = -100  # pixels that are ignored, which no mean counts
    for reduction in ("none", "mean"):
        call = partial(nnf.nll_loss, scores, target, reduction=reduction)
        yield EdgeCase("nll_loss2d", reduction, call)


def list_scan_cases() -> Iterator[EdgeCase]:
    """Return the cases of scans of one row, which torch has no samples of."""
    row = torch.randn(300)
    holed = row.clone()
    holed[7] = NAN
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
        yield EdgeCase(name, "gradient", partial(_differentiate, scan, row, 0))
    yield EdgeCase("cumprod", "in place", lambda: row.clone().cumprod_(0))
    yield EdgeCase("cumprod", "float64", partial(torch.cumprod, row, 0, dtype=torch.float64))
    yield EdgeCase("cumprod", "of integers", lambda: torch.arange(1, 9).cumprod(0, dtype=row.dtype))


def _differentiate(function: Callable[..., Tensor], values: Tensor, *arguments: object) -> Tensor:
    leaf = values.detach().requires_grad_()
    return torch.autograd.grad(function(leaf, *arguments).sum(), leaf)[0]


@cache
def list_cases() -> list[EdgeCase]:
    """Return all cases; the same ones in every process."""
    torch.manual_seed(0)
    return [
        *list_update_cases(),
        *list_output_cases(),
        *list_gradient_cases(),
        *list_torch_cases(),
        *list_value_cases(),
        *list_scan_cases(),
    ]
