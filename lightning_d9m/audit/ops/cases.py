"""All cases of ``d9m audit ops``, and those that are neither scattering nor spatial."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lightning_d9m.audit.ops.case import (
    FLOATS,
    Call,
    Case,
    Inputs,
    Make,
    NotHereError,
    called,
    graded,
)
from lightning_d9m.audit.ops.cases_scattering import list_scattering_cases
from lightning_d9m.audit.ops.cases_spatial import list_spatial_cases
from lightning_d9m.errors import SettingError

# For ops that torch does not have in half precision.
_WIDE = FLOATS[:2]


@cache
def list_cases() -> tuple[Case, ...]:
    """Return every case, in the order in which they run."""
    return (*list_scattering_cases(), *list_spatial_cases(), *_list_other_cases())


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
        yield Case("sum", shape, called(torch.sum, [length]))
    yield Case("mm", {"side": 256}, called(torch.mm, [256, 256], [256, 256]))
    shape, listed = {"side": 128, "entries": 4096}, ("torch.bmm sparse",)
    yield Case("bmm_sparse", shape, _multiply_sparse(torch.bmm, 4, 128, 128), listed, dtypes=_WIDE)
    yield Case("sparse_mm", shape, _multiply_sparse(torch.sparse.mm, 128, 128), dtypes=_WIDE)
    solve = called(
        lambda left, right: torch.linalg.lstsq(left, right).solution, [100, 64], [100, 3]
    )
    yield Case("lstsq", {"rows": 100, "columns": 64}, solve, dtypes=_WIDE)
    make = graded(partial(torch.cdist, p=1.0), [256, 16], [200, 16])
    yield Case("cdist_backward", {"rows": 256, "norm": 1}, make, dtypes=_WIDE)
    make = graded(_normalize, [8, 16, 32, 32], [16], [16])
    yield Case("batch_norm_backward", {"side": 32}, make)
    make = graded(lambda rows, *both: nnf.layer_norm(rows, [64], *both), [4096, 64], [64], [64])
    yield Case("layer_norm_backward", {"rows": 4096}, make)
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


def _normalize(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nnf.batch_norm(images, None, None, weight, bias, training=True)


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
