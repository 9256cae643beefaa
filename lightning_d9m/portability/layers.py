"""Rules for layers: convolutions, normalizations, softmax, activations, pooling, scattered sums."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.exact_sums import add_at
from lightning_d9m.portability import functions
from lightning_d9m.portability.arithmetic import reciprocal, spread, sqrt, sum_values
from lightning_d9m.portability.functions import evaluate
from lightning_d9m.portability.products import Convolution, convolve, convolve_backward
from lightning_d9m.portability.registry import RULES, UnsupportedError, rule
from lightning_d9m.portability.sums import add_terms


@rule("convolution", "_convolution", "convolution_overrideable")
def convolution(values: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    """A convolution: exact sums over its windows."""
    if not values.is_floating_point():  # whole numbers are exact
        return torch.ops.aten.convolution(values, weight, bias, *given[:6])  # type: ignore[no-any-return]
    result = convolve(values, weight, Convolution(*given[:6]))
    return result if bias is None else result.add_(bias.view(-1, *[1] * (weight.dim() - 2)))


@rule("convolution_backward")
def convolution_backward(
    gradient: Tensor,
    values: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of a convolution."""
    del bias_sizes
    given = Convolution(stride, padding, dilation, transposed, output_padding, groups)
    found = convolve_backward(gradient, values, weight, given, mask)
    dims = [0, *range(2, gradient.dim())]
    return (*found, sum_values(gradient, dims) if mask[2] else None)


def _normalize(
    values: Tensor, center: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    wide = (values.double() - center).mul_(scale)
    if weight is not None:
        wide.mul_(weight)
    if bias is not None:
        wide.add_(bias)
    return wide.to(values.dtype)


def _differentiate_norm(
    gradient: Tensor,
    values: Tensor,
    statistics: tuple[Tensor, Tensor],
    weight: Tensor | None,
    dims: Sequence[int],
    outer: Sequence[int],
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients for the input, the weight and the bias of a normalization.

    Args:
        gradient: That of the result.
        values: The input.
        statistics: The means and the inverse deviations, which broadcast against the input.
        weight: It broadcasts against the input.
        dims: Those of the statistics; none if the statistics are constants.
        outer: Those over which the parameters are shared.
        mask: Which gradients are wanted.
    """
    center, scale = statistics
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    normal = (values.double() - center).mul_(scale)
    wide = gradient.double() if weight is None else gradient.double() * weight
    if dims:
        count = prod(values.shape[dim] for dim in dims)
        add_up = partial(add_terms, dims=dims, keepdim=True, dtype=dtype)
        plain, turned = (add_up(one).double() / count for one in (wide, wide * normal))
        wide = (wide - plain).sub_(normal * turned)
    found: list[Tensor | None] = [(wide * scale).to(values.dtype) if mask[0] else None]
    for place in (1, 2):
        if not mask[place]:
            found.append(None)
            continue
        terms = gradient.double() * normal if place == 1 else gradient
        found.append(add_terms(terms, outer, keepdim=False, dtype=dtype) if outer else terms)
    return tuple(found)


def _batch_norm(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = [0, *range(2, values.dim())]
    shape = [1, -1, *[1] * (values.dim() - 2)]
    if training:
        variance, center = spread(values, dims, 0)
        count = values.numel() // values.shape[1]
        for running, found in ((running_mean, center), (running_var, variance)):
            if running is not None:
                found = found.view(-1)  # noqa: PLW2901
                if running is running_var:
                    found = found * (count / max(count - 1, 1))  # noqa: PLW2901
                running.copy_(running * (1 - momentum) + found * momentum)
        scale = reciprocal(sqrt(variance + eps))
        kept = (center.view(-1), scale.view(-1))
    else:
        assert running_mean is not None
        assert running_var is not None
        center, scale = running_mean.view(shape), reciprocal(sqrt(running_var.view(shape) + eps))
        kept = (values.new_empty(0), values.new_empty(0))
    given = (None if one is None else one.view(shape) for one in (weight, bias))
    return (_normalize(values, center, scale, *given), *kept)


def _batch_norm_form(
    training: bool, reserves: bool, values: Tensor, weight: Any, bias: Any, *given: Any
) -> tuple[Tensor, ...]:
    """Batch normalization, as newer versions and other devices call it."""
    mean, var, *rest = given
    found = _batch_norm(values, weight, bias, mean, var, training, *rest)
    return (*found, values.new_empty(0, dtype=torch.uint8)) if reserves else found


@rule("_native_batch_norm_legit")
def batch_norm_legit(values: Tensor, weight: Any, bias: Any, *args: Any) -> tuple[Tensor, ...]:
    """Batch normalization with running statistics or without."""
    running = args if len(args) == 5 else (None, None, *args)
    return _batch_norm(values, weight, bias, *running)


RULES |= {
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": partial(_batch_norm_form, False, False),
    "_batch_norm_with_update": partial(_batch_norm_form, True, True),
    "_batch_norm_no_update": partial(_batch_norm_form, False, True),
}


@rule("native_batch_norm_backward", "batch_norm_backward")
def batch_norm_backward(
    gradient: Tensor,
    values: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    scale: Tensor | None,
    training: bool,
    eps: float,
    mask: Sequence[bool],
    *_: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients of batch normalization."""
    shape = [1, -1, *[1] * (values.dim() - 2)]
    dims = [0, *range(2, values.dim())]
    if not training:
        assert running_var is not None
        mean, scale = running_mean, reciprocal(sqrt(running_var + eps))
    assert mean is not None
    assert scale is not None
    statistics = (mean.view(shape), scale.view(shape))
    shaped = None if weight is None else weight.view(shape)
    stats_dims = dims if training else []
    return _differentiate_norm(gradient, values, statistics, shaped, stats_dims, dims, mask)


@rule("native_layer_norm")
def layer_norm(
    values: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalization."""
    variance, center = spread(values, list(range(-len(shape), 0)), 0)
    scale = reciprocal(sqrt(variance + eps))
    return _normalize(values, center, scale, weight, bias), center, scale


@rule("native_layer_norm_backward")
def layer_norm_backward(
    gradient: Tensor,
    values: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of layer normalization."""
    first = values.dim() - len(shape)
    dims, outer = list(range(first, values.dim())), list(range(first))
    wanted = (mask[0], mask[1] and weight is not None, mask[2] and bias is not None)
    found = _differentiate_norm(gradient, values, (mean, scale), weight, dims, outer, wanted)
    given = (values, weight, bias)
    return tuple(
        None if one is None else one.to(like.dtype)  # type: ignore[union-attr]
        for one, like in zip(found, given, strict=True)
    )


# The decompositions of these changed between torch 2.10 and 2.13.
@rule("native_group_norm")
def group_norm(
    values: Tensor, weight: Any, bias: Any, n: int, c: int, area: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Group normalization."""
    grouped = values.reshape(n, groups, c // groups, area)
    variance, center = spread(grouped, [2, 3], 0)
    scale = reciprocal(sqrt(variance + eps))
    given = (None if one is None else one.view(1, groups, -1, 1) for one in (weight, bias))
    result = _normalize(grouped, center, scale, *given)
    return result.view(values.shape), center.view(n, groups), scale.view(n, groups)


@rule("native_group_norm_backward")
def group_norm_backward(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    area: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of group normalization."""
    g, x = (one.reshape(n, groups, c // groups, area) for one in (gradient, values))
    shaped = None if weight is None else weight.view(1, groups, -1, 1)
    statistics = (mean.view(n, groups, 1, 1), scale.view(n, groups, 1, 1))
    found = _differentiate_norm(g, x, statistics, shaped, [2, 3], [0, 3], mask)
    shapes = (values.shape, (c,), (c,))
    return tuple(
        None if one is None else one.view(shape) for one, shape in zip(found, shapes, strict=True)
    )


@rule("silu_backward")
def silu_backward(gradient: Tensor, values: Tensor) -> Tensor:
    """The gradient of the SiLU function."""
    return evaluate(lambda g, x: functions.silu_slope(x).mul_(g), gradient, values)


def _exponentials(values: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values less the greatest, their exponentials, and the sum of these."""
    wide = values.double()
    shifted = wide - torch.amax(wide, dim, keepdim=True)
    grown = evaluate(functions.exp, shifted)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return shifted, grown, add_terms(grown, [dim], keepdim=True, dtype=dtype).double()


@rule("_softmax")
def softmax(values: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Exponentials, divided by their sum."""
    _, grown, total = _exponentials(values, dim)
    return grown.div_(total).to(torch.float32 if half_to_float else values.dtype)


@rule("_safe_softmax")
def safe_softmax(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The softmax; 0 where all values are minus infinity."""
    masked = (values == float("-inf")).all(dim, keepdim=True)
    return torch.where(masked, 0.0, softmax(values if dtype is None else values.to(dtype), dim))


@rule("_log_softmax")
def log_softmax(values: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """The logarithm of the softmax."""
    shifted, _, total = _exponentials(values, dim)
    result = shifted.sub_(evaluate(functions.log, total))
    return result.to(torch.float32 if half_to_float else values.dtype)


@rule("_softmax_backward_data")
def softmax_backward(
    gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """The gradient of the softmax."""
    g, y = gradient.double(), output.double()
    dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
    total = add_terms(g * y, [dim], keepdim=True, dtype=dtype)
    return (g - total).mul_(y).to(input_dtype)


@rule("_log_softmax_backward_data")
def log_softmax_backward(
    gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """The gradient of the logarithm of the softmax."""
    dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
    total = add_terms(gradient, [dim], keepdim=True, dtype=dtype)
    grown = evaluate(functions.exp, output.double())
    return (gradient - grown.mul_(total)).to(input_dtype)


def _add_at(out: Tensor, places: Tensor, values: Tensor) -> Tensor:
    out = out.clone(memory_format=torch.contiguous_format)
    if not out.is_floating_point():
        out.view(-1).index_add_(0, places.reshape(-1), values.expand(places.shape).reshape(-1))
        return out
    add_at(out, places.reshape(-1), values.expand(places.shape).reshape(-1).to(out.dtype))
    return out.add_(0.0)


def _number(values: Tensor) -> Tensor:
    return torch.arange(values.numel(), device=values.device).view(values.shape)


@rule("index_add")
def index_add(
    values: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    """Add to chosen slices."""
    places = _number(values).index_select(dim, index.view(-1))
    return _add_at(values, places, source if alpha == 1 else source * alpha)


@rule("scatter_add")
def scatter_add(values: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Add to chosen places."""
    used = source[tuple(slice(size) for size in index.shape)]
    return _add_at(values, _number(values).gather(dim, index), used)


@rule("scatter_reduce")
def scatter_reduce(
    values: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Reduce the terms of each place."""
    if reduce in ("amax", "amin"):
        given = (values, dim, index, source, reduce)
        return torch.scatter_reduce(*given, include_self=include_self) + 0
    if reduce == "prod":
        raise UnsupportedError("Products of scattered factors have no rule")
    start = values if include_self else values.scatter(dim, index, 0)
    total = scatter_add(start, dim, index, source)
    if reduce == "sum":
        return total
    counts = torch.ones_like(values)
    counts = counts if include_self else counts.scatter(dim, index, 0)
    counts = counts.scatter_add(dim, index, torch.ones_like(source)).clamp(min=1)
    if values.is_floating_point():
        return total / counts
    return torch.div(total, counts, rounding_mode="floor")


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(
    values: Tensor, indices: Sequence[Any], source: Tensor, accumulate: bool = False, *_: Any
) -> Tensor:
    """Write to, or add to, indexed places."""
    if not accumulate:
        return torch.index_put(values, list(indices), source)
    return _add_at(values, torch.ops.aten.index(_number(values), list(indices)), source)


@rule("put")
def put(values: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Write to, or add to, places of the flattened tensor."""
    if not accumulate:
        return torch.ops.aten.put(values, index, source)  # type: ignore[no-any-return]
    return _add_at(values, _number(values).view(-1)[index], source.reshape(index.shape))


def _pool_backward(
    dims: int,
    gradient: Tensor,
    values: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Add the gradients of windows that do not overlap at a time, in one order."""
    del padding, ceil_mode
    kernel, stride, dilation = (
        list(one) * dims if len(one) == 1 else list(one) for one in (kernel, stride, dilation)
    )
    stride = stride or kernel
    reach = (d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    phases = [-(-length // step) for length, step in zip(reach, stride, strict=True)]
    out = values.new_zeros(values.shape)
    flat = out.view(-1, prod(values.shape[-dims:]))
    g, i = (one.reshape(-1, *one.shape[-dims:]) for one in (gradient, indices))
    for phase in range(prod(phases)):
        starts = [phase // prod(phases[axis + 1 :]) % phases[axis] for axis in range(dims)]
        chosen = (slice(None), *(slice(a, None, s) for a, s in zip(starts, phases, strict=True)))
        flat.scatter_add_(1, i[chosen].flatten(1), g[chosen].flatten(1))
    return out


RULES |= {
    "max_pool2d_with_indices_backward": partial(_pool_backward, 2),
    "max_pool3d_with_indices_backward": partial(_pool_backward, 3),
}
