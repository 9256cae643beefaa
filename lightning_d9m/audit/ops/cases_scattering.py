"""Cases in which several values go to one place: scatter, index, count, gradients of reads."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lightning_d9m.audit.ops.case import FLOATS, Call, Case, Inputs, Make, called

# Numbers of values and of places: few and many duplicates, and one place for all.
SIZES = ((1_000, 100), (1_000, 1_000), (100_000, 1_000), (100_000, 100_000), (2_000_000, 50))
ALL_IN_ONE = (100_000, 1)
_QUICK = (100_000, 1_000)

# A call on (target, places, values). It is called often, so it must not change them.
Scatter = Callable[[Tensor, Tensor, Tensor], Tensor]


def _list_sized(
    op: str,
    make: Callable[..., Call],
    *documented: str,
    quick: tuple[int, int] = _QUICK,
    entry: str = "",
) -> Iterator[Case]:
    """Yield a case for each number of values and of places; ``make`` gets both."""
    for values, places in (*SIZES, ALL_IN_ONE):
        yield Case(
            op=op,
            parameters={"values": values, "places": places, "ratio": places / values},
            make=partial(make, values=values, places=places),
            documented=documented,
            quick=(values, places) == quick,
            entry=entry,
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


def _rows() -> Iterator[Case]:
    """Yield additions of whole rows, in the shapes of Shanmugavelu et al. 2024."""
    for side, ratio in ((100, 0.1), (100, 0.5), (100, 1.0), (1000, 0.5)):

        def make(inputs: Inputs, side: int = side, ratio: float = ratio) -> Call:
            rows = int(side * ratio)
            target, given = inputs.normal(side, side), inputs.normal(rows, side)
            index = inputs.whole(rows, rows)
            return lambda: target.index_add(0, index, given)

        quick = side == 1000  # noqa: PLR2004 - the largest
        shape, listed = {"side": side, "ratio": ratio}, ("torch.index_add",)
        yield Case("index_add", shape, make, listed, quick=quick)


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


def _coalesce(inputs: Inputs) -> Call:
    index, given = inputs.whole(100, 2, 100_000), inputs.normal(100_000)

    def call() -> Tensor:
        matrix = torch.sparse_coo_tensor(index, given, (100, 100), check_invariants=False)
        return matrix.coalesce().values()

    return call


def list_scattering_cases() -> Iterator[Case]:
    """Yield the cases of this module."""
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
    yield from _rows()
    yield from _scattered("index_copy", _along("index_copy"), "torch.Tensor.index_copy")
    for reduce in ("mean", "prod", "amax"):
        yield from _scattered(
            f"index_reduce_{reduce}",
            _along("index_reduce", reduce),
            "torch.Tensor.index_reduce",
            near_one=reduce == "prod",
            entry="index_reduce",
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
    yield Case("sparse_coalesce", {"values": 100_000, "places": 10_000}, _coalesce, dtypes=wide)
    for values, places, quick in ((100_000, 1_000, True), (2_000_000, 50, False)):
        shape, listed = {"values": values, "places": places}, ("torch.bincount weights",)
        yield Case("bincount", shape, _count(values, places), listed, quick=quick)
        histogram = called(partial(torch.histc, bins=places, min=-1, max=1), [values])
        listed = ("torch.histc",)
        yield Case("histc", shape, histogram, listed, quick=quick, dtypes=wide)
