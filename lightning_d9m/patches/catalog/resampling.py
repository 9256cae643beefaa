"""Catalog entries of interpolation, grid sampling and padding."""

from lightning_d9m.patches.catalog.op import (
    ATOMICS,
    EXACT,
    GATHER,
    ROUNDED_ONCE,
    FlagEffect,
    Op,
    map_overloads,
)

_GRID_SAMPLE = "lightning_d9m.patches.kernels.grid_sample"
_SEPARABLE_KERNELS = "lightning_d9m.patches.kernels.separable"

_RAISES = "Raises in the backward pass."
_DECOMPOSES = (
    "Decomposes the op if deterministic algorithms were on in the forward pass (the patch restores "
    "the op); raises in the backward pass if they were off."
)
_SEPARABLE = f"{GATHER}, weighted, one dimension after the other."
_SEPARABLE_BITS = (
    "Within a few rounding errors: the sum is taken dimension by dimension; half and bfloat16 are "
    "added in float32."
)


def _make_interpolation(
    mode: str,
    *,
    prefix: str = "",
    documented: str | None = None,
    flag_effect: FlagEffect = FlagEffect.RAISES,
    since: str = "2.11",
) -> Op:
    overload = f"{prefix}upsample_{mode}_backward"
    path = f"{_SEPARABLE_KERNELS}:{mode}_backward"
    return Op(
        name=f"upsample_{mode}_backward",
        status="patched",
        flag_effect=flag_effect,
        documented=(f"torch.nn.functional.interpolate {documented}",) if documented else (),
        torch_does=_RAISES if flag_effect is FlagEffect.RAISES else _DECOMPOSES,
        cause=ATOMICS,
        instead=_SEPARABLE,
        bits=_SEPARABLE_BITS,
        kernels=map_overloads(path, overload, f"{overload}.grad_input"),
        since=since,
    )


def _make_padding(kind: str, dims: int) -> Op:
    overload = f"{kind}_pad{dims}d_backward"
    path = f"{_SEPARABLE_KERNELS}:{kind}_pad_backward"
    reflects = kind == "reflection"
    return Op(
        name=overload,
        status="patched",
        flag_effect=FlagEffect.RAISES if reflects else FlagEffect.DECOMPOSES,
        documented=(f"torch.nn.ReflectionPad{dims}d",) if reflects else (),
        torch_does=_RAISES if reflects else _DECOMPOSES,
        cause=ATOMICS,
        instead=f"{GATHER}, one dimension after the other.",
        bits=(
            "Equal to torch's CPU kernel on one thread in 1 dimension; in more, within a few "
            "rounding errors where paddings of several dimensions meet. Half and bfloat16 are "
            "added in float32."
        ),
        kernels=map_overloads(path, overload, f"{overload}.grad_input"),
    )


def _make_grid_sample(dims: int, note: str = "", *more: str) -> Op:
    name = f"grid_sampler_{dims}d_backward"
    return Op(
        name=name,
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.functional.grid_sample",),
        torch_does=_RAISES,
        cause=ATOMICS + note,
        instead=f"{EXACT} The grid's gradient is added by one thread for each sample.",
        bits=f"{ROUNDED_ONCE} A NaN coordinate contributes nothing, as on CUDA.",
        kernels={one: f"{_GRID_SAMPLE}:{one}" for one in (name, *more)},
    )


RESAMPLING: tuple[Op, ...] = (
    _make_interpolation("linear1d", documented="linear"),
    _make_interpolation("bilinear2d", documented="bilinear", flag_effect=FlagEffect.DECOMPOSES),
    _make_interpolation("bicubic2d", documented="bicubic"),
    _make_interpolation("trilinear3d", documented="trilinear", flag_effect=FlagEffect.DECOMPOSES),
    _make_interpolation("bilinear2d_aa", prefix="_"),
    _make_interpolation("bicubic2d_aa", prefix="_"),
    _make_interpolation("lanczos2d_aa", prefix="_", since="2.12"),
    *(_make_padding("reflection", dims) for dims in (1, 2, 3)),
    *(_make_padding("replication", dims) for dims in (1, 2, 3)),
    _make_grid_sample(2, " cuDNN's version varies as well.", "cudnn_grid_sampler_backward"),
    _make_grid_sample(3),
)
