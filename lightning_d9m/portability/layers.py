"""Rules for layers: convolutions, group normalization, scattered sums, and pooling.

Torch takes the other normalizations, softmax and activations apart.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.updates import add_rows
from lightning_d9m.portability.arithmetic import sum_values
from lightning_d9m.portability.products import Convolution, convolve, convolve_backward
from lightning_d9m.portability.registry import RULES, composed, rule


@rule("convolution", "_convolution", "convolution_overrideable")
def convolution(values: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    """A convolution: exact sums over its windows."""
    result = convolve(values, weight, Convolution(*given[:6]))
    return result if bias is None else result.add_(bias.view(-1, *[1] * (weight.dim() - 2)))


@rule("convolution_backward")
def convolution_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, _bias_sizes: Any, *given: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of a convolution."""
    *more, mask = given
    found = convolve_backward(gradient, values, weight, Convolution(*more), mask)
    dims = [0, *range(2, gradient.dim())]
    return (*found, sum_values(gradient, dims) if mask[2] else None)


# The decompositions of these changed between torch 2.6 and 2.13.
@composed("native_group_norm")
def group_norm(
    values: Tensor, weight: Any, bias: Any, n: int, c: int, area: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Group normalization."""
    rows = values.reshape(n * groups, c // groups * area)
    result, mean, scale = torch.native_layer_norm(rows, rows.shape[1:], None, None, eps)
    result = result.view(n, c, area)
    result = result if weight is None else result * weight.view(c, 1)
    result = result if bias is None else result + bias.view(c, 1)
    return result.view(values.shape), mean.view(n, groups), scale.view(n, groups)


composed("silu_backward")(
    lambda gradient, values: gradient * (p := values.sigmoid()) * (1 + values * (1 - p))
)


def _add_at(out: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Add values to places of a flattened tensor."""
    out = out.clone(memory_format=torch.contiguous_format)
    terms = values.expand(places.shape).reshape(-1).to(out.dtype)
    add_rows(out.view(-1), places.reshape(-1), terms, include=True)
    return out.add_(0.0)


def _number(values: Tensor) -> Tensor:
    """Return the place of each element: what torch selects from them are the selected places."""
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
) -> Any:
    """Reduce the terms of each place."""
    if reduce == "prod":
        return NotImplemented
    if reduce in ("amax", "amin"):
        given = (values, dim, index, source, reduce)
        return torch.scatter_reduce(*given, include_self=include_self) + 0
    start = values if include_self else values.scatter(dim, index, 0)
    total = scatter_add(start, dim, index, source)
    if reduce == "sum":
        return total
    ones = (torch.ones_like(values), dim, index, torch.ones_like(source), "sum")
    counts = torch.scatter_reduce(*ones, include_self=include_self).clamp(min=1)
    return torch.div(total, counts)


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(
    values: Tensor, indices: Sequence[Any], source: Tensor, accumulate: bool = False, *_: Any
) -> Tensor:
    """Write to, or add to, indexed places."""
    if not accumulate:
        return torch.index_put(values, list(indices), source)
    return _add_at(values, torch.ops.aten.index(_number(values), list(indices)), source)


def _pool_backward(
    dims: int, gradient: Tensor, values: Tensor, kernel: Sequence[int], *given: Any
) -> Tensor:
    """Add the gradients of windows to their places."""
    stride, _, dilation, _, indices = given
    flat = values.new_zeros(values.shape).flatten(-dims)
    given = (flat, -1, indices.flatten(-dims), gradient.flatten(-dims))
    apart = max(dilation) == 1 and min(stride or kernel) >= max(kernel)
    found = torch.scatter(*given) if apart else scatter_add(*given)
    return found.view(values.shape)


for _dims in (2, 3):
    RULES[f"max_pool{_dims}d_with_indices_backward"] = partial(_pool_backward, _dims)
