"""Rules for softmax and normalizations, and their gradients."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.ops.portability import kernels
from lightning_d9m.ops.portability.definitions import divide
from lightning_d9m.ops.portability.kernels import add, widen
from lightning_d9m.ops.portability.registry import along_dim, rule
from lightning_d9m.ops.portability.roots import find_root

Optional = Tensor | None


def _as_rows(function: Callable[..., Tensor], dim: int, *given: Tensor) -> Tensor:
    """Apply a function of rows along a dimension."""
    moved = [widen(one).movedim(dim, -1) for one in given]
    rows = [one.reshape(-1, one.shape[-1]) for one in moved]
    return function(*rows).view(moved[0].shape).movedim(-1, dim).contiguous()


def _register_softmax(name: str, *, logarithm: bool) -> Callable[..., Tensor]:
    @rule(name)
    @along_dim
    def forward(values: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
        def compute(rows: Tensor) -> Tensor:
            return kernels.softmax(rows, logarithm=logarithm)

        return _as_rows(compute, dim, values).to(torch.float32 if half_to_float else values.dtype)

    @rule(f"{name}_backward_data")
    def backward(gradient: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        def compute(rows: Tensor, others: Tensor) -> Tensor:
            return kernels.softmax_backward(rows, others, logarithm=logarithm)

        if not result.dim():
            return backward(gradient.view(1), result.view(1), dim, dtype).view(())
        return _as_rows(compute, dim, gradient, result).to(dtype)

    return forward


softmax = _register_softmax("_softmax", logarithm=False)
_register_softmax("_log_softmax", logarithm=True)


@rule("_safe_softmax")
def safe_softmax(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax, which is 0 where all numbers are -inf."""
    wide = values if dtype is None else values.to(dtype)
    result = softmax(wide, dim)
    hidden = wide.amax(dim, keepdim=True) == -torch.inf
    return result.masked_fill_(hidden, 0.0) if bool(hidden.any()) else result


def _flatten(one: Optional) -> Optional:
    return None if one is None else widen(one).contiguous().view(-1)


@rule("native_layer_norm")
def layer_norm(
    values: Tensor, sizes: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalization, the means, and the factors by which rows were scaled."""
    wide = widen(values).reshape(-1, prod(sizes))
    out, means, scales = kernels.layer_norm(wide, _flatten(weight), _flatten(bias), float(eps))
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
    statistics = (widen(one).reshape(-1) for one in (means, scales))
    out, terms = kernels.layer_norm_backward(rows, wide, _flatten(weight), *statistics)
    return (
        out.view(values.shape).to(values.dtype) if mask[0] else None,
        add(terms, [0]).view(sizes).to(gradient.dtype) if mask[1] else None,
        add(rows, [0]).view(sizes).to(gradient.dtype) if mask[2] else None,
    )


def _scale(variances: Tensor, eps: float) -> Tensor:
    return torch.ones_like(variances) / find_root(variances + torch.full_like(variances, eps))


def _update(running: Optional, found: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(running * (1 - momentum) + found * momentum)


def _normalize_batch(
    values: Tensor,
    weight: Optional,
    bias: Optional,
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each channel, and update the averages of means and variances in place."""
    running_mean, running_var, training, momentum, eps = given
    wide = widen(values)
    planes = wide.reshape(*wide.shape[:2], -1)
    if training:
        count = planes.shape[0] * planes.shape[2]
        means = divide(add(planes, [0, 2]), count)
        total = add(planes, [0, 2], kind="deviations", center=means)
        variances = divide(total, count)
        _update(running_mean, means, momentum)
        # One observation has no variance: 0 / 0, as torch.
        _update(running_var, divide(total, max(count - 1, 0)), momentum)
        saved = means, _scale(variances, eps)
    else:
        means, variances = widen(running_mean), widen(running_var)
        saved = (values.new_empty(0), values.new_empty(0))
    factors = _flatten(weight), _flatten(bias)
    out = kernels.batch_norm(planes, means, _scale(variances, eps), *factors)
    return out.view(values.shape).to(values.dtype), *saved


@rule("native_batch_norm", "_native_batch_norm_legit")
def batch_norm(values: Tensor, weight: Optional, bias: Optional, *given: Any) -> Any:
    """Batch normalization; without averages it is of one batch alone."""
    if isinstance(given[0], bool):
        given = (None, None, *given)
    return _normalize_batch(values, weight, bias, *given)


@rule("_native_batch_norm_legit_no_training")
def batch_norm_by_averages(values: Tensor, weight: Optional, bias: Optional, *given: Any) -> Any:
    """Batch normalization by the averages of means and variances."""
    return _normalize_batch(values, weight, bias, *given[:2], False, *given[2:])


@rule("_batch_norm_with_update")
def batch_norm_with_update(values: Tensor, weight: Optional, bias: Optional, *given: Any) -> Any:
    """Batch normalization, and bytes that its gradient does not need."""
    found = _normalize_batch(values, weight, bias, *given[:2], True, *given[2:])
    return *found, values.new_empty(0, dtype=torch.uint8)


@rule("_batch_norm_no_update")
def batch_norm_without_update(values: Tensor, weight: Optional, bias: Optional, *given: Any) -> Any:
    """Batch normalization by averages, and bytes that its gradient does not need."""
    found = _normalize_batch(values, weight, bias, *given[:2], False, *given[2:])
    return *found, values.new_empty(0, dtype=torch.uint8)


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
    of_bias = add(wide, [0, 2])
    of_weight = add(wide, [0, 2], kind="normalized", y=planes, center=means, factor=scales)
    out = None
    if mask[0]:
        factor = scales if weight is None else scales * widen(weight)
        if training:
            count = planes.shape[0] * planes.shape[2]
            shares = divide(of_bias, count), divide(of_weight, count)
            given = (planes, means, scales, *shares, factor.contiguous())
            out = kernels.batch_norm_backward(wide, *given)
        else:
            out = wide * factor.view(1, -1, 1)
        out = out.view(values.shape).to(values.dtype)
    dtype = gradient.dtype if weight is None else weight.dtype
    return out, of_weight.to(dtype) if mask[1] else None, of_bias.to(dtype) if mask[2] else None
