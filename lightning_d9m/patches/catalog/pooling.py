"""Catalog entries of pooling and unpooling."""

from lightning_d9m.patches.catalog.op import ATOMICS, GATHER, FlagEffect, Op

_AVG_POOL = "lightning_d9m.patches.kernels.avg_pool"
_MAX_POOL = "lightning_d9m.patches.kernels.max_pool"
_PUT_UNPOOL = "lightning_d9m.patches.kernels.put_unpool"

_RAISES = "Raises in the backward pass."
_CHOSEN = (
    "Each input reads the windows that may contain it and adds those that chose it. Without Triton "
    "the outputs are sorted by the input they chose."
)
_ONE_ORDER = (
    "Equal to torch's CPU kernel on one thread; half and bfloat16 are added in float32, which is "
    "more exact."
)
_MEAN_BITS = (
    "Equal to torch's CPU kernel on one thread where windows do not overlap; where they do, the "
    "sum is taken dimension by dimension, within a few rounding errors."
)

POOLING: tuple[Op, ...] = (
    Op(
        name="avg_pool3d_backward",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.AvgPool3d",),
        torch_does=_RAISES,
        cause=ATOMICS,
        instead=f"{GATHER}, one dimension after the other.",
        bits=_MEAN_BITS,
        kernels={
            "avg_pool3d_backward": f"{_AVG_POOL}:avg_pool3d_backward",
            "avg_pool3d_backward.grad_input": f"{_AVG_POOL}:avg_pool3d_backward",
        },
    ),
    Op(
        name="adaptive_avg_pool2d_backward",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.AdaptiveAvgPool2d",),
        torch_does=_RAISES,
        cause=ATOMICS,
        instead=f"{GATHER}, one dimension after the other.",
        bits=_MEAN_BITS,
        kernels={"_adaptive_avg_pool2d_backward": f"{_AVG_POOL}:adaptive_avg_pool2d_backward"},
    ),
    Op(
        name="adaptive_avg_pool3d_backward",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.AdaptiveAvgPool3d",),
        torch_does=_RAISES,
        cause=ATOMICS,
        instead=f"{GATHER}, one dimension after the other.",
        bits=_MEAN_BITS,
        kernels={
            "_adaptive_avg_pool3d_backward": f"{_AVG_POOL}:adaptive_avg_pool3d_backward",
            "adaptive_avg_pool3d_backward.grad_input": (
                f"{_AVG_POOL}:adaptive_avg_pool3d_backward"
            ),
        },
    ),
    Op(
        name="adaptive_max_pool2d_backward",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.AdaptiveMaxPool2d",),
        torch_does=_RAISES,
        cause=ATOMICS,
        instead=_CHOSEN,
        bits=_ONE_ORDER,
        kernels={
            "adaptive_max_pool2d_backward": f"{_MAX_POOL}:adaptive_max_pool2d_backward",
            "adaptive_max_pool2d_backward.grad_input": f"{_MAX_POOL}:adaptive_max_pool2d_backward",
        },
    ),
    Op(
        name="adaptive_max_pool3d_backward",
        status="patched",
        flag_effect=FlagEffect.NONE,
        torch_does="Nothing: it neither raises nor switches, and its documentation is silent.",
        cause=ATOMICS,
        instead=_CHOSEN,
        bits=_ONE_ORDER,
        kernels={
            "adaptive_max_pool3d_backward": f"{_MAX_POOL}:adaptive_max_pool3d_backward",
            "adaptive_max_pool3d_backward.grad_input": f"{_MAX_POOL}:adaptive_max_pool3d_backward",
        },
    ),
    Op(
        name="max_pool3d_backward",
        status="patched",
        flag_effect=FlagEffect.DECOMPOSES,
        documented=("torch.nn.MaxPool3d",),
        torch_does=(
            "With return_indices, decomposes max_pool3d if deterministic algorithms were on in the "
            "forward pass (the patch restores the op); raises in the backward pass otherwise."
        ),
        cause=ATOMICS,
        instead=_CHOSEN,
        bits=_ONE_ORDER,
        kernels={
            "max_pool3d_with_indices_backward": f"{_MAX_POOL}:max_pool3d_backward",
            "max_pool3d_with_indices_backward.grad_input": f"{_MAX_POOL}:max_pool3d_backward",
        },
    ),
    Op(
        name="fractional_max_pool2d_backward",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.FractionalMaxPool2d",),
        torch_does=_RAISES,
        cause=ATOMICS,
        instead=_CHOSEN,
        bits=_ONE_ORDER,
        kernels={
            "fractional_max_pool2d_backward": f"{_MAX_POOL}:fractional_max_pool2d_backward",
            "fractional_max_pool2d_backward.grad_input": (
                f"{_MAX_POOL}:fractional_max_pool2d_backward"
            ),
        },
    ),
    Op(
        name="fractional_max_pool3d_backward",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.FractionalMaxPool3d",),
        torch_does=_RAISES,
        cause=ATOMICS,
        instead=_CHOSEN,
        bits=_ONE_ORDER,
        kernels={
            "fractional_max_pool3d_backward": f"{_MAX_POOL}:fractional_max_pool3d_backward",
            "fractional_max_pool3d_backward.grad_input": (
                f"{_MAX_POOL}:fractional_max_pool3d_backward"
            ),
        },
    ),
    Op(
        name="max_unpool2d",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.MaxUnpool1d", "torch.nn.MaxUnpool2d"),
        torch_does="Raises, on a CPU too.",
        cause="Several threads write to one place in no fixed order, and the last value stays.",
        instead="The last value wins, found as the greatest position of each place.",
        bits="Equal to torch's CPU kernel on one thread.",
        kernels={
            "max_unpool2d": f"{_PUT_UNPOOL}:max_unpool2d",
            "max_unpool2d.out": f"{_PUT_UNPOOL}:max_unpool2d",
        },
    ),
    Op(
        name="max_unpool3d",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.MaxUnpool3d",),
        torch_does="Raises, on a CPU too.",
        cause="Several threads write to one place in no fixed order, and the last value stays.",
        instead="The last value wins, found as the greatest position of each place.",
        bits="Equal to torch's CPU kernel on one thread.",
        kernels={
            "max_unpool3d": f"{_PUT_UNPOOL}:max_unpool3d",
            "max_unpool3d.out": f"{_PUT_UNPOOL}:max_unpool3d",
        },
    ),
)
