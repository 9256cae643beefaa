"""Rules for softmax and normalizations, and their gradients."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.ops.portability.arithmetic import divide
from lightning_d9m.ops.portability.kernels import add, compute, widen
from lightning_d9m.ops.portability.registry import RULES, along_dim, rule

Optional = Tensor | None


def _along(name: str, dim: int, **given: Tensor) -> Tensor:
    """Compute a kernel of rows along a dimension."""
    # A kernel reads contiguous rows; along the last dimension nothing is copied.
    moved = {key: widen(one).movedim(dim, -1) for key, one in given.items()}
    (out,) = compute(name.removeprefix("_"), **moved)
    return out.movedim(-1, dim).contiguous()


def _register_softmax(name: str) -> Callable[..., Tensor]:
    @rule(name)
    @along_dim
    def forward(values: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
        return _along(name, dim, x=values).to(torch.float32 if half_to_float else values.dtype)

    @rule(f"{name}_backward_data")
    def backward(gradient: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        if not result.dim():
            return backward(gradient.view(1), result.view(1), dim, dtype).view(())
        return _along(f"{name}_backward_data", dim, gradient=gradient, y=result).to(dtype)

    return forward


softmax = _register_softmax("_softmax")
_register_softmax("_log_softmax")


def _flatten(one: Optional) -> Optional:
    return None if one is None else widen(one).contiguous().view(-1)


@rule("native_layer_norm")
def layer_norm(
    values: Tensor, sizes: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalization, the means, and the factors by which rows were scaled."""
    wide = widen(values).reshape(-1, prod(sizes))
    factors = {"weight": _flatten(weight), "bias": _flatten(bias)}
    out, means, scales = compute("layer_norm", x=wide, numbers=[eps], **factors)
    shape = [*values.shape[: values.dim() - len(sizes)], *[1] * len(sizes)]
    return out.view(values.shape).to(values.dtype), means.view(shape), scales.view(shape)


@rule("native_layer_norm_backward")
def layer_norm_backward(
    gradient: Tensor,
    values: Tensor,
    sizes: Sequence[int],
    means: Tensor,
    scales: Tensor,
    weight: Optional,
    _bias: Optional,
    mask: Sequence[bool],
) -> tuple[Optional, ...]:
    """The gradients of layer normalization."""
    rows, wide = (widen(one).reshape(-1, prod(sizes)) for one in (gradient, values))
    given = {"means": _flatten(means), "scales": _flatten(scales), "weight": _flatten(weight)}
    out, terms = compute("layer_norm_backward", gradient=rows, x=wide, **given)
    # A weight may have more bits than the values.
    dtype = gradient.dtype if weight is None else weight.dtype
    return (
        out.view(values.shape).to(values.dtype) if mask[0] else None,
        add(terms, [0]).view(sizes).to(dtype) if mask[1] else None,
        add(rows, [0]).view(sizes).to(dtype) if mask[2] else None,
    )


def _scale(variances: Tensor, eps: float) -> Tensor:
    return RULES["rsqrt"](variances + eps)  # type: ignore[no-any-return]


def _update(running: Optional, found: Tensor, momentum: float) -> None:
    if running is not None:
        # Not lerp_, which some machines compute with a fused operation.
        running.copy_(running * (1 - momentum) + found * momentum)


@rule("native_batch_norm")
def batch_norm(
    values: Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each channel, and update the averages of means and variances in place."""
    wide = widen(values)
    planes = wide.reshape(*wide.shape[:2], -1)
    if training:
        count = planes.shape[0] * planes.shape[2]
        means = divide(add(planes, [0, 2]), count)
        # One pass that writes the terms, and one that adds them: sums of each kind of term in the
        # kernels of sums would save memory traffic, and took 70 lines.
        (terms,) = compute("deviations", x=planes.flatten(0, 1), means=means)
        total = add(terms.view(planes.shape), [0, 2])
        variances = divide(total, count)
        _update(running_mean, means, momentum)
        # One observation has no variance: 0 / 0, as torch.
        _update(running_var, divide(total, max(count - 1, 0)), momentum)
        saved = means, _scale(variances, eps)
    else:
        assert running_mean is not None
        assert running_var is not None
        means, variances = widen(running_mean), widen(running_var)
        saved = (values.new_empty(0), values.new_empty(0))
    more = {"scales": _scale(variances, eps), "weight": _flatten(weight), "bias": _flatten(bias)}
    (out,) = compute("batch_norm", x=planes.flatten(0, 1), means=means, **more)
    form = suggest_memory_format(values)  # torch keeps it
    return out.view(values.shape).to(values.dtype).contiguous(memory_format=form), *saved


@rule("native_batch_norm_backward")
def batch_norm_backward(
    gradient: Tensor,
    values: Tensor,
    weight: Optional,
    running_mean: Optional,
    running_var: Optional,
    means: Optional,
    scales: Optional,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Optional, ...]:
    """The gradients of batch normalization."""
    wide, planes = (
        widen(one).reshape(values.shape[0], values.shape[1], -1) for one in (gradient, values)
    )
    if not training:
        assert running_mean is not None
        assert running_var is not None
        means, scales = widen(running_mean), _scale(widen(running_var), eps)
    assert means is not None
    assert scales is not None
    rows = {"gradient": wide.flatten(0, 1), "x": planes.flatten(0, 1), "means": means}
    rows |= {"scales": scales}
    (terms,) = compute("normalized", **rows)
    of_bias, of_weight = add(wide, [0, 2]), add(terms.view(planes.shape), [0, 2])
    out = None
    if mask[0]:
        factor = scales if weight is None else scales * widen(weight)
        if training:
            count = planes.shape[0] * planes.shape[2]
            (out,) = compute(
                "batch_norm_backward",
                **rows,
                first=divide(of_bias, count),
                second=divide(of_weight, count),
                factor=factor,
            )
        else:
            out = wide * factor.view(1, -1, 1)
        out = out.view(values.shape).to(values.dtype)
    dtype = gradient.dtype if weight is None else weight.dtype
    return out, of_weight.to(dtype) if mask[1] else None, of_bias.to(dtype) if mask[2] else None
