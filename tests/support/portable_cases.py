"""Computes small cases under the portable mode, and prints a digest of each as JSON.

Arguments: ``--plain`` leaves everything to torch; ``--controls`` leaves one class after the
other to torch, and prints the digests of some cases for each; names choose cases.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_d9m.portability import mode as portable_mode
from lightning_d9m.portability.functions import FUNCTIONS

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
    make = make or (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    optimizer = make(parameters) if parameters else None
    outputs = []
    with _STATE["training"]():
        _repeat_steps(model, given, optimizer, outputs, steps)
    grads = [one.grad for one in given if one.grad is not None]
    return [*model.state_dict().values(), *outputs, *grads]


def _repeat_steps(model, given, optimizer, outputs, steps) -> None:
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


def add(name: str, build: Callable[[], nn.Module], *shapes: tuple[int, ...], **options) -> None:
    """Add a case: a module that trains on normal inputs."""
    CASES[name] = lambda: train(build(), *(torch.randn(shape) * 2 for shape in shapes), **options)


IMAGE = (3, 4, 9, 8)
add("conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (3, 4, 17))
add("conv2d", lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2, groups=2), IMAGE)
add("conv3d", lambda: nn.Conv3d(4, 6, 2, stride=2), (2, 4, 5, 6, 7))
add("conv_transpose", lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), IMAGE)
add(
    "conv_transpose padded by its stride",
    lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, (2, 1), groups=2, dilation=3),
    IMAGE,
)
add("conv_circular", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE)
add("linear", lambda: nn.Linear(32, 16), (24, 32))
add("bilinear", lambda: nn.Bilinear(5, 6, 7), (9, 5), (9, 6))
for name in ("BatchNorm2d(4)", "GroupNorm(2, 4)", "LayerNorm(8)", "InstanceNorm2d(4, affine=True)"):
    add(name, lambda name=name: eval(f"nn.{name}"), IMAGE)  # noqa: S307 - the names above
    # The gradient of what follows is not zero; see _compare.
    add(
        f"{name} and convolution",
        lambda name=name: nn.Sequential(eval(f"nn.{name}"), nn.Conv2d(4, 2, 3)),  # noqa: S307
        IMAGE,
    )
add("RMSNorm", lambda: nn.RMSNorm(8), IMAGE)
add("LocalResponseNorm", lambda: nn.LocalResponseNorm(2), IMAGE)
add("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)), (6, 8))
add("spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 5)), (6, 8))
ACTIVATIONS = """
    ELU CELU SELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU
    ReLU ReLU6 RReLU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Softmin Softmax
    LogSoftmax GLU
""".split()  # noqa: SIM905 - a table
for name in ACTIVATIONS:
    options = {"dim": 1} if name.startswith(("Softmi", "Softmax", "LogSoft", "GLU")) else {}
    add(name, lambda name=name, options=options: getattr(nn, name)(**options), (7, 40))
add("GELU tanh", lambda: nn.GELU("tanh"), (7, 40))
for name in ("MaxPool2d(3, 2, 1)", "AvgPool2d(3, 2, 1)", "LPPool2d(2, 3)", "AdaptiveAvgPool2d(3)"):
    add(name, lambda name=name: eval(f"nn.{name}"), IMAGE)  # noqa: S307
for name in ("AdaptiveMaxPool2d(3)", "FractionalMaxPool2d(2, output_size=3)"):
    add(name, lambda name=name: eval(f"nn.{name}"), IMAGE)  # noqa: S307
for name in ("MaxPool1d(3, 2)", "AvgPool1d(3, 2)", "AdaptiveAvgPool1d(5)"):
    add(name, lambda name=name: eval(f"nn.{name}"), (3, 4, 17))  # noqa: S307
for name in ("MaxPool3d(2)", "AvgPool3d(2)", "AdaptiveAvgPool3d(2)"):
    add(name, lambda name=name: eval(f"nn.{name}"), (2, 3, 4, 5, 6))  # noqa: S307
for name in ("ReflectionPad2d(2)", "ReplicationPad2d(2)", "ZeroPad2d(1)", "CircularPad2d(1)"):
    add(name, lambda name=name: eval(f"nn.{name}"), IMAGE)  # noqa: S307
add("PixelShuffle", lambda: nn.PixelShuffle(2), (2, 4, 3, 3))
add("Fold", lambda: nn.Fold((5, 6), 2), (2, 8, 20))
add("Unfold", lambda: nn.Unfold(3), IMAGE)
for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
    for size in ((5, 11), (18, 16)):
        add(f"{mode} {size}", lambda mode=mode, size=size: nn.Upsample(size, mode=mode), IMAGE)
for mode in ("bilinear", "bicubic"):
    CASES[f"{mode} aa"] = lambda mode=mode: train(
        Function(lambda x, mode=mode: F.interpolate(x, (5, 4), mode=mode, antialias=True)),
        torch.randn(IMAGE),
    )


class Function(nn.Module):
    """A module that calls a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def add_function(name: str, function, *shapes: tuple[int, ...]) -> None:
    """Add a case: a function of normal inputs."""
    CASES[name] = lambda: train(Function(function), *(torch.randn(shape) for shape in shapes))


add_function(
    "attention", lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (2, 3, 9, 8)
)
add_function(
    "attention dropout",
    lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2),
    (2, 3, 9, 8),
)
add_function("dropout", lambda x: F.dropout(F.dropout2d(x.view(8, 4, 2, 5), 0.3), 0.4), (8, 40))
add_function("alpha_dropout", lambda x: F.alpha_dropout(x, 0.4, training=True), (8, 40))
add_function("cumsum", lambda x: x.cumsum(1), (4, 60))
add_function("weighted", lambda x: torch.add(x * x, x, alpha=0.3).addcmul(x, x, value=0.7), (4, 90))
add_function("long sums", lambda x: x.sum() + x.mean(0) + (x * x).sum(0), (70, 90))
add_function(
    "L1 distance", lambda x: torch.cdist(x, x * 2, p=1.0) + x.abs().pow(0.5).nansum(), (4, 9)
)
add_function(
    "reductions", lambda x: x.std() + x.var(1) + x.norm(dim=1) + x.prod(1) + x.mean(1), (4, 9)
)
add_function("logsumexp", lambda x: x.logsumexp(1) + x.softmax(0).amax(1), (4, 9))
add_function(
    "sorted", lambda x: x.sort(1)[0].cumsum(1) + x.topk(4, 1)[0].sum() + x.median(), (4, 9)
)
add_function("cumprod", lambda x: x.cumprod(1), (4, 9))
add_function(
    "indexing",
    lambda x: x[torch.tensor([0, 0, 2, 1])].index_add(0, torch.tensor([1, 1]), x[:2]),
    (4, 9),
)
add_function("scatter", lambda x: x.scatter_add(1, torch.arange(36).view(4, 9) % 3, x * 2), (4, 9))
add_function("einsum", lambda x: torch.einsum("ij,kj->ik", x, x) + torch.cdist(x, x * 2), (4, 9))
add_function(
    "elementary",
    lambda x: (
        x.exp()
        + x.abs().log()
        + x.sin() * x.cos()
        + x.tan()
        + x.erf()
        + x.atan()
        + x.sinh()
        + x.asinh()
        + x.abs().pow(2.3)
        + x.expm1()
        + x.abs().log1p()
        + x.abs().sqrt()
        + torch.atan2(x, x + 1)
        + x.lerp(x * x, 0.7)
    ),
    (40, 20),
)
add_function(
    "grid_sample", lambda x: F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1))), IMAGE
)
add_function("addbmm", lambda x: torch.addbmm(x[0, 0], x, x.mT, beta=0.3, alpha=0.7), (5, 9, 9))
CASES["embedding"] = lambda: train(nn.Embedding(9, 5, padding_idx=1), torch.randint(9, (4, 30)))
CASES["embedding max_norm"] = lambda: train(
    nn.Embedding(9, 5, max_norm=1.0, scale_grad_by_freq=True), torch.randint(9, (4, 30))
)
CASES["embedding_bag"] = lambda: train(
    nn.EmbeddingBag(9, 5, mode="mean"), torch.randint(9, (4, 30))
)
for name in ("RNN", "GRU", "LSTM"):
    CASES[name] = lambda name=name: train(
        getattr(nn, name)(5, 7, num_layers=2, bidirectional=True, dropout=0.2), torch.randn(6, 3, 5)
    )
CASES["packed"] = lambda: train(
    Function(
        lambda x: (
            nn.LSTM(5, 7)(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2])))[0].data
        )
    ),
    torch.randn(6, 3, 5),
)
CASES["transformer"] = lambda: train(
    nn.Transformer(16, 2, 1, 1, 32, batch_first=True), torch.randn(2, 5, 16), torch.randn(2, 4, 16)
)
LOSSES = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t.long() % 9, label_smoothing=0.1),
    "nll_loss": lambda x, t: F.nll_loss(x.log_softmax(1), t.long() % 9, x[0].detach().abs()),
    "nll_loss2d": lambda x, t: F.cross_entropy(
        x.view(2, 9, 3, -1), (t.long() % 9)[:6].view(2, 3, 1)
    ),
    "mse_loss": lambda x, t: F.mse_loss(x[:, 0], t),
    "l1_loss": lambda x, t: F.l1_loss(x[:, 0], t),
    "smooth_l1_loss": lambda x, t: F.smooth_l1_loss(x[:, 0], t),
    "huber_loss": lambda x, t: F.huber_loss(x[:, 0], t),
    "binary_cross_entropy": lambda x, t: F.binary_cross_entropy(x[:, 0].sigmoid(), t.sigmoid()),
    "bce_with_logits": lambda x, t: F.binary_cross_entropy_with_logits(x[:, 0], t.sigmoid()),
    "kl_div": lambda x, t: F.kl_div(x.log_softmax(1), x.detach().flip(0).softmax(1)),
    "poisson_nll_loss": lambda x, t: F.poisson_nll_loss(x[:, 0], t.abs()),
    "gaussian_nll_loss": lambda x, t: F.gaussian_nll_loss(x[:, 0], t, x[:, 1].abs()),
    "hinge_embedding_loss": lambda x, t: F.hinge_embedding_loss(x[:, 0], t.sign()),
    "margin_ranking_loss": lambda x, t: F.margin_ranking_loss(x[:, 0], x[:, 1], t.sign()),
    "multi_margin_loss": lambda x, t: F.multi_margin_loss(x, t.long().abs() % 9),
    "multilabel_margin_loss": lambda x, t: F.multilabel_margin_loss(
        x, torch.tensor([[3, 0, -1, *range(6)]] * len(x))
    ),
    "multilabel_soft_margin_loss": lambda x, t: F.multilabel_soft_margin_loss(x, (x > 0).float()),
    "soft_margin_loss": lambda x, t: F.soft_margin_loss(x[:, 0], t.sign()),
    "triplet_margin_loss": lambda x, t: F.triplet_margin_loss(x, x.flip(0), x.flip(1)),
    "cosine_embedding_loss": lambda x, t: F.cosine_embedding_loss(x, x.flip(0), t.sign()),
    "ctc_loss": lambda x, t: F.ctc_loss(
        x.view(6, 1, -1).log_softmax(2),
        torch.tensor([[1, 2, 2]]),
        torch.tensor([6]),
        torch.tensor([3]),
    ),
}
for name, loss in LOSSES.items():
    add_function(name, lambda x, t, loss=loss: loss(x, t.detach() * 5), (6, 9), (6,))
OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "Adagrad": {},
    "ASGD": {},
    "Rprop": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
}
for name, options in OPTIMIZERS.items():
    for foreach in (False, True):
        add(
            f"{name} foreach={foreach}",
            lambda: nn.Linear(8, 5),
            (6, 8),
            make=lambda ps, name=name, options=options, foreach=foreach: getattr(torch.optim, name)(
                ps, lr=0.01, foreach=foreach, **options
            ),
            steps=3,
        )
for name in ("SGD", "Adam", "AdamW", "Adagrad"):
    add(
        f"{name} fused",
        lambda: nn.Linear(8, 5),
        (6, 8),
        make=lambda ps, name=name: getattr(torch.optim, name)(ps, lr=0.01, fused=True),
        steps=3,
    )


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


add("Lion", lambda: nn.Linear(8, 5), (6, 8), make=Lion, steps=4)


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


CASES["accumulated gradients"] = _accumulate
for name in (
    "kaiming_normal_",
    "kaiming_uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "uniform_",
):
    CASES[name] = lambda name=name: [getattr(nn.init, name)(torch.empty(7, 9))]
CASES["trunc_normal_"] = lambda: [nn.init.trunc_normal_(torch.empty(50, 9))]
CASES["orthogonal_"] = lambda: [nn.init.orthogonal_(torch.empty(7, 9))]
CASES["sparse_"] = lambda: [nn.init.sparse_(torch.empty(7, 9), 0.3)]
CASES["draws"] = lambda: [
    torch.rand(50),
    torch.randn(51, dtype=torch.float64),
    torch.randperm(9),
    torch.multinomial(torch.rand(3, 9), 4),
    torch.empty(20).exponential_(),
    torch.bernoulli(torch.rand(50)),
    torch.normal(torch.zeros(9), 2.0),
]
CASES["double"] = lambda: train(
    nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.Flatten(), nn.Linear(252, 5)
    ).double(),
    torch.randn(IMAGE, dtype=torch.float64),
)


def _autocast() -> list[Tensor]:
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.Flatten(), nn.Linear(252, 5)
    )
    with torch.autocast("cpu", torch.bfloat16):
        return train(model, torch.randn(IMAGE))


CASES["autocast"] = _autocast


def _clip() -> list[Tensor]:
    model, batch = nn.Linear(9, 4), torch.randn(5, 9)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    with _STATE["training"]():
        model(batch).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.optim.SGD(model.parameters(), 0.1).step()
        average.update_parameters(model)
        average.update_parameters(model)
    return [norm, *average.state_dict().values()]


CASES["clip and average"] = _clip


def _average_weights() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2)
    batches = [torch.randn(5, 9) for _ in range(3)]
    with _STATE["training"]():
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            schedule.step()
        torch.optim.swa_utils.update_bn(batches, average)
    return list(average.state_dict().values())


CASES["stochastic weight averaging"] = _average_weights


def _scale() -> list[Tensor]:
    model, scaler = nn.Linear(9, 4), torch.amp.GradScaler("cpu", growth_interval=1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    batches = [torch.randn(5, 9) for _ in range(3)]
    with _STATE["training"]():
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    return [*model.state_dict().values(), torch.tensor(scaler.get_scale())]


CASES["scaled gradients"] = _scale


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--errors", action="store_true", help="print distances to torch's results")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.errors:
        print(json.dumps({name: _compare(name) for name in options.names or CASES}))
    elif options.controls:
        print(json.dumps({name: _control(*found) for name, found in CONTROLS.items()}))
    else:
        print(json.dumps(_run(options.names or CASES, plain=options.plain)))


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
