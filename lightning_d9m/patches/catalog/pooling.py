"""Catalog entries of pooling and unpooling."""

from lightning_d9m.patches.catalog.op import (
    ATOMICS,
    EXACT,
    GATHER,
    ROUNDED_ONCE,
    FlagEffect,
    Op,
    map_overloads,
)

_AVG_POOL = "lightning_d9m.patches.kernels.separable"
_MAX_POOL = "lightning_d9m.patches.kernels.max_pool"
_PUT_UNPOOL = "lightning_d9m.patches.kernels.max_pool"

_MEAN_BITS = (
    "Within a few rounding errors: the sum is taken dimension by dimension, and means multiply by "
    "the reciprocal; half and bfloat16 are added in float32."
)


def _make_gradient(
    name: str,
    *,
    documented: str = "",
    flag_effect: FlagEffect = FlagEffect.RAISES,
    torch_does: str = "Raises in the backward pass.",
    overloads: tuple[str, ...] = (),
) -> Op:
    averages = "avg_pool" in name
    return Op(
        name=name,
        status="patched",
        flag_effect=flag_effect,
        documented=(documented,) if documented else (),
        torch_does=torch_does,
        cause=ATOMICS,
        instead=f"{GATHER}, one dimension after the other." if averages else EXACT,
        bits=_MEAN_BITS if averages else ROUNDED_ONCE,
        kernels=map_overloads(
            f"{_AVG_POOL if averages else _MAX_POOL}:{name}",
            *(overloads or (name, f"{name}.grad_input")),
        ),
    )


def _make_unpooling(dims: int, *documented: str) -> Op:
    name = f"max_unpool{dims}d"
    return Op(
        name=name,
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=documented,
        torch_does="Raises, on a CPU too.",
        cause="Several threads write to one place in no fixed order, and the last value stays.",
        instead="The last value wins, found as the greatest position of each place.",
        bits="Equal to torch's CPU kernel on one thread.",
        kernels=map_overloads(f"{_PUT_UNPOOL}:{name}", name, f"{name}.out"),
    )


POOLING: tuple[Op, ...] = (
    _make_gradient("avg_pool3d_backward", documented="torch.nn.AvgPool3d"),
    _make_gradient(
        "adaptive_avg_pool2d_backward",
        documented="torch.nn.AdaptiveAvgPool2d",
        overloads=("_adaptive_avg_pool2d_backward",),
    ),
    _make_gradient(
        "adaptive_avg_pool3d_backward",
        documented="torch.nn.AdaptiveAvgPool3d",
        overloads=("_adaptive_avg_pool3d_backward", "adaptive_avg_pool3d_backward.grad_input"),
    ),
    _make_gradient("adaptive_max_pool2d_backward", documented="torch.nn.AdaptiveMaxPool2d"),
    _make_gradient(
        "adaptive_max_pool3d_backward",
        flag_effect=FlagEffect.NONE,
        torch_does="Nothing: it neither raises nor switches, and its documentation is silent.",
    ),
    _make_gradient(
        "max_pool3d_backward",
        documented="torch.nn.MaxPool3d",
        flag_effect=FlagEffect.DECOMPOSES,
        torch_does=(
            "With return_indices, decomposes max_pool3d if deterministic algorithms were on in the "
            "forward pass (the patch restores the op); raises in the backward pass otherwise."
        ),
        overloads=(
            "max_pool3d_with_indices_backward",
            "max_pool3d_with_indices_backward.grad_input",
        ),
    ),
    _make_gradient("fractional_max_pool2d_backward", documented="torch.nn.FractionalMaxPool2d"),
    _make_gradient("fractional_max_pool3d_backward", documented="torch.nn.FractionalMaxPool3d"),
    _make_unpooling(2, "torch.nn.MaxUnpool1d", "torch.nn.MaxUnpool2d"),
    _make_unpooling(3, "torch.nn.MaxUnpool3d"),
)
