"""Rules for layers: convolutions, normalizations, softmax, activations, pooling, scattered sums."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.updates import add_rows
from lightning_d9m.portability import functions
from lightning_d9m.portability.arithmetic import at_least_32, reciprocal, spread, sqrt, sum_values
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


class Normalization(NamedTuple):
    """The view of an input in which it is normalized over some dimensions.

    Attributes:
        shape: The shape of the view.
        dims: The dimensions over which the statistics are found; none if they are constants.
        outer: The dimensions over which weight and bias are shared.
    """

    shape: Sequence[int]
    dims: Sequence[int]
    outer: Sequence[int]

    def spread(self, values: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means, the variances and the inverse deviations."""
        variance, center = spread(values.reshape(self.shape), self.dims, 0)
        return center, variance, reciprocal(sqrt(variance + eps))

    def _shape(self, tensor: Tensor) -> Tensor:
        sizes = [1 if dim in self.outer else size for dim, size in enumerate(self.shape)]
        return tensor.view(sizes)

    def apply(
        self, values: Tensor, center: Tensor, scale: Tensor, weight: Tensor | None, bias: Any
    ) -> Tensor:
        """Return the normalized input, times the weight, plus the bias."""
        wide = (values.reshape(self.shape).double() - center).mul_(scale)
        if weight is not None:
            wide.mul_(self._shape(weight))
        if bias is not None:
            wide.add_(self._shape(bias))
        return wide.to(values.dtype).view(values.shape)

    def differentiate(
        self,
        gradient: Tensor,
        values: Tensor,
        center: Tensor,
        scale: Tensor,
        weight: Tensor | None,
        mask: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients for the input, the weight and the bias, where the mask asks."""
        grown = gradient.reshape(self.shape)
        normal = (values.reshape(self.shape).double() - center).mul_(scale)
        dtype = at_least_32(values.dtype)
        for_input = for_weight = for_bias = None
        if mask[0]:
            wide = grown.double() if weight is None else grown.double() * self._shape(weight)
            if self.dims:
                count = prod(self.shape[dim] for dim in self.dims)
                add_up = partial(add_terms, dims=self.dims, keepdim=True, dtype=dtype)
                plain, turned = (add_up(one).double() / count for one in (wide, wide * normal))
                wide = (wide - plain).sub_(normal * turned)
            for_input = (wide * scale).to(values.dtype).view(values.shape)
        add_over = partial(add_terms, dims=self.outer, keepdim=False, dtype=dtype)
        if mask[1]:
            terms = grown.double() * normal
            for_weight = add_over(terms) if self.outer else terms
        if mask[2]:
            for_bias = add_over(grown) if self.outer else grown
        return for_input, for_weight, for_bias


def _per_channel(values: Tensor, training: bool = True) -> Normalization:
    dims = [0, *range(2, values.dim())]
    return Normalization(values.shape, dims if training else [], dims)


@rule("native_batch_norm")
def batch_norm(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalization."""
    form = _per_channel(values)
    if not training:
        center, scale = _read_running(running_mean, running_var, eps)
        shape = [1, -1, *[1] * (values.dim() - 2)]
        result = form.apply(values, center.view(shape), scale.view(shape), weight, bias)
        return result, values.new_empty(0), values.new_empty(0)
    center, variance, scale = form.spread(values, eps)
    count = values.numel() // values.shape[1]
    for running, found in (
        (running_mean, center),
        (running_var, variance * (count / max(count - 1, 1))),
    ):
        if running is not None:
            running.copy_(running * (1 - momentum) + found.view(-1) * momentum)
    return form.apply(values, center, scale, weight, bias), center.view(-1), scale.view(-1)


def _read_running(
    mean: Tensor | None, variance: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    assert mean is not None
    assert variance is not None
    return mean, reciprocal(sqrt(variance + eps))


@rule("native_batch_norm_backward")
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
) -> tuple[Tensor | None, ...]:
    """The gradients of batch normalization."""
    if not training:
        mean, scale = _read_running(running_mean, running_var, eps)
    assert mean is not None
    assert scale is not None
    shape = [1, -1, *[1] * (values.dim() - 2)]
    form = _per_channel(values, training)
    return form.differentiate(gradient, values, mean.view(shape), scale.view(shape), weight, mask)


def _per_row(values: Tensor, shape: Sequence[int]) -> Normalization:
    first = values.dim() - len(shape)
    return Normalization(values.shape, range(first, values.dim()), range(first))


@rule("native_layer_norm")
def layer_norm(
    values: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalization."""
    form = _per_row(values, shape)
    center, _, scale = form.spread(values, eps)
    return form.apply(values, center, scale, weight, bias), center, scale


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
    wanted = (mask[0], mask[1] and weight is not None, mask[2] and bias is not None)
    found = _per_row(values, shape).differentiate(gradient, values, mean, scale, weight, wanted)
    return tuple(
        None if one is None else one.to(like.dtype)  # type: ignore[union-attr]
        for one, like in zip(found, (values, weight, bias), strict=True)
    )


# The decompositions of these changed between torch 2.10 and 2.13.
@rule("native_group_norm")
def group_norm(
    values: Tensor, weight: Any, bias: Any, n: int, c: int, area: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Group normalization."""
    form = Normalization((n, groups, c // groups, area), [2, 3], [0, 3])
    center, _, scale = form.spread(values, eps)
    result = form.apply(values, center, scale, weight, bias)
    return result, center.view(n, groups), scale.view(n, groups)


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
    form = Normalization((n, groups, c // groups, area), [2, 3], [0, 3])
    statistics = (mean.view(n, groups, 1, 1), scale.view(n, groups, 1, 1))
    found = form.differentiate(gradient, values, *statistics, weight, mask)
    return found[0], *(None if one is None else one.view(c) for one in found[1:])


@rule("silu_backward")
def silu_backward(gradient: Tensor, values: Tensor) -> Tensor:
    """The gradient of the SiLU function."""
    return evaluate(lambda g, x: functions.silu_slope(x).mul_(g), gradient, values)


def _exponentials(values: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values less the greatest, their exponentials, and the sum of these."""
    wide = values.double()
    shifted = wide - torch.amax(wide, dim, keepdim=True)
    grown = evaluate(functions.exp, shifted)
    return shifted, grown, _add_along(grown, dim, values.dtype).double()


def _add_along(terms: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return add_terms(terms, [dim], keepdim=True, dtype=at_least_32(dtype))


@rule("_softmax")
def softmax(values: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Exponentials, divided by their sum."""
    _, grown, total = _exponentials(values, dim)
    return grown.div_(total).to(torch.float32 if half_to_float else values.dtype)


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
    return (g - _add_along(g * y, dim, output.dtype)).mul_(y).to(input_dtype)


@rule("_log_softmax_backward_data")
def log_softmax_backward(
    gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """The gradient of the logarithm of the softmax."""
    grown = evaluate(functions.exp, output.double())
    return (gradient - grown.mul_(_add_along(gradient, dim, output.dtype))).to(input_dtype)


def _add_at(out: Tensor, places: Tensor, values: Tensor) -> Tensor:
    out = out.clone(memory_format=torch.contiguous_format)
    terms = values.expand(places.shape).reshape(-1).to(out.dtype)
    if not out.is_floating_point():
        out.view(-1).index_add_(0, places.reshape(-1), terms)
        return out
    add_rows(out.view(-1), places.reshape(-1), terms, include=True)
    return out.add_(0.0)


def _number(values: Tensor) -> Tensor:
    return torch.arange(values.numel(), device=values.device).view(values.shape)


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
    ones = (torch.ones_like(values), dim, index, torch.ones_like(source), "sum")
    counts = torch.scatter_reduce(*ones, include_self=include_self).clamp(min=1)
    return torch.div(total, counts, rounding_mode=None if values.is_floating_point() else "floor")


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(
    values: Tensor, indices: Sequence[Any], source: Tensor, accumulate: bool = False, *_: Any
) -> Tensor:
    """Write to, or add to, indexed places."""
    if not accumulate:
        return torch.index_put(values, list(indices), source)
    return _add_at(values, torch.ops.aten.index(_number(values), list(indices)), source)


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
    """Add the gradients of windows to their places."""
    del padding, ceil_mode
    flat = values.new_zeros(values.shape).flatten(-dims)
    given = (flat, -1, indices.flatten(-dims), gradient.flatten(-dims))
    steps = stride or kernel
    apart = max(dilation) == 1 and min(steps) >= max(kernel)
    found = torch.scatter(*given) if apart else scatter_add(*given)
    return found.view(values.shape)


RULES |= {
    "max_pool2d_with_indices_backward": partial(_pool_backward, 2),
    "max_pool3d_with_indices_backward": partial(_pool_backward, 3),
}
