"""Workloads of the patches, with sizes at which thousands of threads write to one output.

Each workload is one call of a patched op on a device. Gradients are called without the forward
pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as nnf
from torch import Tensor

Call = Callable[[], Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Workload:
    """One op on one shape.

    Attributes:
        op: The name in the catalog.
        shape: A description of the shape.
        make: Builds the inputs on a device and returns the call.
        make_deterministic: Builds torch's own deterministic version, if there is one; called with
            deterministic algorithms on.
    """

    op: str
    shape: str
    make: Callable[[str], Call]
    make_deterministic: Callable[[str], Call] | None = None


def _normal(device: str, *shape: int) -> Tensor:
    return _draw(0, shape, torch.get_default_dtype()).to(device, copy=True)


def _integers(device: str, high: int, *shape: int) -> Tensor:
    return _draw(high, shape, torch.int64).to(device, copy=True)


@lru_cache(maxsize=64)
def _draw(high: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw normal numbers, or integers below ``high``, once for all parts and devices."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draws = torch.Generator(device).manual_seed(int(bool(high)))
    if high:
        return torch.randint(high, shape, generator=draws, device=device)
    return torch.randn(shape, generator=draws, device=device, dtype=dtype)


def _gradient(forward: Callable[[Tensor], Tensor], *shape: int) -> Callable[[str], Call]:
    """Return a maker of the backward pass alone: the graph is kept."""

    def make(device: str) -> Call:
        leaf = _normal(device, *shape).requires_grad_()
        output = forward(leaf)
        gradient = _normal(device, *output.shape)
        return lambda: torch.autograd.grad(output, leaf, gradient, retain_graph=True)[0]

    return make


def _resample(op: str, mode: str, side: int, factor: int, dims: int, **more: bool) -> Workload:
    def forward(image: Tensor) -> Tensor:
        return nnf.interpolate(image, scale_factor=factor, mode=mode, **more)

    make = _gradient(forward, 4, 64, *[side] * dims)
    decomposed = mode in ("bilinear", "trilinear") and not more
    return Workload(op, f"{mode} {side} to {side * factor}", make, make if decomposed else None)


def _sample(
    dims: int, side: int, *, corners: bool = False, spread: float = 0.05
) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        image = _normal(device, 4, 32, *[side] * dims).requires_grad_()
        # A small spread: many samples read the same few elements. A great one: most are outside.
        grid = _normal(device, 4, *[side * 2] * dims, dims).mul(spread).requires_grad_()
        output = nnf.grid_sample(image, grid, align_corners=corners)
        gradient = _normal(device, *output.shape)
        return lambda: torch.autograd.grad(output, (image, grid), gradient, retain_graph=True)

    return make


def _unpool(device: str) -> Call:
    values, places = _normal(device, 8, 64, 64, 64), _integers(device, 512, 8, 64, 64, 64)
    return lambda: torch.ops.aten.max_unpool2d(values, places, [128, 128])


def _unpool3d(device: str) -> Call:
    values, places = _normal(device, 2, 32, 16, 32, 32), _integers(device, 512, 2, 32, 16, 32, 32)
    return lambda: torch.ops.aten.max_unpool3d(values, places, [32, 64, 64], [2] * 3, [0] * 3)


def _loss(device: str) -> Call:
    scores, target = _normal(device, 8, 21, 256, 256), _integers(device, 21, 8, 256, 256)
    return lambda: nnf.nll_loss(scores, target)


def _align(device: str) -> Call:
    scores = _normal(device, 300, 16, 64).log_softmax(2).requires_grad_()
    targets = _integers(device, 4, 16, 80) + 1
    lengths, label_lengths = [300] * 16, [80] * 16
    with torch.backends.cudnn.flags(enabled=False):
        loss = nnf.ctc_loss(scores, targets, lengths, label_lengths, reduction="sum")
    return lambda: torch.autograd.grad(loss, scores, retain_graph=True)[0]


def _align_peaked(device: str) -> Call:
    scores = _normal(device, 3000, 4, 64).mul(20).log_softmax(2).requires_grad_()
    targets = _integers(device, 63, 4, 200) + 1
    with torch.backends.cudnn.flags(enabled=False):
        loss = nnf.ctc_loss(scores, targets, [3000] * 4, [200] * 4, reduction="sum")
    return lambda: torch.autograd.grad(loss, scores, retain_graph=True)[0]


def _warp(device: str) -> Call:
    image = _normal(device, 1, 1, 128, 128, 128).requires_grad_()
    identity = torch.eye(3, 4, device=device)[None]
    grid = nnf.affine_grid(identity, list(image.shape), align_corners=False)
    grid = (grid + 0.02 * _normal(device, *grid.shape)).requires_grad_()
    output = nnf.grid_sample(image, grid, align_corners=False)
    gradient = _normal(device, *output.shape)
    return lambda: torch.autograd.grad(output, (image, grid), gradient, retain_graph=True)


def _histogram_of_integers(device: str) -> Call:
    values = _integers(device, 1001, 1 << 22).float()
    return lambda: torch.histc(values, 1000, 0, 1000)


def _bag(device: str) -> Call:
    table = _normal(device, 1000, 64).requires_grad_()
    rows = _integers(device, 8, 32768)
    starts = torch.arange(0, 32768, 8, device=device)
    output = nnf.embedding_bag(rows, table, starts, mode="max")
    gradient = _normal(device, *output.shape)
    return lambda: torch.autograd.grad(output, table, gradient, retain_graph=True)[0]


def _put(accumulate: bool) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        target, source = torch.zeros(4096, device=device), _normal(device, 1 << 20)
        places = _integers(device, 64, 1 << 20)
        return lambda: target.clone().put_(places, source, accumulate)

    return make


def _histogram(device: str) -> Call:
    values = _normal(device, 1 << 24)
    return lambda: torch.histc(values, 4, -1, 1)


def _count(device: str) -> Call:
    values, weights = _integers(device, 100, 1 << 22), _normal(device, 1 << 22)
    return lambda: torch.bincount(values, weights)


def _order(name: str) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        rows = _integers(device, 5, 2048, 4096).float()
        return lambda: tuple(getattr(torch, name)(rows, *((64, 1) if name == "topk" else (1,))))

    return make


def _scan(name: str) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        row = _normal(device, 1 << 22) * 1e-3 + 1
        return lambda: getattr(torch, name)(row, 0)

    return make


def _multiply_few(device: str) -> Call:
    target, factors = _normal(device, 1 << 24), _normal(device, 1024)
    places = _integers(device, 1 << 24, 1024)
    return lambda: target.scatter_reduce(0, places, factors, "prod")


def _add(features: int, *, skewed: bool = False) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        target, source = _normal(device, 4096, features), _normal(device, 1 << 17, features)
        index = _integers(device, 4096, 1 << 17)
        if skewed:  # half of all rows go to one place
            index = torch.where(index % 2 == 0, 0, index)
        return lambda: target.index_add(0, index, source)

    return make


def _embed(device: str) -> Call:
    table, rows = _normal(device, 32000, 256).requires_grad_(), _integers(device, 32000, 1 << 15)
    output = nnf.embedding(rows, table)
    gradient = _normal(device, *output.shape)
    return lambda: torch.autograd.grad(output, table, gradient, retain_graph=True)[0]


def _multiply(device: str) -> Call:
    target, factors = torch.ones(1024, device=device), _normal(device, 1 << 20).mul(1e-3) + 1
    places = _integers(device, 1024, 1 << 20)
    return lambda: target.scatter_reduce(0, places, factors, "prod")


def _scatter(name: str, **more: str) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        target, source = _normal(device, 4096), _normal(device, 1 << 20)
        places = _integers(device, 4096, 1 << 20)
        return lambda: getattr(target, name)(0, places, source, **more)

    return make


def _put_rows(device: str) -> Call:
    target, source = _normal(device, 4096, 64), _normal(device, 1 << 17, 64)
    index = _integers(device, 4096, 1 << 17)
    return lambda: target.index_put((index,), source, accumulate=True)


def _transpose(dims: int, side: int) -> Callable[[str], Call]:
    """Return a maker of the forward and backward pass of a transposed convolution."""

    def make(device: str) -> Call:
        image = _normal(device, 8, 64, *[side] * dims).requires_grad_()
        weight = _normal(device, 64, 64, *[3] * dims).requires_grad_()
        convolve = getattr(nnf, f"conv_transpose{dims}d")
        gradient = _normal(device, *convolve(image, weight, stride=2).shape)

        def call() -> tuple[Tensor, ...]:
            output = convolve(image, weight, stride=2)
            return output, *torch.autograd.grad(output, (image, weight), gradient)

        return call

    return make


def _reduce(name: str) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        target, source = _normal(device, 4096, 64), _normal(device, 1 << 17, 64).mul(1e-3) + 1
        index = _integers(device, 4096, 1 << 17)
        return lambda: target.index_reduce(0, index, source, name)

    return make


def _pooling() -> list[Workload]:
    def forward_fractional(pool: Callable[..., Tensor], dims: int) -> Callable[[Tensor], Tensor]:
        def forward(image: Tensor) -> Tensor:
            batch, channels = image.shape[:2]
            starts = torch.linspace(0.1, 0.9, batch * channels * dims, device=image.device)
            starts = starts.view(batch, channels, dims)
            return pool(image, 3, [image.shape[-1] // 2] * dims, _random_samples=starts)

        return forward

    def pool3d(image: Tensor) -> Tensor:
        return nnf.max_pool3d(image, 3, 2, 1)

    return [
        Workload(
            "avg_pool3d_backward",
            "32 kernel 3 stride 2",
            _gradient(lambda x: nnf.avg_pool3d(x, 3, 2, 1), 4, 32, 32, 32, 32),
        ),
        Workload(
            "adaptive_avg_pool2d_backward",
            "57 to 7",
            _gradient(lambda x: nnf.adaptive_avg_pool2d(x, 7), 32, 256, 57, 57),
        ),
        Workload(
            "adaptive_avg_pool2d_backward",
            "7 to 57",
            _gradient(lambda x: nnf.adaptive_avg_pool2d(x, 57), 8, 64, 7, 7),
        ),
        Workload(
            "adaptive_avg_pool3d_backward",
            "9 to 29",
            _gradient(lambda x: nnf.adaptive_avg_pool3d(x, 29), 4, 16, 9, 9, 9),
        ),
        Workload(
            "adaptive_max_pool2d_backward",
            "7 to 57",
            _gradient(lambda x: nnf.adaptive_max_pool2d(x, 57), 8, 64, 7, 7),
        ),
        Workload(
            "adaptive_max_pool3d_backward",
            "9 to 29",
            _gradient(lambda x: nnf.adaptive_max_pool3d(x, 29), 4, 16, 9, 9, 9),
        ),
        Workload(
            "max_pool3d_backward",
            "32 kernel 3 stride 2",
            _gradient(pool3d, 4, 32, 32, 32, 32),
            _gradient(pool3d, 4, 32, 32, 32, 32),
        ),
        Workload(
            "fractional_max_pool2d_backward",
            "64 to 32",
            _gradient(forward_fractional(nnf.fractional_max_pool2d, 2), 8, 64, 64, 64),
        ),
        Workload(
            "fractional_max_pool3d_backward",
            "32 to 16",
            _gradient(forward_fractional(nnf.fractional_max_pool3d, 3), 2, 16, 32, 32, 32),
        ),
        Workload("max_unpool2d", "64 to 128", _unpool),
        Workload("max_unpool3d", "32 to 64", _unpool3d),
    ]


def _padding() -> list[Workload]:
    workloads = []
    for dims, shape in ((1, (16, 64, 256)), (2, (8, 64, 64, 64)), (3, (2, 32, 24, 24, 24))):
        for kind, mode, side in (("reflection", "reflect", 20), ("replication", "replicate", 20)):
            make = _gradient(
                lambda x, s=side, d=dims, m=mode: nnf.pad(x, [s] * (2 * d), mode=m), *shape
            )
            torchs = make if kind == "replication" else None
            workloads.append(Workload(f"{kind}_pad{dims}d_backward", f"pad {side}", make, torchs))
    return workloads


WORKLOADS = [
    *_pooling(),
    _resample("upsample_linear1d_backward", "linear", 256, 8, 1),
    _resample("upsample_bilinear2d_backward", "bilinear", 32, 8, 2),
    _resample("upsample_bilinear2d_backward", "bilinear", 128, 2, 2),
    _resample("upsample_bicubic2d_backward", "bicubic", 32, 8, 2),
    _resample("upsample_bicubic2d_backward", "bicubic", 128, 2, 2),
    _resample("upsample_trilinear3d_backward", "trilinear", 16, 4, 3),
    _resample("upsample_bilinear2d_aa_backward", "bilinear", 32, 4, 2, antialias=True),
    _resample("upsample_bicubic2d_aa_backward", "bicubic", 32, 4, 2, antialias=True),
    *_padding(),
    Workload("nll_loss2d", "8 x 21 x 256 x 256", _loss),
    Workload("ctc_loss_backward", "300 steps, 64 labels", _align),
    Workload("embedding_bag_max_backward", "4096 bags of 8 rows", _bag),
    Workload("put_", "2^20 values, 64 places", _put(accumulate=False)),
    Workload("put_", "2^20 values, 64 places, added", _put(accumulate=True)),
    Workload("histc", "2^24 values, 4 bins", _histogram),
    Workload("bincount", "2^22 weights, 100 bins", _count),
    *(Workload(name, "2048 rows of 4096", _order(name)) for name in ("median", "nanmedian")),
    *(Workload(name, "one row of 2^22", _scan(name)) for name in ("cumprod", "logcumsumexp")),
    Workload("grid_sampler_2d_backward", "64 to 128", _sample(2, 64)),
    Workload("grid_sampler_2d_backward", "64 to 128, mostly outside", _sample(2, 64, spread=4.0)),
    # With aligned corners cuDNN may run.
    Workload("grid_sampler_2d_backward", "64 to 128, corners", _sample(2, 64, corners=True)),
    Workload("grid_sampler_3d_backward", "16 to 32", _sample(3, 16)),
    Workload("scatter_reduce_prod", "2^20 factors, 1024 places", _multiply),
    *(
        Workload(
            "scatter_reduce_prod",
            f"2^20 values, 4096 places, {name}",
            _scatter("scatter_reduce", reduce=name),
        )
        for name in ("sum", "mean", "amax")
    ),
    *(
        Workload("index_reduce", f"2^17 rows of 64, 4096 places, {name}", _reduce(name))
        for name in ("prod", "mean", "amax")
    ),
    Workload("index_add", "2^17 rows of 1, 4096 places", _add(1), _add(1)),
    Workload("index_add", "2^17 rows of 64, 4096 places", _add(64), _add(64)),
    Workload(
        "index_add",
        "2^17 rows of 64, half to one place",
        _add(64, skewed=True),
        _add(64, skewed=True),
    ),
    Workload("scatter_reduce_prod", "1024 factors, 2^24 places", _multiply_few),
    Workload(
        "scatter_with_reduce", "2^20 values, 4096 places, added", _scatter("scatter", reduce="add")
    ),
    Workload(
        "scatter_add",
        "2^20 values, 4096 places",
        _scatter("scatter_add"),
        _scatter("scatter_add"),
    ),
    Workload("index_put_accumulate", "2^17 rows of 64, 4096 places", _put_rows, _put_rows),
    # There is no replacement; this measures whether topk varies, and whether cuDNN's deterministic
    # algorithms are slower.
    Workload("topk", "64 of 4096, 2048 rows", _order("topk")),
    Workload("convolution", "transposed, 64 x 64, 56 to 113", _transpose(2, 56)),
    Workload("convolution", "transposed, 64 x 64, 16^3 to 33^3", _transpose(3, 16)),
    Workload("embedding_dense_backward", "2^15 rows of 256", _embed, _embed),
]

# Sizes of trainings that the smoke test adds.
REALISTIC = [
    Workload("ctc_loss_backward", "3000 steps, peaked logits", _align_peaked),
    Workload("grid_sampler_3d_backward", "128 to 128, one channel", _warp),
    Workload("histc", "2^22 integers, bins as wide as 1", _histogram_of_integers),
]
