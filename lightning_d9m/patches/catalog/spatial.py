"""Catalog entries of pooling, unpooling, interpolation, grid sampling and padding."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lightning_d9m.patches.catalog.op import (
    ATOMICS,
    EXACT,
    LAST_STAYS,
    ROUNDED_ONCE,
    FlagEffect,
    Op,
    make_patched,
)

_GATHER = "Each input reads the outputs it went to, in ascending order"
_BITS = (
    "Within a few rounding errors: the sum is taken dimension by dimension{}; half and bfloat16 "
    "are added in float32."
)
_DECOMPOSED: dict[str, Any] = {
    "flag_effect": FlagEffect.DECOMPOSES,
    "torch_does": (
        "Decomposes the op if deterministic algorithms were on in the forward pass (the patch "
        "restores the op); raises in the backward pass if they were off."
    ),
}
_AVERAGED: dict[str, Any] = {
    "instead": f"{_GATHER}, one dimension after the other.",
    "bits": _BITS.format(", and means multiply by the reciprocal"),
}
_PADDED: dict[str, Any] = {
    "instead": f"{_GATHER}, one dimension after the other.",
    "bits": (
        "Equal to torch's CPU kernel on one thread in 1 dimension; in more, within a few rounding "
        "errors where paddings of several dimensions meet. Half and bfloat16 are added in float32."
    ),
}
_FEW_WINDOWS: dict[str, Any] = {"bits": ROUNDED_ONCE.replace("2**-40", "2**-24")}
_UNPOOLED: dict[str, Any] = {
    "torch_does": "Raises, on a CPU too.",
    "cause": LAST_STAYS,
    "instead": "The last value wins, found as the greatest position of each place.",
    "bits": "Equal to torch's CPU kernel on one thread.",
}


def _make_gradient(
    kernel: str, name: str, documented: str = "", overloads: str = "", **fields: Any
) -> Op:
    """Return an entry whose replacement has the op's name unless one is given after a colon."""
    overloads = overloads or f"{name} {name}.grad_input"
    kernel = kernel if ":" in kernel else f"{kernel}:{name}"
    return make_patched(name, kernel, overloads, documented, **fields)


def _make_interpolation(mode: str, documented: str = "", prefix: str = "", **fields: Any) -> Op:
    name = f"upsample_{mode}_backward"
    return _make_gradient(
        f"separable:{mode}_backward",
        name,
        f"torch.nn.functional.interpolate {documented}" if documented else "",
        f"{prefix}{name} {prefix}{name}.grad_input",
        instead=f"{_GATHER}, weighted, one dimension after the other.",
        bits=_BITS.format(""),
        **fields,
    )


def _make_grid_sample(dims: int, cause: str = ATOMICS, *more: str) -> Op:
    name, path = f"grid_sampler_{dims}d_backward", "lightning_d9m.patches.kernels.grid_sample"
    entry = make_patched(
        name,
        f"grid_sample:{name}",
        name,
        "torch.nn.functional.grid_sample",
        cause=cause,
        instead=f"{EXACT} The grid's gradient is added by one thread for each sample.",
        bits=f"{ROUNDED_ONCE} A NaN coordinate contributes nothing, as on CUDA.",
    )
    kernels = {one: f"{path}:{one}" for one in (name, *more)}
    return replace(entry, kernels=MappingProxyType(kernels))


SPATIAL: tuple[Op, ...] = (
    _make_gradient("separable", "avg_pool3d_backward", "torch.nn.AvgPool3d", **_AVERAGED),
    _make_gradient(
        "separable",
        "adaptive_avg_pool2d_backward",
        "torch.nn.AdaptiveAvgPool2d",
        "_adaptive_avg_pool2d_backward",
        **_AVERAGED,
    ),
    _make_gradient(
        "separable",
        "adaptive_avg_pool3d_backward",
        "torch.nn.AdaptiveAvgPool3d",
        "_adaptive_avg_pool3d_backward adaptive_avg_pool3d_backward.grad_input",
        **_AVERAGED,
    ),
    _make_gradient("max_pool", "adaptive_max_pool2d_backward", "torch.nn.AdaptiveMaxPool2d"),
    _make_gradient(
        "max_pool",
        "adaptive_max_pool3d_backward",
        flag_effect=FlagEffect.NONE,
        torch_does="Nothing: it neither raises nor switches, and its documentation is silent.",
    ),
    _make_gradient(
        "max_pool",
        "max_pool3d_backward",
        "torch.nn.MaxPool3d",
        "max_pool3d_with_indices_backward max_pool3d_with_indices_backward.grad_input",
        **_FEW_WINDOWS,
        flag_effect=FlagEffect.DECOMPOSES,
        torch_does=(
            "With return_indices, decomposes max_pool3d if deterministic algorithms were on in the "
            "forward pass (the patch restores the op); raises in the backward pass otherwise."
        ),
    ),
    _make_gradient(
        "max_pool",
        "fractional_max_pool2d_backward",
        "torch.nn.FractionalMaxPool2d",
        **_FEW_WINDOWS,
    ),
    _make_gradient(
        "max_pool",
        "fractional_max_pool3d_backward",
        "torch.nn.FractionalMaxPool3d",
        **_FEW_WINDOWS,
    ),
    make_patched(
        "max_unpool2d",
        "max_pool:max_unpool2d",
        "max_unpool2d max_unpool2d.out",
        "torch.nn.MaxUnpool1d, torch.nn.MaxUnpool2d",
        **_UNPOOLED,
    ),
    make_patched(
        "max_unpool3d",
        "max_pool:max_unpool3d",
        "max_unpool3d max_unpool3d.out",
        "torch.nn.MaxUnpool3d",
        **_UNPOOLED,
    ),
    _make_interpolation("linear1d", "linear"),
    _make_interpolation("bilinear2d", "bilinear", **_DECOMPOSED),
    _make_interpolation("bicubic2d", "bicubic"),
    _make_interpolation("trilinear3d", "trilinear", **_DECOMPOSED),
    _make_interpolation("bilinear2d_aa", prefix="_"),
    _make_interpolation("bicubic2d_aa", prefix="_"),
    *(
        _make_gradient(
            "separable:reflection_pad_backward",
            f"reflection_pad{dims}d_backward",
            f"torch.nn.ReflectionPad{dims}d",
            **_PADDED,
        )
        for dims in (1, 2, 3)
    ),
    *(
        _make_gradient(
            "separable:replication_pad_backward",
            f"replication_pad{dims}d_backward",
            **_PADDED,
            **_DECOMPOSED,
        )
        for dims in (1, 2, 3)
    ),
    _make_grid_sample(
        2, f"{ATOMICS} cuDNN's version varies as well.", "cudnn_grid_sampler_backward"
    ),
    _make_grid_sample(3),
)
