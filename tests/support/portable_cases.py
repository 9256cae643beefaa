"""Computes small cases under the portable mode, and prints a digest of each as JSON.

Arguments: ``--plain`` leaves everything to torch; ``--controls`` leaves one class after the
other to torch, and prints the digests of some cases for each; ``--errors`` prints distances to
torch's results instead; names choose cases.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils

from lightning_d9m.ops.portability import mode as portable_mode
from lightning_d9m.ops.portability.formulas import FUNCTIONS

_STATE = {"training": nullcontext}  # the context in which models train
CASES: dict[str, Callable[[], list[Tensor]]] = {}
# Operations of each class that ``--controls`` leaves to torch, and cases that then differ.
CONTROLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "roundings": (
        "add sub addcmul addcdiv lerp sqrt rsqrt pow",
        ("AdamW foreach=False", "RMSprop foreach=True", "weighted", "L1 distance"),
    ),
    "sums": (
        "sum mean var std native_layer_norm native_batch_norm _softmax cumsum",
        ("LayerNorm(8)", "BatchNorm2d(4)", "reductions", "cumsum", "long sums"),
    ),
    "products": (
        "mm bmm addmm baddbmm convolution convolution_backward",
        ("conv2d", "linear", "attention"),
    ),
    "functions": (
        " ".join(FUNCTIONS.keys() - {"normal"}),
        ("elementary", "Tanh", "GELU", "Sigmoid"),
    ),
    "decompositions": (
        "elu mish mse_loss soft_margin_loss native_group_norm hardswish",
        ("ELU", "Mish", "mse_loss", "soft_margin_loss", "GroupNorm(2, 4)"),
    ),
    "draws": (
        "uniform normal bernoulli exponential rand randn",
        ("draws", "kaiming_normal_", "kaiming_uniform_", "dropout"),
    ),
}


def train(model: nn.Module, *inputs: Tensor, make=None, steps: int = 2) -> list[Tensor]:
    """Train by the mean square of what a model returns; return weights, buffers and gradients."""
    given = [one.requires_grad_() if one.is_floating_point() else one for one in inputs]
    parameters = list(model.parameters())
    make = make or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = make(parameters) if parameters else None
    outputs = []
    with _STATE["training"]():
        for _ in range(steps):
            out = model(*given)
            out = out[0] if isinstance(out, tuple) else out
            loss = (out.float() * out.float()).mean()
            if optimizer:
                optimizer.zero_grad()
            loss.backward()
            if optimizer:
                optimizer.step()
            outputs.append(out)
    grads = [one.grad for one in given if one.grad is not None]
    return [*model.state_dict().values(), *outputs, *grads]


IMAGE, LINE, VOLUME, ROWS, FEW = (3, 4, 9, 8), (3, 4, 17), (2, 3, 4, 5, 6), (7, 40), (4, 9)
resize, attend = F.interpolate, F.scaled_dot_product_attention
LABELS = torch.tensor([[1, 2, 2]]), torch.tensor([6]), torch.tensor([3])
# Modules that train on normal inputs: name, module, shapes.
MODULES = """
    conv1d | Conv1d(4, 6, 3, stride=2, padding=1) | LINE
    conv2d | Conv2d(4, 6, 3, padding="same", dilation=2, groups=2) | IMAGE
    conv3d | Conv3d(4, 6, 2, stride=2) | (2, 4, 5, 6, 7)
    conv_transpose | ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2) | IMAGE
    conv_transpose padded by its stride | ConvTranspose2d(4, 6, 3, 2, 1, (2, 1), 2, True, 3) | IMAGE
    conv_circular | Conv2d(4, 6, 3, padding=1, padding_mode="circular") | IMAGE
    linear | Linear(32, 16) | (24, 32)
    bilinear | Bilinear(5, 6, 7) | (9, 5), (9, 6)
    RMSNorm | RMSNorm(8) | IMAGE
    LocalResponseNorm | LocalResponseNorm(2) | IMAGE
    weight_norm | utils.parametrizations.weight_norm(nn.Linear(8, 5)) | (6, 8)
    spectral_norm | utils.parametrizations.spectral_norm(nn.Linear(8, 5)) | (6, 8)
    GELU tanh | GELU("tanh") | ROWS
    PixelShuffle | PixelShuffle(2) | (2, 4, 3, 3)
    Fold | Fold((5, 6), 2) | (2, 8, 20)
    Unfold | Unfold(3) | IMAGE
"""
# The same, of modules whose cases are named after them.
NORMALIZATIONS = "BatchNorm2d(4); GroupNorm(2, 4); LayerNorm(8); InstanceNorm2d(4, affine=True)"
NAMED = {
    IMAGE: f"""{NORMALIZATIONS}
        MaxPool2d(3, 2, 1); AvgPool2d(3, 2, 1); LPPool2d(2, 3); AdaptiveAvgPool2d(3)
        AdaptiveMaxPool2d(3); FractionalMaxPool2d(2, output_size=3)
        ReflectionPad2d(2); ReplicationPad2d(2); ZeroPad2d(1); CircularPad2d(1)
    """,
    LINE: "MaxPool1d(3, 2); AvgPool1d(3, 2); AdaptiveAvgPool1d(5)",
    VOLUME: "MaxPool3d(2); AvgPool3d(2); AdaptiveAvgPool3d(2)",
    ROWS: """
        ELU; CELU; SELU; GELU; Hardshrink; Hardsigmoid; Hardswish; Hardtanh; LeakyReLU; LogSigmoid
        Mish; PReLU; ReLU; ReLU6; RReLU; SiLU; Sigmoid; Softplus; Softshrink; Softsign; Tanh
        Tanhshrink; Softmin; Softmax; LogSoftmax; GLU
    """,
}
WITH_DIMENSION = {"Softmin", "Softmax", "LogSoftmax", "GLU"}
# Functions of normal inputs: name, expression, shape.
FUNCTIONS_OF_X = """
    bilinear aa | resize(x, (5, 4), mode="bilinear", antialias=True) | IMAGE
    bicubic aa | resize(x, (5, 4), mode="bicubic", antialias=True) | IMAGE
    attention | attend(x, x, x, is_causal=True) | (2, 3, 9, 8)
    attention dropout | attend(x, x, x, dropout_p=0.2) | (2, 3, 9, 8)
    dropout | F.dropout(F.dropout2d(x.view(8, 4, 2, 5), 0.3), 0.4) | (8, 40)
    alpha_dropout | F.alpha_dropout(x, 0.4, training=True) | (8, 40)
    cumsum | x.cumsum(1) | (4, 60)
    weighted | torch.add(x * x, x, alpha=0.3).addcmul(x, x, value=0.7) | (4, 90)
    long sums | x.sum() + x.mean(0) + (x * x).sum(0) | (70, 90)
    L1 distance | torch.cdist(x, x * 2, p=1.0) + x.abs().pow(0.5).nansum() | FEW
    reductions | x.std() + x.var(1) + x.norm(dim=1) + x.prod(1) + x.mean(1) | FEW
    logsumexp | x.logsumexp(1) + x.softmax(0).amax(1) | FEW
    sorted | x.sort(1)[0].cumsum(1) + x.topk(4, 1)[0].sum() + x.median() | FEW
    cumprod | x.cumprod(1) | FEW
    indexing | x[torch.tensor([0, 0, 2, 1])].index_add(0, torch.tensor([1, 1]), x[:2]) | FEW
    scatter | x.scatter_add(1, torch.arange(36).view(4, 9) % 3, x * 2) | FEW
    einsum | torch.einsum("ij,kj->ik", x, x) + torch.cdist(x, x * 2) | FEW
    grid_sample | F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1))) | IMAGE
    addbmm | torch.addbmm(x[0, 0], x, x.mT, beta=0.3, alpha=0.7) | (5, 9, 9)
"""
# Losses of scores of shape (6, 9) and targets of shape (6,).
LOSSES = """
    cross_entropy | F.cross_entropy(x, t.long() % 9, label_smoothing=0.1)
    nll_loss | F.nll_loss(x.log_softmax(1), t.long() % 9, x[0].detach().abs())
    nll_loss2d | F.cross_entropy(x.view(2, 9, 3, -1), (t.long() % 9)[:6].view(2, 3, 1))
    mse_loss | F.mse_loss(x[:, 0], t)
    l1_loss | F.l1_loss(x[:, 0], t)
    smooth_l1_loss | F.smooth_l1_loss(x[:, 0], t)
    huber_loss | F.huber_loss(x[:, 0], t)
    binary_cross_entropy | F.binary_cross_entropy(x[:, 0].sigmoid(), t.sigmoid())
    bce_with_logits | F.binary_cross_entropy_with_logits(x[:, 0], t.sigmoid())
    kl_div | F.kl_div(x.log_softmax(1), x.detach().flip(0).softmax(1))
    poisson_nll_loss | F.poisson_nll_loss(x[:, 0], t.abs())
    gaussian_nll_loss | F.gaussian_nll_loss(x[:, 0], t, x[:, 1].abs())
    hinge_embedding_loss | F.hinge_embedding_loss(x[:, 0], t.sign())
    margin_ranking_loss | F.margin_ranking_loss(x[:, 0], x[:, 1], t.sign())
    multi_margin_loss | F.multi_margin_loss(x, t.long().abs() % 9)
    multilabel_margin_loss | F.multilabel_margin_loss(x, torch.tensor([[3, 0, -1, *range(6)]] * 6))
    multilabel_soft_margin_loss | F.multilabel_soft_margin_loss(x, (x > 0).float())
    soft_margin_loss | F.soft_margin_loss(x[:, 0], t.sign())
    triplet_margin_loss | F.triplet_margin_loss(x, x.flip(0), x.flip(1))
    cosine_embedding_loss | F.cosine_embedding_loss(x, x.flip(0), t.sign())
    ctc_loss | F.ctc_loss(x.view(6, 1, -1).log_softmax(2), *LABELS)
"""


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def read_table(text: str) -> Iterator[list[str]]:
    return (line.strip().split(" | ") for line in text.strip().splitlines())


def read_code(code: str):
    return eval(code)  # noqa: S307 - the tables above


def add(name: str, build: Callable[[], nn.Module], *shapes: tuple[int, ...], **options) -> None:
    CASES[name] = lambda: train(build(), *(torch.randn(shape) * 2 for shape in shapes), **options)


def add_function(name: str, function, *shapes: tuple[int, ...]) -> None:
    CASES[name] = lambda: train(Function(function), *map(torch.randn, shapes))


for name, code, shapes in read_table(MODULES):
    add(name, partial(read_code, f"nn.{code}"), *read_code(f"[{shapes}]"))
for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
    for size in ((5, 11), (18, 16)):
        add(f"{mode} {size}", partial(nn.Upsample, size, mode=mode), IMAGE)
for shape, table in NAMED.items():
    for name in filter(None, map(str.strip, table.replace("\n", ";").split(";"))):
        call = name if "(" in name else f"{name}({'dim=1' if name in WITH_DIMENSION else ''})"
        add(name, partial(read_code, f"nn.{call}"), shape)
for name in NORMALIZATIONS.split("; "):  # the gradient of what follows is not zero; see _compare
    code = f"nn.Sequential(nn.{name}, nn.Conv2d(4, 2, 3))"
    add(f"{name} and convolution", partial(read_code, code), IMAGE)
for name, code, shape in read_table(FUNCTIONS_OF_X):
    add_function(name, read_code(f"lambda x: {code}"), read_code(shape))
for name, code in read_table(LOSSES):
    loss = read_code(f"lambda x, t: {code}")
    add_function(name, lambda x, t, loss=loss: loss(x, t.detach() * 5), (6, 9), (6,))
UNARY = ("tan", "erf", "atan", "sinh", "asinh")


def compute_elementary(x: Tensor) -> Tensor:
    """Add the results of elementary functions."""
    total = x.exp() + x.abs().log() + x.sin() * x.cos()
    for name in UNARY:
        total = total + getattr(x, name)()
    total = total + x.abs().pow(2.3) + x.expm1() + x.abs().log1p() + x.abs().sqrt()
    return total + torch.atan2(x, x + 1) + x.lerp(x * x, 0.7)


add_function("elementary", compute_elementary, (40, 20))


class Lion(torch.optim.Optimizer):
    """A user's own optimizer: steps of one size, along the sign of an average."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.01, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                average = self.state[one].setdefault("average", torch.zeros_like(one))
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.add_(average.lerp(one.grad, 0.1).sign_(), alpha=-group["lr"])
                average.lerp_(one.grad, 0.01)


OPTIMIZERS = {
    **{name: {} for name in ("AdamW", "NAdam", "RAdam", "Adamax")},
    **{name: {} for name in ("Adadelta", "Adagrad", "ASGD", "Rprop")},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
}
MADE = {
    f"{name} foreach={foreach}": partial(getattr(torch.optim, name), foreach=foreach, **options)
    for name, options in OPTIMIZERS.items()
    for foreach in (False, True)
}
for name in ("SGD", "Adam", "AdamW", "Adagrad"):
    MADE[f"{name} fused"] = partial(getattr(torch.optim, name), fused=True)
for name, make in MADE.items():
    add(name, partial(nn.Linear, 8, 5), (6, 8), make=partial(make, lr=0.01), steps=3)
add("Lion", partial(nn.Linear, 8, 5), (6, 8), make=Lion, steps=4)


def fit(model, optimizer, batches, after=lambda: None, scaler=None) -> None:
    """Train by the mean square of what a model returns."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    with _STATE["training"]():
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            after()


def _accumulate() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(9, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    batches = torch.randn(6, 5, 9).split(3)
    with _STATE["training"]():
        for batch in batches:
            optimizer.zero_grad(set_to_none=False)
            for part in batch:
                (model(part).square().mean() / len(batch)).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
    return [*model.state_dict().values(), *(one.grad for one in model.parameters())]


def _autocast() -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return train(make_classifier(), torch.randn(IMAGE))


def _clip() -> list[Tensor]:
    model, batch = nn.Linear(9, 4), torch.randn(5, 9)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    with _STATE["training"]():
        model(batch).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.optim.SGD(model.parameters(), 0.1).step()
        average.update_parameters(model)
        average.update_parameters(model)
    return [norm, *average.state_dict().values()]


def _average_weights() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = swa_utils.AveragedModel(model)
    schedule = swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2)
    batches = [torch.randn(5, 9) for _ in range(3)]
    fit(model, optimizer, batches, lambda: (average.update_parameters(model), schedule.step()))
    with _STATE["training"]():
        swa_utils.update_bn(batches, average)
    return list(average.state_dict().values())


def _scale() -> list[Tensor]:
    model, scaler = nn.Linear(9, 4), torch.amp.GradScaler("cpu", growth_interval=1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    fit(model, optimizer, [torch.randn(5, 9) for _ in range(3)], scaler=scaler)
    return [*model.state_dict().values(), torch.tensor(scaler.get_scale())]


def make_classifier() -> nn.Module:
    """Return a small model with a convolution."""
    layers = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.Flatten(), nn.Linear(252, 5)
    return nn.Sequential(*layers)


def _pack(x: Tensor) -> Tensor:
    return nn.LSTM(5, 7)(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2])))[0].data


def _draw() -> list[Tensor]:
    drawn = [torch.rand(50), torch.randn(51, dtype=torch.float64), torch.randperm(9)]
    drawn += [torch.multinomial(torch.rand(3, 9), 4), torch.empty(20).exponential_()]
    return [*drawn, torch.bernoulli(torch.rand(50)), torch.normal(torch.zeros(9), 2.0)]


EMBEDDINGS = {
    "embedding": partial(nn.Embedding, padding_idx=1),
    "embedding max_norm": partial(nn.Embedding, max_norm=1.0, scale_grad_by_freq=True),
    "embedding_bag": partial(nn.EmbeddingBag, mode="mean"),
}
for name, make in EMBEDDINGS.items():
    CASES[name] = lambda make=make: train(make(9, 5), torch.randint(9, (4, 30)))
for name in ("RNN", "GRU", "LSTM"):
    make = partial(getattr(nn, name), 5, 7, num_layers=2, bidirectional=True, dropout=0.2)
    CASES[name] = lambda make=make: train(make(), torch.randn(6, 3, 5))
for name in ("kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"):
    CASES[name] = lambda name=name: [getattr(nn.init, name)(torch.empty(7, 9))]
CASES |= {
    "packed": lambda: train(Function(_pack), torch.randn(6, 3, 5)),
    "transformer": lambda: train(
        nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
        torch.randn(2, 5, 16),
        torch.randn(2, 4, 16),
    ),
    "uniform_": lambda: [nn.init.uniform_(torch.empty(7, 9))],
    "trunc_normal_": lambda: [nn.init.trunc_normal_(torch.empty(50, 9))],
    "orthogonal_": lambda: [nn.init.orthogonal_(torch.empty(7, 9))],
    "sparse_": lambda: [nn.init.sparse_(torch.empty(7, 9), 0.3)],
    "draws": _draw,
    "double": lambda: train(make_classifier().double(), torch.randn(IMAGE, dtype=torch.float64)),
    "autocast": _autocast,
    "accumulated gradients": _accumulate,
    "clip and average": _clip,
    "stochastic weight averaging": _average_weights,
    "scaled gradients": _scale,
}


def digest(tensors: list[Tensor]) -> str:
    """Return a digest of tensors' bytes, with one NaN."""
    total = sha256()
    for one in tensors:
        one = one.detach().contiguous()
        if one.dtype == torch.bfloat16:
            one = one.float()
        total.update(one.numpy().tobytes())
    return total.hexdigest()[:16]


def _compare(name: str) -> float | str:
    """Return the greatest distance of a case to torch's result, relative to its greatest value."""
    results = []
    for context in (nullcontext, portable_mode.portable):
        torch.manual_seed(1)
        _STATE["training"] = context
        try:
            results.append(CASES[name]())
        except Exception as error:  # noqa: BLE001 - each case counts
            return f"{type(error).__name__}: {str(error)[:150]}"
        finally:
            _STATE["training"] = nullcontext
    worst = 0.0
    # A gradient may be zero up to rounding: the mean of the squares of normalized values does not
    # depend on the input. What is far below all other values of the case is measured by these.
    scale = max((float(one.detach().abs().max()) for one in results[0] if one.numel()), default=0.0)
    scale = max(scale, 1e-25)
    for one, other in zip(*results, strict=True):
        one, other = one.detach().double(), other.detach().double()
        if one.numel():
            gap = (one - other).abs().max() / one.abs().max().clamp(min=1e-5 * scale)
            worst = max(worst, float(gap.nan_to_num(float("inf"))))
    return worst


def main() -> None:
    """Print a digest, or an error, of each case."""
    names = [one for one in sys.argv[1:] if not one.startswith("--")] or list(CASES)
    if "--errors" in sys.argv:
        found = {name: _compare(name) for name in names}
    elif "--controls" in sys.argv:
        found = {name: _control(*given) for name, given in CONTROLS.items()}
    else:
        found = _run(names, plain="--plain" in sys.argv)
    print(json.dumps(found))


def _control(operations: str, cases: Iterable[str]) -> dict[str, str]:
    """Return the digests of cases while some operations are left to torch."""
    names = [name for one in operations.split() for name in (one, f"{one}_")]
    packets = [getattr(torch.ops.aten, one) for one in names if hasattr(torch.ops.aten, one)]
    overloads = [getattr(one, name) for one in packets for name in one.overloads()]
    found = portable_mode._MODE._found
    before = dict(found)
    found.clear()
    found.update({one: one for one in overloads})
    try:
        return _run(cases)
    finally:
        found.clear()
        found.update(before)


def _run(names: Iterable[str], *, plain: bool = False) -> dict[str, str]:
    found = {}
    for name in names:
        torch.manual_seed(1)
        with nullcontext() if plain else portable_mode.portable():
            try:
                found[name] = digest(CASES[name]())
            except Exception as error:  # noqa: BLE001 - each case counts
                found[name] = f"{type(error).__name__}: {str(error)[:150]}"
    return found


if __name__ == "__main__":
    main()
