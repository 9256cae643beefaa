"""All cases of ``d9m audit ops``, and those that are neither scattering nor spatial."""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lightning_d9m.audit.ops.case import FLOATS, Call, Case, Inputs, NotHereError
from lightning_d9m.audit.ops.cases_scattering import list_scattering_cases
from lightning_d9m.audit.ops.cases_spatial import list_spatial_cases

# For ops that torch does not have in half precision.
_WIDE = FLOATS[:2]


@cache
def list_cases() -> tuple[Case, ...]:
    """Return every case, in the order in which they run."""
    return (*list_scattering_cases(), *list_spatial_cases(), *_list_other_cases())


def _list_other_cases() -> Iterator[Case]:
    ranked = {"rows": 256, "columns": 1024, "distinct": 5}
    for name in ("median", "nanmedian", "topk", "kthvalue"):
        listed = (f"torch.{name}",) if name in {"median", "kthvalue"} else ()
        yield Case(name, ranked, _ranked(name), listed)
    for length in (10_000, 1_000_000):
        shape, quick = {"length": length}, length < 1_000_000  # noqa: PLR2004 - the smaller one
        summed = _on_one(torch.cumsum, length, 0)
        yield Case("cumsum", shape, summed, ("torch.cumsum",), quick=quick)
        for name, scan in (("cumprod", torch.cumprod), ("logcumsumexp", torch.logcumsumexp)):
            yield Case(name, shape, _on_one(scan, length, 0), quick=quick)
        yield Case("sum", shape, _on_one(torch.sum, length))
    yield Case("mm", {"side": 256}, _multiply)
    shape, listed = {"side": 128, "entries": 4096}, ("torch.bmm sparse",)
    yield Case("bmm_sparse", shape, _multiply_sparse(torch.bmm, 4, 128, 128), listed, dtypes=_WIDE)
    yield Case("sparse_mm", shape, _multiply_sparse(torch.sparse.mm, 128, 128), dtypes=_WIDE)
    yield Case("lstsq", {"rows": 100, "columns": 64}, _least_squares, dtypes=_WIDE)
    yield Case("cdist_backward", {"rows": 256, "norm": 1}, _distances, dtypes=_WIDE)
    yield Case("batch_norm_backward", {"side": 32}, _batch_norm)
    yield Case("layer_norm_backward", {"rows": 4096}, _layer_norm)
    for dims, op in ((1, "nll_loss"), (2, "nll_loss2d")):
        yield Case(op, {"side": 64, "classes": 21}, _nll(dims), ("torch.nn.NLLLoss",))
    shape, listed = {"steps": 100, "labels": 64}, ("torch.nn.CTCLoss",)
    yield Case("ctc_loss_backward", shape, _ctc(torch.int64), listed, dtypes=_WIDE)
    cudnn = _ctc(torch.int32)
    yield Case("ctc_loss_cudnn", shape, cudnn, listed, dtypes=FLOATS[:1], devices=("cuda",))
    yield Case("rnn_cudnn", {"steps": 32, "hidden": 64}, _lstm)
    for length, quick in ((64, True), (512, False)):
        shape = {"length": length, "heads": 4}
        yield Case("scaled_dot_product_attention_backward", shape, _attend(length), quick=quick)
    shape, half = {"length": 512}, ("float16",)
    yield Case("flash_attn_package_backward", shape, _flash, dtypes=half, devices=("cuda",))
    listed = ("torch.Tensor.resize_ quantized",)
    yield Case("resize_quantized", {"values": 1_000}, _resize, listed, dtypes=FLOATS[:1])


def _on_one(function: Callable[..., Tensor], length: int, *more: int) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        given = inputs.normal(length)
        return lambda: function(given, *more)

    return make


def _ranked(name: str) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        # Few distinct values: the index of an equal element may vary.
        rows = inputs.whole(5, 256, 1024).to(inputs.dtype)
        more = {"topk": (64,), "kthvalue": (500, 1)}.get(name, (1,))
        return lambda: tuple(getattr(torch, name)(rows, *more))

    return make


def _multiply(inputs: Inputs) -> Call:
    left, right = inputs.normal(256, 256), inputs.normal(256, 256)
    return lambda: left @ right


def _multiply_sparse(multiply: Callable[..., Any], *sizes: int) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        index = torch.stack([inputs.whole(high, 4096) for high in sizes])
        sparse = torch.sparse_coo_tensor(index, inputs.normal(4096), sizes, check_invariants=True)
        dense = inputs.normal(*sizes[:-1], 32)
        return lambda: multiply(sparse, dense)

    return make


def _least_squares(inputs: Inputs) -> Call:
    left, right = inputs.normal(100, 64), inputs.normal(100, 3)
    return lambda: torch.linalg.lstsq(left, right).solution


def _distances(inputs: Inputs) -> Call:
    points, others = inputs.leaf(256, 16), inputs.normal(200, 16)
    return inputs.gradient(torch.cdist(points, others, p=1.0), points)


def _batch_norm(inputs: Inputs) -> Call:
    images, weight, bias = inputs.leaf(8, 16, 32, 32), inputs.leaf(16), inputs.leaf(16)
    output = nnf.batch_norm(images, None, None, weight, bias, training=True)
    return inputs.gradient(output, images, weight, bias)


def _layer_norm(inputs: Inputs) -> Call:
    rows, weight, bias = inputs.leaf(4096, 64), inputs.leaf(64), inputs.leaf(64)
    return inputs.gradient(nnf.layer_norm(rows, [64], weight, bias), rows, weight, bias)


def _nll(dims: int) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        shape = [64, 64] if dims == 2 else []  # noqa: PLR2004 - dimensions
        scores, target = inputs.normal(64, 21, *shape), inputs.whole(21, 64, *shape)
        return lambda: nnf.nll_loss(scores, target)

    return make


def _ctc(whole: torch.dtype) -> Callable[[Inputs], Call]:
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


def _attend(length: int) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        query, key, value = (inputs.leaf(4, 4, length, 32) for _ in range(3))
        output = nnf.scaled_dot_product_attention(query, key, value)
        return inputs.gradient(output, query, key, value)

    return make


def _flash(inputs: Inputs) -> Call:
    if find_spec("flash_attn") is None:
        raise NotHereError("The package flash_attn is not installed.")
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    parts = [inputs.leaf(2, 512, 8, 64) for _ in range(3)]
    return inputs.gradient(flash_attn_func(*parts), *parts)


def _resize(inputs: Inputs) -> Call:
    given = inputs.normal(1_000)

    def call() -> Tensor:
        quantized = torch.quantize_per_tensor(given, 0.1, 0, torch.qint8)
        return quantized.resize_(2_000).int_repr()

    return call
