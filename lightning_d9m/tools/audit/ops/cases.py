"""All cases of ``d9m audit ops``: each is one op on one shape, with its inputs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lightning_d9m.engine.ledger.format.records import Scalar
from lightning_d9m.errors import SettingError

MeasuredCall: TypeAlias = Callable[[], Tensor | tuple[Tensor, ...]]

FLOATS = ("float32", "float64", "bfloat16", "float16")
# For ops that torch does not have in half precision.
_WIDE = FLOATS[:2]
# Numbers of values and of places: few and many duplicates, and one place for all.
SIZES = (
    *((1_000, 100), (1_000, 1_000), (100_000, 1_000), (100_000, 100_000), (2_000_000, 50)),
    (100_000, 1),
)
# Side of an input by its number of dimensions, for --quick and otherwise.
# --quick takes two minutes with the small ones; in large ones more threads can race.
_SIDES = {1: (256, 4096), 2: (24, 96), 3: (10, 24)}
_SIDE = -1  # stands for it in a shape


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
        # CUDA's generator draws other numbers than the CPU's.
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        """Draw from the standard normal distribution."""
        # float64 of the oracle has the rounded values, so its distance to the others is theirs
        # alone.
        drawn = torch.randn(shape, generator=self._generator, device="cpu")
        return drawn.to(self._drawn).to(self.dtype).to(self.device)

    def whole(self, high: int, *shape: int) -> Tensor:
        """Draw integers from 0 to ``high`` - 1."""
        return torch.randint(high, shape, generator=self._generator, device="cpu").to(self.device)


Draw: TypeAlias = tuple[int, ...] | Callable[[Inputs], Tensor]


def whole(high: int, *shape: int) -> Draw:
    """Return what draws a tensor of integers from 0 to ``high`` - 1."""
    return lambda inputs: inputs.whole(high, *shape)


def _sparse(*shape: int) -> Draw:
    def draw(inputs: Inputs) -> Tensor:
        index = torch.stack([inputs.whole(high, 4096) for high in shape])
        return torch.sparse_coo_tensor(
            index, inputs.normal(4096), shape, check_invariants=True, device=inputs.device
        )

    return draw


@dataclass(frozen=True)
class Case:
    """One op on one shape.

    Attributes:
        op: The op: its name in the catalog, or a more exact one. If it ends with ``_backward``, the
            gradients of all floating-point inputs are measured.
        parameters: The shape; unique among the op's cases.
        function: A function of the inputs. It is called often, so it must not change them.
        draws: Draw the inputs; a shape stands for normal numbers.
        quick: Whether ``--quick`` runs it.
        dtypes: Names of the dtypes that it is defined for.
        devices: The types of device that have it; empty for all.
    """

    op: str
    parameters: Mapping[str, Scalar]
    function: Callable[..., Any]
    draws: tuple[Draw, ...] = ()
    quick: bool = True
    dtypes: tuple[str, ...] = FLOATS
    devices: tuple[str, ...] = ()

    def key(self, dtype: str) -> str:
        """Return the unique name of the case in one dtype."""
        shape = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.op}({shape}) {dtype}"

    def make(self, inputs: Inputs) -> MeasuredCall:
        """Draw the inputs and return the measured call.

        It runs within the condition, because some ops select their kernel in the forward pass.
        """
        drawn = [
            inputs.normal(*draw) if isinstance(draw, tuple) else draw(inputs) for draw in self.draws
        ]
        if not self.op.endswith("_backward"):
            return lambda: self.function(*drawn)
        # The forward pass runs once: what is measured is the gradient alone.
        leaves = [tensor.requires_grad_() for tensor in drawn if tensor.is_floating_point()]
        output = self.function(*drawn)
        gradient = inputs.normal(*output.shape)
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)


@cache
def list_cases() -> tuple[Case, ...]:
    """Return every case, in the order in which they run."""
    return (
        *_list_scattering_cases(),
        *_list_embedding_cases(),
        *_list_pooling_cases(),
        *_list_resampling_cases(),
        *_list_other_cases(),
    )


def plan_cases(
    patterns: list[str], dtypes: list[str], *, quick: bool
) -> Iterator[tuple[Case, str]]:
    """Yield each case to measure, with each of its dtypes.

    Raises:
        SettingError: A pattern matches no op.
    """
    # A pattern without a match would measure nothing, and say that nothing varied.
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


def _list_scattering_cases() -> Iterator[Case]:
    """Yield cases in which several values go to one place, and gradients of reads from one."""
    functions: list[tuple[str, Callable[..., Any]]] = [
        ("index_put", lambda t, i, v: t.index_put((i,), v)),
        ("index_put_accumulate", lambda t, i, v: t.index_put((i,), v, accumulate=True)),
        # They change their tensor, and a case runs many times on the same inputs.
        ("put_", lambda t, i, v: t.clone().put_(i, v)),
        ("put_accumulate", lambda t, i, v: t.clone().put_(i, v, accumulate=True)),
        ("scatter_add", lambda t, i, v: t.scatter_add(0, i, v)),
        ("scatter", lambda t, i, v: t.scatter(0, i, v)),
        ("scatter_with_reduce", lambda t, i, v: t.scatter(0, i, v, reduce="add")),
        ("index_add", lambda t, i, v: t.index_add(0, i, v)),
        ("index_copy", lambda t, i, v: t.index_copy(0, i, v)),
        ("gather_backward", lambda t, i: t.gather(0, i)),
        ("index_select_backward", lambda t, i: t.index_select(0, i)),
        ("getitem_backward", lambda t, i: t[(i,)]),
        # Its gradient is `put_` with accumulate; the documentation of the flag does not mention it.
        ("take_backward", lambda t, i: t.take(i)),
    ]
    for reduce in ("sum", "mean", "prod", "amax"):
        functions.append((f"scatter_reduce_{reduce}", partial(_reduce, "scatter_reduce", reduce)))
        if reduce != "sum":
            functions.append((f"index_reduce_{reduce}", partial(_reduce, "index_reduce", reduce)))
    for op, function in functions:
        for values, places in SIZES:
            draws = (places,), whole(places, values), (values,)
            yield Case(
                op=op,
                parameters={"values": values, "places": places, "ratio": places / values},
                function=function,
                draws=draws[:2] if op.endswith("_backward") else draws,
                quick=places == (50 if op == "index_put_accumulate" else 1_000) < values,
            )


def _reduce(method: str, reduce: str, target: Tensor, index: Tensor, given: Tensor) -> Any:
    if reduce == "prod":  # a product of many neither vanishes nor overflows
        target, given = target * 1e-3 + 1, given * 1e-3 + 1
    return getattr(target, method)(0, index, given, reduce)


def _list_embedding_cases() -> Iterator[Case]:
    """Yield cases that read or count rows, or repeat elements."""
    rows = {"rows": 8192, "table": 1000}
    draws: tuple[Draw, ...] = (1000, 64), whole(1000, 8192)

    def embed(table: Tensor, rows: Tensor, max_norm: float | None = None) -> Tensor:
        return nnf.embedding(rows, table.clone(), max_norm=max_norm)

    yield Case("embedding_dense_backward", rows, embed, draws)
    yield Case("embedding_max_norm", rows, partial(embed, max_norm=1.0), draws)

    def add_up(mode: str, table: Tensor, rows: Tensor) -> Tensor:
        starts = torch.arange(0, len(rows), 8, device=rows.device)
        return nnf.embedding_bag(rows, table, starts, mode=mode)

    for mode in ("sum", "mean", "max"):
        yield Case(f"embedding_bag_{mode}_backward", rows, partial(add_up, mode), draws)
    shape, draws = {"values": 1_000, "times": 100}, ((1_000,), whole(200, 1_000))
    yield Case("repeat_interleave_backward", shape, torch.repeat_interleave, draws)
    for values, places, quick in ((100_000, 1_000, True), (2_000_000, 50, False)):
        shape = {"values": values, "places": places}
        draws = whole(places, values), (values,)
        yield Case("bincount", shape, partial(torch.bincount, minlength=places), draws, quick)
        count = partial(torch.histc, bins=places, min=-1, max=1)
        yield Case("histc", shape, count, draws[1:], quick, _WIDE)


def _list_images(
    op: str,
    dims: int,
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    **parameters: Scalar,
) -> Iterator[Case]:
    """Yield the cases of a function of a small and a large input of 4 x 8 channels.

    It may take further tensors, of more ``shapes``.
    """
    for size, side in enumerate(_SIDES[dims]):
        yield Case(
            op=op,
            parameters={"side": side, **parameters},
            function=function,
            draws=tuple(
                tuple(side if length == _SIDE else length for length in shape)
                for shape in ((4, 8, *[_SIDE] * dims), *shapes)
            ),
            quick=size == 0,
        )


def _list_pooling_cases() -> Iterator[Case]:
    for dims in (1, 2, 3):
        for duplicates in (False, True):
            unpool = partial(_unpool, dims, duplicates=duplicates)
            yield from _list_images(f"max_unpool{dims}d", dims, unpool, duplicates=duplicates)
    for dims in (2, 3):
        fractional = f"fractional_max_pool{dims}d"
        pool = partial(_pool_fractions, getattr(nnf, fractional))
        yield from _list_images(f"{fractional}_backward", dims, pool)
        for name in (f"avg_pool{dims}d", f"max_pool{dims}d"):
            # Overlapping windows share inputs.
            pool = partial(getattr(nnf, name), kernel_size=3, stride=2, padding=1)
            yield from _list_images(f"{name}_backward", dims, pool)
            for output in (5, 32):
                pool = partial(getattr(nnf, f"adaptive_{name}"), output_size=output)
                yield from _list_images(f"adaptive_{name}_backward", dims, pool, output=output)


def _unpool(dims: int, image: Tensor, *, duplicates: bool) -> Any:
    values, places = getattr(nnf, f"max_pool{dims}d")(image, 2, return_indices=True)
    # As overlapping windows do, which choose one input several times.
    places = places // 8 * 8 if duplicates else places
    return getattr(nnf, f"max_unpool{dims}d")(values, places, 2)


def _pool_fractions(pool: Callable[..., Any], image: Tensor) -> Any:
    planes, dims = image.shape[:2], image.dim() - 2
    # Without these samples the pooling draws its own, in each call.
    starts = torch.linspace(0.1, 0.9, planes.numel() * dims, dtype=image.dtype, device="cpu")
    starts = starts.view(*planes, dims).to(image.device)
    return pool(image, 3, [image.shape[-1] // 2] * dims, _random_samples=starts)


def _list_resampling_cases() -> Iterator[Case]:
    """Yield convolutions, interpolation, sampling and padding."""
    for dims in (1, 2, 3):
        for prefix, name in (("conv", "conv"), ("conv_transpose", "convtranspose")):
            function: Any = partial(getattr(nnf, f"{prefix}{dims}d"), stride=2)
            weight = (8, 8, *[3] * dims)
            for op in (f"{name}{dims}d", f"{name}{dims}d_backward"):
                yield from _list_images(op, dims, function, weight, kernel=3, stride=2)
        for mode, kind in (("reflect", "reflection"), ("replicate", "replication")):
            function = partial(nnf.pad, pad=[7] * (2 * dims), mode=mode)
            yield from _list_images(f"{kind}_pad{dims}d_backward", dims, function, pad=7)

    def sample(crowd: float, image: Tensor, grid: Tensor) -> Tensor:
        return nnf.grid_sample(image, grid * crowd, align_corners=False)

    for dims in (2, 3):
        for crowd in (1.0, 0.05):  # spread of the samples: over all inputs, or a few
            op, grid = f"grid_sampler_{dims}d_backward", (4, *[_SIDE] * dims, dims)
            yield from _list_images(op, dims, partial(sample, crowd), grid, crowd=crowd)
    for op, dims, mode, antialias in (
        ("linear1d", 1, "linear", False),
        ("bilinear2d", 2, "bilinear", False),
        ("bicubic2d", 2, "bicubic", False),
        ("trilinear3d", 3, "trilinear", False),
        ("nearest", 2, "nearest", False),
        ("bilinear2d_aa", 2, "bilinear", True),
        ("bicubic2d_aa", 2, "bicubic", True),
    ):
        for factor in (2.0, 0.5):
            more: Any = {"scale_factor": factor, "mode": mode, "antialias": antialias}
            function = partial(nnf.interpolate, **more)
            yield from _list_images(f"upsample_{op}_backward", dims, function, factor=factor)


def _list_other_cases() -> Iterator[Case]:
    """Yield ranks, scans, products of matrices, losses, recurrent layers and attention."""
    draws: tuple[Draw, ...] = (lambda inputs: inputs.whole(5, 256, 1024).to(inputs.dtype),)
    for name, more in (
        ("median", (1,)),
        ("nanmedian", (1,)),
        ("topk", (64,)),
        ("kthvalue", (500, 1)),
    ):
        # The index of an equal element may vary.
        shape: dict[str, Scalar] = {"rows": 256, "columns": 1024, "distinct": 5}
        yield Case(name, shape, lambda t, n=name, m=more: getattr(torch, n)(t, *m), draws)
    for length, quick in ((10_000, True), (1_000_000, False)):
        for name in ("cumsum", "cumprod", "logcumsumexp"):
            scan = partial(getattr(torch, name), dim=0)
            yield Case(name, {"length": length}, scan, ((length,),), quick)
    shape, draws = {"side": 128, "entries": 4096}, (_sparse(4, 128, 128), (4, 128, 32))
    yield Case("bmm_sparse", shape, torch.bmm, draws, dtypes=_WIDE)
    draws = _sparse(128, 128), (128, 32)
    yield Case("sparse_mm", shape, torch.sparse.mm, draws, dtypes=_WIDE)
    shape, draws = {"rows": 100, "columns": 64}, ((100, 64), (100, 3))
    yield Case("lstsq", shape, lambda a, b: torch.linalg.lstsq(a, b).solution, draws, dtypes=_WIDE)
    shape = {"side": 64, "classes": 21}
    for name, sides in (("nll_loss", ()), ("nll_loss2d", (64, 64))):
        draws = (64, 21, *sides), whole(21, 64, *sides)
        yield Case(name, shape, nnf.nll_loss, draws)
    shape, draws = {"steps": 100, "labels": 64}, ((100, 8, 64), whole(4, 8, 30))
    yield Case("ctc_loss_backward", shape, _align, draws, dtypes=_WIDE)
    name, cudnn, gpu = "ctc_loss_cudnn_backward", partial(_align, cudnn=True), ("cuda",)
    yield Case(name, shape, cudnn, draws, dtypes=FLOATS[:1], devices=gpu)
    shape, weights = {"steps": 32, "hidden": 64}, [(256, 64), (256, 64), (256,), (256,)] * 2
    draws = (32, 8, 64), *weights
    yield Case("rnn_cudnn_backward", shape, _remember, draws)
    for length, quick in ((64, True), (512, False)):
        name, shape = "scaled_dot_product_attention", {"length": length, "heads": 4}
        draws = ((4, 4, length, 32),) * 3
        yield Case(f"{name}_backward", shape, getattr(nnf, name), draws, quick=quick)
    draws = ((2, 512, 8, 64),) * 3
    name, half = "flash_attn_package_backward", ("float16",)
    yield Case(name, {"length": 512}, _flash, draws, dtypes=half, devices=gpu)
    yield Case("resize_quantized", {"values": 1_000}, _resize, ((1_000,),), dtypes=FLOATS[:1])


def _align(scores: Tensor, targets: Tensor, *, cudnn: bool = False) -> Tensor:
    """Return the CTC loss. cuDNN takes int32 on the CPU only; the native kernel has int64."""
    steps, labels = (
        torch.full((8,), length, dtype=torch.int32, device="cpu") for length in (100, 30)
    )
    placed = (targets + 1).flatten().cpu().int() if cudnn else targets + 1
    # torch chooses cuDNN by dtypes and lengths, so that both kernels need their own case.
    with torch.backends.cudnn.flags(enabled=cudnn):
        return nnf.ctc_loss(scores.log_softmax(2), placed, steps, labels, reduction="sum")


def _remember(steps: Tensor, *weights: Tensor) -> Tensor:
    """Return the output of an LSTM of two layers."""
    state = steps.new_zeros(2, steps.shape[1], 64)
    output: Tensor = torch.lstm(steps, (state, state), weights, True, 2, 0.0, True, False, False)[0]  # noqa: FBT003 - it takes no keywords
    return output


def _flash(*parts: Tensor) -> Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    output: Tensor = flash_attn_func(*parts)
    return output


def _resize(given: Tensor) -> Tensor:
    # resize_ leaves new elements uninitialized.
    quantized = torch.quantize_per_tensor(given, 0.1, 0, torch.qint8)
    return quantized.resize_(2_000).int_repr()
