"""All cases of ``d9m audit ops``: each is one op on one shape, with its inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lightning_d9m.errors import SettingError

Call: TypeAlias = Callable[[], Tensor | tuple[Tensor, ...]]
Scalar: TypeAlias = str | int | float | bool

FLOATS = ("float32", "float64", "bfloat16", "float16")
# For ops that torch does not have in half precision.
_WIDE = FLOATS[:2]
# Numbers of values and of places: few and many duplicates, and one place for all.
SIZES = ((1_000, 100), (1_000, 1_000), (100_000, 1_000), (100_000, 100_000), (2_000_000, 50))
ALL_IN_ONE = (100_000, 1)
_QUICK = (100_000, 1_000)

# A call on (target, places, values). It is called often, so it must not change them.
Scatter = Callable[[Tensor, Tensor, Tensor], Tensor]
Forward = Callable[[Tensor], Tensor]
# Side of an input by its number of dimensions, for --quick and otherwise.
_SIDES = {1: (256, 4096), 2: (24, 96), 3: (10, 24)}


class NotHereError(Exception):
    """A case cannot run here; the message contains the reason."""


class Inputs:
    """Generator of the inputs of a case: the same numbers on every device and in every condition.

    They are drawn on the CPU, rounded to ``drawn`` and converted to ``dtype``, so the oracle in
    float64 computes with the same numbers as the other conditions.

    Args:
        device: The device of the tensors.
        dtype: The dtype of floating-point tensors.
        drawn: The dtype that the numbers are rounded to; None for ``dtype``.
    """

    def __init__(self, device: str, dtype: torch.dtype, drawn: torch.dtype | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self._drawn = drawn or dtype
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        """Draw from the standard normal distribution."""
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(self._drawn).to(self.dtype).to(self.device)

    def leaf(self, *shape: int) -> Tensor:
        """Draw a tensor that requires its gradient."""
        return self.normal(*shape).requires_grad_()

    def whole(self, high: int, *shape: int) -> Tensor:
        """Draw integers from 0 to ``high`` - 1."""
        return torch.randint(high, shape, generator=self._generator).to(self.device)

    def gradient(self, output: Tensor, *leaves: Tensor) -> Call:
        """Return a call of the backward pass of ``output``; the graph is kept."""
        given = self.normal(*output.shape)
        return lambda: torch.autograd.grad(output, leaves, given, retain_graph=True)


Make: TypeAlias = Callable[[Inputs], Call]


def called(function: Callable[..., Tensor], *shapes: Sequence[int]) -> Make:
    """Return what makes calls of a function of tensors of these shapes."""

    def make(inputs: Inputs) -> Call:
        drawn = [inputs.normal(*shape) for shape in shapes]
        return lambda: function(*drawn)

    return make


def graded(function: Callable[..., Tensor], *shapes: Sequence[int]) -> Make:
    """Return what makes backward passes of a function of tensors of these shapes."""

    def make(inputs: Inputs) -> Call:
        leaves = [inputs.leaf(*shape) for shape in shapes]
        return inputs.gradient(function(*leaves), *leaves)

    return make


@dataclass(frozen=True)
class Case:
    """One op on one shape.

    Attributes:
        op: The op: its name in the catalog, or a more exact one.
        parameters: The shape; unique among the op's cases.
        make: Builds the inputs and returns the measured call. It runs within the condition, because
            some ops select their kernel in the forward pass.
        documented: The lines of torch's documentation about it: each the name, a blank, and words
            that only this line of that name contains.
        quick: Whether ``--quick`` runs it.
        dtypes: Names of the dtypes that it is defined for.
        devices: The types of device that have it; empty for all.
    """

    op: str
    parameters: Mapping[str, Scalar]
    make: Make
    documented: tuple[str, ...] = ()
    quick: bool = True
    dtypes: tuple[str, ...] = FLOATS
    devices: tuple[str, ...] = ()

    def key(self, dtype: str) -> str:
        """Return the unique name of the case in one dtype."""
        shape = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.op}({shape}) {dtype}"


@cache
def list_cases() -> tuple[Case, ...]:
    """Return every case, in the order in which they run."""
    return (*_list_scattering_cases(), *_list_spatial_cases(), *_list_other_cases())


def plan_cases(
    patterns: list[str], dtypes: list[str], *, quick: bool
) -> Iterator[tuple[Case, str]]:
    """Yield each case to measure, with each of its dtypes.

    Raises:
        SettingError: A pattern matches no op.
    """
    names = sorted({case.op for case in list_cases()})
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            alike = get_close_matches(pattern, names, n=1)
            hint = f"Did you mean {alike[0]}? " if alike else ""
            raise SettingError(
                f"--ops contains {pattern!r}, which matches no op of the audit. {hint}The ops are: "
                f"{', '.join(names)}."
            )
    for case in list_cases():
        chosen = not patterns or any(fnmatch(case.op, pattern) for pattern in patterns)
        if not chosen or (quick and not case.quick):
            continue
        for dtype in dtypes:
            # An op that exists in one dtype only is measured in it for any request.
            if dtype in case.dtypes or (len(case.dtypes) == 1 and dtype == dtypes[0]):
                yield case, dtype if dtype in case.dtypes else case.dtypes[0]


def _list_other_cases() -> Iterator[Case]:
    ranked = {"rows": 256, "columns": 1024, "distinct": 5}
    for name in ("median", "nanmedian", "topk", "kthvalue"):
        listed = (f"torch.{name}",) if name in {"median", "kthvalue"} else ()
        yield Case(name, ranked, _ranked(name), listed)
    for length in (10_000, 1_000_000):
        shape, quick = {"length": length}, length < 1_000_000  # noqa: PLR2004 - the smaller one
        for scan in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
            listed = ("torch.cumsum",) if scan is torch.cumsum else ()
            make = called(partial(scan, dim=0), [length])
            yield Case(scan.__name__, shape, make, listed, quick=quick)
    shape, listed = {"side": 128, "entries": 4096}, ("torch.bmm sparse",)
    yield Case("bmm_sparse", shape, _multiply_sparse(torch.bmm, 4, 128, 128), listed, dtypes=_WIDE)
    yield Case("sparse_mm", shape, _multiply_sparse(torch.sparse.mm, 128, 128), dtypes=_WIDE)
    solve = called(
        lambda left, right: torch.linalg.lstsq(left, right).solution, [100, 64], [100, 3]
    )
    yield Case("lstsq", {"rows": 100, "columns": 64}, solve, dtypes=_WIDE)
    for dims, op in ((1, "nll_loss"), (2, "nll_loss2d")):
        yield Case(op, {"side": 64, "classes": 21}, _nll(dims), ("torch.nn.NLLLoss",))
    shape, listed = {"steps": 100, "labels": 64}, ("torch.nn.CTCLoss",)
    yield Case("ctc_loss_backward", shape, _ctc(torch.int64), listed, dtypes=_WIDE)
    cudnn = _ctc(torch.int32)
    yield Case("ctc_loss_cudnn", shape, cudnn, listed, dtypes=FLOATS[:1], devices=("cuda",))
    yield Case("rnn_cudnn", {"steps": 32, "hidden": 64}, _lstm)
    for length, quick in ((64, True), (512, False)):
        make = graded(nnf.scaled_dot_product_attention, *[[4, 4, length, 32]] * 3)
        shape = {"length": length, "heads": 4}
        yield Case("scaled_dot_product_attention_backward", shape, make, quick=quick)
    shape, half = {"length": 512}, ("float16",)
    make = graded(_flash, *[[2, 512, 8, 64]] * 3)
    yield Case("flash_attn_package_backward", shape, make, dtypes=half, devices=("cuda",))
    listed = ("torch.Tensor.resize_ quantized",)
    make = called(_resize, [1_000])
    yield Case("resize_quantized", {"values": 1_000}, make, listed, dtypes=FLOATS[:1])


def _ranked(name: str) -> Make:
    def make(inputs: Inputs) -> Call:
        # Few distinct values: the index of an equal element may vary.
        rows = inputs.whole(5, 256, 1024).to(inputs.dtype)
        more = {"topk": (64,), "kthvalue": (500, 1)}.get(name, (1,))
        return lambda: tuple(getattr(torch, name)(rows, *more))

    return make


def _multiply_sparse(multiply: Callable[..., Any], *sizes: int) -> Make:
    def make(inputs: Inputs) -> Call:
        index = torch.stack([inputs.whole(high, 4096) for high in sizes])
        sparse = torch.sparse_coo_tensor(index, inputs.normal(4096), sizes, check_invariants=True)
        dense = inputs.normal(*sizes[:-1], 32)
        return lambda: multiply(sparse, dense)

    return make


def _nll(dims: int) -> Make:
    def make(inputs: Inputs) -> Call:
        shape = [64, 64] if dims == 2 else []  # noqa: PLR2004 - dimensions
        scores, target = inputs.normal(64, 21, *shape), inputs.whole(21, 64, *shape)
        return lambda: nnf.nll_loss(scores, target)

    return make


def _ctc(whole: torch.dtype) -> Make:
    def make(inputs: Inputs) -> Call:
        scores = inputs.normal(100, 8, 64).log_softmax(2).detach().requires_grad_()
        targets, lengths = inputs.whole(4, 8, 30) + 1, [torch.full((8,), n) for n in (100, 30)]
        # cuDNN takes int32 on the CPU only; the native kernel has int64.
        native = whole == torch.int64
        placed = targets if native else targets.flatten().cpu().to(whole)
        steps, labels = (part.to(whole) for part in lengths)
        with torch.backends.cudnn.flags(enabled=not native):
            loss = nnf.ctc_loss(scores, placed, steps, labels, reduction="sum")
        return lambda: torch.autograd.grad(loss, scores, retain_graph=True)

    return make


def _lstm(inputs: Inputs) -> Call:
    torch.manual_seed(0)
    rnn = torch.nn.LSTM(64, 64, 2).to(inputs.device, inputs.dtype)
    steps = inputs.leaf(32, 8, 64)
    return inputs.gradient(rnn(steps)[0], steps, *rnn.parameters())


def _flash(*parts: Tensor) -> Tensor:
    if find_spec("flash_attn") is None:
        raise NotHereError("The package flash_attn is not installed.")
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    output: Tensor = flash_attn_func(*parts)
    return output


def _resize(given: Tensor) -> Tensor:
    quantized = torch.quantize_per_tensor(given, 0.1, 0, torch.qint8)
    return quantized.resize_(2_000).int_repr()


def _list_sized(
    op: str,
    make: Callable[..., Call],
    *documented: str,
    quick: tuple[int, int] = _QUICK,
) -> Iterator[Case]:
    """Yield a case for each number of values and of places; ``make`` gets both."""
    for values, places in (*SIZES, ALL_IN_ONE):
        yield Case(
            op=op,
            parameters={"values": values, "places": places, "ratio": places / values},
            make=partial(make, values=values, places=places),
            documented=documented,
            quick=(values, places) == quick,
        )


def _scattered(
    op: str, scatter: Scatter, *documented: str, near_one: bool = False, **options: Any
) -> Iterator[Case]:
    def make(inputs: Inputs, values: int, places: int) -> Call:
        target = inputs.normal(places)
        given = inputs.normal(values)
        if near_one:  # a product of many neither vanishes nor overflows
            target, given = target * 1e-3 + 1, given * 1e-3 + 1
        index = inputs.whole(places, values)
        return lambda: scatter(target, index, given)

    return _list_sized(op, make, *documented, **options)


def _read(op: str, read: Callable[[Tensor, Tensor], Tensor], *documented: str) -> Iterator[Case]:
    """Yield the gradients of reading many values from few places."""

    def make(inputs: Inputs, values: int, places: int) -> Call:
        source = inputs.leaf(places)
        return inputs.gradient(read(source, inputs.whole(places, values)), source)

    return _list_sized(op, make, *documented)


def _along(method: str, *more: str) -> Scatter:
    """Return a method of a tensor that scatters along its only dimension."""
    return lambda target, index, given: getattr(target, method)(0, index, given, *more)


def _embed(inputs: Inputs) -> Call:
    table, rows = inputs.leaf(1000, 64), inputs.whole(1000, 8192)
    return inputs.gradient(nnf.embedding(rows, table), table)


def _embed_scaled(inputs: Inputs) -> Call:
    table, rows = inputs.normal(500, 64), inputs.whole(500, 8192)
    return lambda: nnf.embedding(rows, table.clone(), max_norm=1.0)


def _bag(mode: str) -> Make:
    def make(inputs: Inputs) -> Call:
        table, rows = inputs.leaf(1000, 64), inputs.whole(1000, 8192)
        starts = torch.arange(0, 8192, 8, device=inputs.device)
        return inputs.gradient(nnf.embedding_bag(rows, table, starts, mode=mode), table)

    return make


def _count(values: int, places: int) -> Make:
    def make(inputs: Inputs) -> Call:
        index, weights = inputs.whole(places, values), inputs.normal(values)
        return lambda: torch.bincount(index, weights, places)

    return make


def _repeat(inputs: Inputs) -> Call:
    source, times = inputs.leaf(1_000), inputs.whole(200, 1_000)
    return inputs.gradient(torch.repeat_interleave(source, times), source)


def _list_scattering_cases() -> Iterator[Case]:
    """Yield cases in which several values go to one place: scatter, index, count, reads."""
    put = "torch.Tensor.put_ accumulate="
    yield from _scattered(
        "index_put_accumulate",
        lambda t, i, v: t.index_put((i,), v, accumulate=True),
        "torch.Tensor.index_put accumulate=True",
        quick=SIZES[-1],
    )
    index_put = "torch.Tensor.index_put accumulate=False"
    yield from _scattered("index_put", lambda t, i, v: t.index_put((i,), v), index_put)
    yield from _scattered("put_", lambda t, i, v: t.clone().put_(i, v), f"{put}False")
    yield from _scattered(
        "put_accumulate", lambda t, i, v: t.clone().put_(i, v, accumulate=True), f"{put}True"
    )
    for name, line in (("scatter_add", "scatter_add_"), ("scatter", "scatter src")):
        yield from _scattered(name, _along(name), f"torch.Tensor.{line}")
    yield from _scattered("scatter_with_reduce", lambda t, i, v: t.scatter(0, i, v, reduce="add"))
    for reduce in ("sum", "mean", "prod", "amax"):
        # From 2.15 on one line covers every reduction, on CUDA and on Apple's devices.
        words = (f"reduce='{reduce}'", "CUDA or MPS") if reduce != "amax" else ()
        yield from _scattered(
            f"scatter_reduce_{reduce}",
            _along("scatter_reduce", reduce),
            *(f"torch.Tensor.scatter_reduce {text}" for text in words),
            near_one=reduce == "prod",
        )
    yield from _scattered("index_add", _along("index_add"), "torch.index_add")
    yield from _scattered("index_copy", _along("index_copy"), "torch.Tensor.index_copy")
    for reduce in ("mean", "prod", "amax"):
        yield from _scattered(
            f"index_reduce_{reduce}",
            _along("index_reduce", reduce),
            "torch.Tensor.index_reduce",
            near_one=reduce == "prod",
        )
    yield from _read("gather_backward", lambda t, i: t.gather(0, i), "torch.gather")
    yield from _read(
        "index_select_backward", lambda t, i: t.index_select(0, i), "torch.index_select"
    )
    yield from _read("getitem_backward", lambda t, i: t[(i,)], "torch.Tensor.__getitem__")
    # Its gradient is `put_` with accumulate; the documentation of the flag does not mention it.
    yield from _read("take_backward", lambda t, i: t.take(i))
    rows = {"rows": 8192, "table": 1000, "features": 64}
    yield Case("embedding_dense_backward", rows, _embed, ("torch.nn.Embedding",))
    yield Case("embedding_max_norm", rows, _embed_scaled)
    for mode, word in (("sum", "MPS"), ("mean", "MPS"), ("max", "max")):
        listed = (f"torch.nn.EmbeddingBag {word}",)
        yield Case(f"embedding_bag_{mode}_backward", rows, _bag(mode), listed)
    shape, listed = {"values": 1_000, "times": 100}, ("torch.repeat_interleave",)
    yield Case("repeat_interleave_backward", shape, _repeat, listed)
    wide = FLOATS[:2]
    for values, places, quick in ((100_000, 1_000, True), (2_000_000, 50, False)):
        shape, listed = {"values": values, "places": places}, ("torch.bincount weights",)
        yield Case("bincount", shape, _count(values, places), listed, quick=quick)
        histogram = called(partial(torch.histc, bins=places, min=-1, max=1), [values])
        listed = ("torch.histc",)
        yield Case("histc", shape, histogram, listed, quick=quick, dtypes=wide)


def _differentiated(
    op: str,
    dims: int,
    forward: Forward,
    documented: str | None = None,
    **parameters: Scalar,
) -> Iterator[Case]:
    """Yield the gradients of ``forward`` for a small and a large input of 4 x 8 channels."""
    for size, side in enumerate(_SIDES[dims]):
        yield Case(
            op=op,
            parameters={"side": side, **parameters},
            make=graded(forward, [4, 8, *[side] * dims]),
            documented=(documented,) if documented else (),
            quick=size == 0,
        )


def _convolved(dims: int, *, transposed: bool) -> Iterator[Case]:
    name = f"{'ConvTranspose' if transposed else 'Conv'}{dims}d"
    convolve = getattr(nnf, f"conv{'_transpose' if transposed else ''}{dims}d")
    for size, side in enumerate(_SIDES[dims]):
        shapes = [4, 8, *[side] * dims], [8, 8, *[3] * dims]
        for suffix, wrapped in (("", called), ("_backward", graded)):
            yield Case(
                op=f"{name.lower()}{suffix}",
                parameters={"side": side, "kernel": 3, "stride": 2},
                make=wrapped(partial(convolve, stride=2), *shapes),
                documented=(f"torch.nn.{name}",),
                quick=size == 0,
            )


def _unpooled(dims: int) -> Iterator[Case]:
    unpool = getattr(nnf, f"max_unpool{dims}d")
    for size, side in enumerate(_SIDES[dims]):
        for duplicates in (False, True):

            def make(inputs: Inputs, side: int = side, duplicates: bool = duplicates) -> Call:
                image = inputs.normal(4, 8, *[side] * dims)
                pool = getattr(nnf, f"max_pool{dims}d")
                values, places = pool(image, 2, return_indices=True)
                if duplicates:  # overlapping windows choose one input several times
                    places = places // 8 * 8
                return lambda: unpool(values, places, 2)

            yield Case(
                op=f"max_unpool{dims}d",
                parameters={"side": side, "duplicates": duplicates},
                make=make,
                documented=(f"torch.nn.MaxUnpool{dims}d",),
                quick=size == 0,
            )


def _fractional(dims: int) -> Iterator[Case]:
    pool = getattr(nnf, f"fractional_max_pool{dims}d")

    def forward(image: Tensor) -> Tensor:
        planes = image.shape[:2]
        starts = torch.linspace(0.1, 0.9, planes.numel() * dims, dtype=image.dtype)
        starts = starts.view(*planes, dims).to(image.device)
        half = [image.shape[-1] // 2] * dims
        pooled: Tensor = pool(image, 3, half, _random_samples=starts)
        return pooled

    name = f"fractional_max_pool{dims}d_backward"
    yield from _differentiated(name, dims, forward, f"torch.nn.FractionalMaxPool{dims}d")


def _pooled() -> Iterator[Case]:
    for name, dims in (("Avg", 2), ("Avg", 3), ("Max", 2), ("Max", 3)):
        pool = getattr(nnf, f"{name.lower()}_pool{dims}d")
        listed = None if (name, dims) == ("Avg", 2) else f"torch.nn.{name}Pool{dims}d"
        forward = partial(pool, kernel_size=3, stride=2, padding=1)
        yield from _differentiated(f"{name.lower()}_pool{dims}d_backward", dims, forward, listed)
    for dims in (2, 3):
        for kind, label in (("avg", "Avg"), ("max", "Max")):
            pool = getattr(nnf, f"adaptive_{kind}_pool{dims}d")
            # Overlapping windows share inputs; torch lists no adaptive 3-D max pooling.
            listed = None if (kind, dims) == ("max", 3) else f"torch.nn.Adaptive{label}Pool{dims}d"
            for output in (5, 32):
                name = f"adaptive_{kind}_pool{dims}d_backward"
                forward = partial(pool, output_size=output)
                yield from _differentiated(name, dims, forward, listed, output=output)
    for dims in (2, 3):
        yield from _fractional(dims)
    for dims in (1, 2, 3):
        yield from _unpooled(dims)


def _resampled() -> Iterator[Case]:
    resize: Callable[..., Tensor] = nnf.interpolate
    modes: tuple[tuple[str, int, str, Mapping[str, bool]], ...] = (
        ("linear", 1, "upsample_linear1d_backward", {}),
        ("bilinear", 2, "upsample_bilinear2d_backward", {}),
        ("bicubic", 2, "upsample_bicubic2d_backward", {}),
        ("trilinear", 3, "upsample_trilinear3d_backward", {}),
        ("nearest", 2, "upsample_nearest_backward", {}),
        ("bilinear", 2, "upsample_bilinear2d_aa_backward", {"antialias": True}),
        ("bicubic", 2, "upsample_bicubic2d_aa_backward", {"antialias": True}),
    )
    for mode, dims, op, more in modes:
        # For Apple's devices torch does not specify the cases.
        words = "some cases" if more else f"``{mode}``"
        listed = None if mode == "nearest" else f"torch.nn.functional.interpolate {words}"
        for factor in (2.0, 0.5):
            forward = partial(resize, scale_factor=factor, mode=mode, **more)
            yield from _differentiated(op, dims, forward, listed, factor=factor)


def _sampled() -> Iterator[Case]:
    for dims in (2, 3):
        for size, side in enumerate(_SIDES[dims]):
            for crowd in (1.0, 0.05):  # spread of the samples: over all inputs, or a few

                def sample(image: Tensor, grid: Tensor, crowd: float = crowd) -> Tensor:
                    return nnf.grid_sample(image, grid * crowd, align_corners=False)

                yield Case(
                    op=f"grid_sampler_{dims}d_backward",
                    parameters={"side": side, "crowd": crowd},
                    make=graded(sample, [4, 8, *[side] * dims], [4, *[side] * dims, dims]),
                    documented=("torch.nn.functional.grid_sample",),
                    quick=size == 0 and crowd < 1,
                )


def _padded() -> Iterator[Case]:
    for dims in (1, 2, 3):
        for mode, kind in (("reflect", "Reflection"), ("replicate", "Replication")):
            forward = partial(nnf.pad, pad=[7] * (2 * dims), mode=mode)
            name, listed = f"{kind.lower()}_pad{dims}d_backward", f"torch.nn.{kind}Pad{dims}d"
            yield from _differentiated(name, dims, forward, listed, pad=7)


def _list_spatial_cases() -> Iterator[Case]:
    """Yield cases on images and volumes: convolution, pooling, resampling, padding."""
    for dims in (1, 2, 3):
        yield from _convolved(dims, transposed=False)
        yield from _convolved(dims, transposed=True)
    yield from _pooled()
    yield from _resampled()
    yield from _sampled()
    yield from _padded()
