"""All cases of ``d9m audit ops``, and those that are neither scattering nor spatial."""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lightning_d9m.audit.ops.case import FLOATS, Call, Case, Inputs, NotHereError
from lightning_d9m.audit.ops.cases_scattering import list_scattering_cases
from lightning_d9m.audit.ops.cases_spatial import list_spatial_cases


@cache
def list_cases() -> tuple[Case, ...]:
    """Return every case, in the order in which they run."""
    return (*list_scattering_cases(), *list_spatial_cases(), *_list_other_cases())


def _list_other_cases() -> Iterator[Case]:
    for name, call in (("median", "median"), ("nanmedian", "nanmedian"), ("topk", "topk")):
        yield Case(
            op=name,
            parameters={"rows": 256, "columns": 1024, "distinct": 5},
            make=_ranked(call),
            documented=(("torch.median", ""),) if name == "median" else (),
            quick=True,
        )
    yield Case(
        op="kthvalue",
        parameters={"rows": 256, "columns": 1024, "distinct": 5},
        make=_ranked("kthvalue"),
        documented=(("torch.kthvalue", ""),),
        quick=True,
    )
    for length in (10_000, 1_000_000):
        yield Case(
            op="cumsum",
            parameters={"length": length},
            make=_on_one(torch.cumsum, length, 0),
            documented=(("torch.cumsum", ""),),
            quick=length < 1_000_000,  # noqa: PLR2004 - the smaller one
        )
        yield Case(
            op="sum", parameters={"length": length}, make=_on_one(torch.sum, length), quick=True
        )
    yield Case(op="mm", parameters={"side": 256}, make=_multiply, quick=True)
    yield Case(
        op="bmm_sparse",
        parameters={"side": 128, "entries": 4096},
        make=_multiply_sparse,
        documented=(("torch.bmm", "sparse"),),
        quick=True,
        dtypes=FLOATS[:2],
    )
    yield Case(
        op="lstsq",
        parameters={"rows": 100, "columns": 64},
        make=_least_squares,
        quick=True,
        dtypes=FLOATS[:2],
    )
    yield Case(
        op="cdist_backward",
        parameters={"rows": 256, "norm": 1},
        make=_distances,
        quick=True,
        dtypes=FLOATS[:2],
    )
    yield Case(op="batch_norm_backward", parameters={"side": 32}, make=_batch_norm, quick=True)
    yield Case(op="layer_norm_backward", parameters={"rows": 4096}, make=_layer_norm, quick=True)
    for dims in (1, 2):
        yield Case(
            op="nll_loss2d" if dims == 2 else "nll_loss",  # noqa: PLR2004 - dimensions
            parameters={"side": 64, "classes": 21},
            make=_nll(dims),
            documented=(("torch.nn.NLLLoss", ""),),
            quick=True,
        )
    yield Case(
        op="ctc_loss_backward",
        parameters={"steps": 100, "labels": 64},
        make=_ctc(torch.int64),
        documented=(("torch.nn.CTCLoss", ""),),
        quick=True,
        dtypes=FLOATS[:2],
    )
    yield Case(
        op="ctc_loss_cudnn",
        parameters={"steps": 100, "labels": 64},
        make=_ctc(torch.int32),
        documented=(("torch.nn.CTCLoss", ""),),
        quick=True,
        dtypes=FLOATS[:1],
        devices=("cuda",),
    )
    yield Case(op="rnn_cudnn", parameters={"steps": 32, "hidden": 64}, make=_lstm, quick=True)
    for length in (64, 512):
        yield Case(
            op="scaled_dot_product_attention_backward",
            parameters={"length": length, "heads": 4},
            make=_attend(length),
            quick=length == 64,  # noqa: PLR2004 - the smaller one
        )
    yield Case(
        op="flash_attn_package_backward",
        parameters={"length": 512},
        make=_flash,
        quick=True,
        dtypes=("float16",),
        devices=("cuda",),
    )
    yield Case(
        op="resize_quantized",
        parameters={"values": 1_000},
        make=_resize,
        documented=(("torch.Tensor.resize_", "quantized"),),
        quick=True,
        dtypes=FLOATS[:1],
    )


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


def _multiply_sparse(inputs: Inputs) -> Call:
    index = torch.stack([inputs.whole(high, 4096) for high in (4, 128, 128)])
    sparse = torch.sparse_coo_tensor(
        index, inputs.normal(4096), (4, 128, 128), check_invariants=True
    )
    dense = inputs.normal(4, 128, 32)
    return lambda: torch.bmm(sparse, dense)


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
