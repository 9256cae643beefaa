"""Rules for separable linear operations: interpolation, average pooling, and their gradients.

The matrix of one dimension is what torch's own operation does to the identity matrix, in float64.
Machines may differ in its last places; rounded to a multiple of ``2**-30`` it is the same
everywhere. The operation is a product with such a matrix for each dimension, its gradient one with
the transposed matrix.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.portability.products import matmul
from lightning_d9m.portability.registry import RULES, rule

_GRID = 2.0**30


def _read_matrix(apply: Callable[[Tensor], Tensor], size: int, dims: int) -> Tensor:
    """Return ``[size out, size]`` for an operation that keeps the other dimensions at size 1."""
    identity = torch.eye(size, dtype=torch.float64).view(1, size, size, *[1] * (dims - 1))
    return _round_matrix(apply(identity).view(size, -1).t())


def _round_matrix(result: Tensor) -> Tensor:
    return result.mul(_GRID).round_().div_(_GRID).contiguous()


def _apply(matrices: Sequence[Tensor], values: Tensor) -> Tensor:
    """Multiply each of the last dimensions by its matrix."""
    dims = len(matrices)
    for axis, matrix in enumerate(matrices):
        moved = values.movedim(values.dim() - dims + axis, 0)
        product = matmul(matrix.to(values), moved.reshape(moved.shape[0], -1))
        values = product.view(-1, *moved.shape[1:]).movedim(0, values.dim() - dims + axis)
    return values.contiguous()


@lru_cache(maxsize=256)
def _interpolation(
    name: str, size: int, out: int, dims: int, corners: bool | None, scale: float | None
) -> Tensor:
    operation = getattr(torch.ops.aten, name).default
    given = [] if corners is None else [corners]
    if name.endswith("_aa"):
        # Torch 2.13 computes images of width 1 wrongly: resize the width, of two equal lines.
        identity = torch.eye(size, dtype=torch.float64).view(1, size, 1, size).repeat(1, 1, 2, 1)
        return _round_matrix(operation(identity, [2, out], *given, None, scale)[0, :, 0].t())
    rest = [1] * (dims - 1)
    scales = [scale, *[None] * (dims - 1)]
    return _read_matrix(
        lambda identity: operation(identity, [out, *rest], *given, *scales), size, dims
    )


def _interpolation_matrices(
    name: str, sizes: Sequence[int], out: Sequence[int], given: Sequence[Any]
) -> list[Tensor]:
    dims = len(out)
    corners = None if "nearest" in name else given[0]
    scales = [*(given if corners is None else given[1:]), *[None] * dims][:dims]
    return [
        _interpolation(name, size, length, dims, corners, scale)
        for size, length, scale in zip(sizes[-dims:], out, scales, strict=True)
    ]


def _interpolate(
    name: str, values: Tensor, out: Sequence[int], *given: Any, **named: Any
) -> Tensor:
    given = (*given, *named.values())
    return _apply(_interpolation_matrices(name, values.shape, out, given), values)


def _interpolate_backward(
    name: str, gradient: Tensor, out: Sequence[int], sizes: Sequence[int], *given: Any, **named: Any
) -> Tensor:
    given = (*given, *named.values())
    matrices = _interpolation_matrices(name, sizes, out, given)
    return _apply([one.t() for one in matrices], gradient)


for _name in (
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
):
    RULES[_name] = partial(_interpolate, _name)
    RULES[f"{_name}_backward"] = partial(_interpolate_backward, _name)
for _name in (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
):
    RULES[f"{_name}_backward"] = partial(_interpolate_backward, _name)


@lru_cache(maxsize=256)
def _pooling(dims: int, size: int, *given: Any) -> Tensor:
    kernel, stride, padding, ceil_mode, include_pad, divisor = given
    rest, zeros = [1] * (dims - 1), [0] * (dims - 1)
    lists = ([kernel, *rest], [stride, *rest], [padding, *zeros])
    if dims == 1:
        operation: Any = torch.ops.aten.avg_pool1d.default
        return _read_matrix(
            lambda identity: operation(identity[0], *lists, ceil_mode, include_pad), size, dims
        )
    operation = {2: torch.ops.aten.avg_pool2d, 3: torch.ops.aten.avg_pool3d}[dims].default
    return _read_matrix(
        lambda identity: operation(identity, *lists, ceil_mode, include_pad, divisor), size, dims
    )


def _pooling_matrices(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    include_pad: bool = True,
    divisor: int | None = None,
) -> list[Tensor]:
    dims = len(sizes)
    lists = [list(one) * dims if len(one) == 1 else list(one) for one in (kernel, padding)]
    steps = list(stride) * dims if len(stride) == 1 else list(stride) or lists[0]
    matrices = []
    for axis, size in enumerate(sizes):
        own = None if divisor is None else (divisor if axis == 0 else 1)
        given = (lists[0][axis], steps[axis], lists[1][axis], ceil_mode, include_pad, own)
        matrices.append(_pooling(dims, size, *given))
    return matrices


def _pool(dims: int, values: Tensor, *given: Any, **named: Any) -> Tensor:
    return _apply(_pooling_matrices(values.shape[-dims:], *given, **named), values)


def _pool_backward(dims: int, gradient: Tensor, values: Tensor, *given: Any) -> Tensor:
    matrices = _pooling_matrices(values.shape[-dims:], *given)
    return _apply([one.t() for one in matrices], gradient)


@lru_cache(maxsize=256)
def _adaptive(dims: int, size: int, out: int) -> Tensor:
    names = {1: "adaptive_avg_pool1d", 2: "_adaptive_avg_pool2d", 3: "_adaptive_avg_pool3d"}
    operation = getattr(torch.ops.aten, names[dims]).default
    return _read_matrix(lambda one: operation(one, [out, *[1] * (dims - 1)]), size, dims)


def _adaptive_pool(dims: int, values: Tensor, out: Sequence[int]) -> Tensor:
    pairs = zip(values.shape[-dims:], out, strict=True)
    return _apply([_adaptive(dims, *pair) for pair in pairs], values)


def _adaptive_pool_backward(dims: int, gradient: Tensor, values: Tensor) -> Tensor:
    pairs = zip(values.shape[-dims:], gradient.shape[-dims:], strict=True)
    return _apply([_adaptive(dims, *pair).t() for pair in pairs], gradient)


for _dims in (2, 3):
    RULES |= {
        f"avg_pool{_dims}d": partial(_pool, _dims),
        f"avg_pool{_dims}d_backward": partial(_pool_backward, _dims),
        f"_adaptive_avg_pool{_dims}d": partial(_adaptive_pool, _dims),
        f"_adaptive_avg_pool{_dims}d_backward": partial(_adaptive_pool_backward, _dims),
    }


@lru_cache(maxsize=256)
def _padding(kind: str, size: int, before: int, after: int) -> Tensor:
    operation = getattr(torch.ops.aten, f"{kind}_pad1d").default
    return _read_matrix(lambda one: operation(one[0], [before, after]), size, 1)


def _pad_backward(kind: str, gradient: Tensor, values: Tensor, padding: Sequence[int]) -> Tensor:
    dims = len(padding) // 2
    matrices = [
        _padding(kind, size, *padding[2 * (dims - 1 - axis) :][:2]).t()
        for axis, size in enumerate(values.shape[-dims:])
    ]
    return _apply(matrices, gradient)


for _dims in (1, 2, 3):
    for _kind in ("reflection", "replication"):
        RULES[f"{_kind}_pad{_dims}d_backward"] = partial(_pad_backward, _kind)


@rule("avg_pool1d")
def avg_pool1d(values: Tensor, *given: Any, **named: Any) -> Tensor:
    """The averages of windows."""
    return _pool(1, values, *given, **named)
