"""Rules for separable linear operations: interpolation, average pooling, and their gradients.

The matrix of one dimension is what torch's own operation does to the identity matrix, in float64.
Machines may differ in its last places; rounded to a multiple of ``2**-30`` it is the same
everywhere. The operation is a product with such a matrix for each dimension, its gradient one with
the transposed matrix.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.portability.products import matmul
from lightning_d9m.portability.registry import RULES

_GRID = 2.0**30

Matrices = Iterator[Tensor]
"""The matrix of each of the last dimensions, ``[outputs, inputs]``."""


@lru_cache(maxsize=256)
def _read_matrix(name: str, size: int, columns: int, *arguments: Any) -> Tensor:
    """Return the matrix of an operation along one dimension.

    An operation of two dimensions sees so many equal columns, and gives one or as many.
    """
    operation = getattr(torch.ops.aten, name).default
    lines = torch.eye(size, dtype=torch.float64).unsqueeze(1)
    if columns:
        lines = lines.unsqueeze(3).repeat(1, 1, 1, columns)
    given = (list(one) if isinstance(one, tuple) else one for one in arguments)
    found: Tensor = operation(lines, *given)
    found = found[:, 0, :, 0] if columns else found[:, 0]
    return found.t().mul(_GRID).round_().div_(_GRID).contiguous()


def _resize(
    name: str, sizes: Sequence[int], out: Sequence[int], *given: Any, **named: Any
) -> Matrices:
    given = (*given, *named.values())
    corners = () if "nearest" in name else given[:1]
    scales = [*given[len(corners) :], *[None] * len(out)]
    # Torch 2.13 computes images of width 1 wrongly with antialiasing: it gets two columns.
    columns = 2 if "cubic" in name or name.endswith("_aa") else 0
    alone = name if columns else re.sub("(bi|tri)?linear", "linear", name)[:-2] + "1d"
    for size, length, scale in zip(sizes[-len(out) :], out, scales, strict=False):
        wanted, more = ((length, columns), (None,)) if columns else ((length,), ())
        yield _read_matrix(alone, size, columns, wanted, *corners, scale, *more)


def _average(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    include_pad: bool = True,
    divisor: int | None = None,
) -> Matrices:
    """Return the matrices of average pooling; the divisor is that of the first dimension."""
    lists = (list(one) * (len(sizes) // len(one)) for one in (kernel, stride or kernel, padding))
    for size, length, step, margin in zip(sizes, *lists, strict=True):
        given = ((length, 1), (step, 1), (margin, 0), ceil_mode, include_pad, divisor)
        yield _read_matrix("avg_pool2d", size, 1, *given)
        divisor = None if divisor is None else 1


def _average_adaptively(sizes: Sequence[int], out: Sequence[int]) -> Matrices:
    for size, length in zip(sizes, out, strict=True):
        yield _read_matrix("_adaptive_avg_pool2d", size, 1, (length, 1))


def _apply(matrices: Matrices, values: Tensor, dims: int, *, turned: bool = False) -> Tensor:
    """Multiply each of the last dimensions by its matrix, or by the transposed one."""
    for axis, matrix in enumerate(matrices, values.dim() - dims):
        moved = values.movedim(axis, 0)
        factor = (matrix.t() if turned else matrix).to(values)
        product = matmul(factor, moved.reshape(moved.shape[0], -1))
        values = product.view(-1, *moved.shape[1:]).movedim(0, axis)
    return values.contiguous()


def _register(dims: int, name: str, find: Callable[..., Matrices], *, forward: bool = True) -> None:
    """Register an operation on the last dimensions, and its gradient.

    Args:
        dims: The number of the dimensions.
        name: That of the operation.
        find: Returns the matrices for the sizes of an input and the operation's arguments.
        forward: Whether the operation itself does not only move values.
    """

    def apply(values: Tensor, *given: Any, **named: Any) -> Tensor:
        return _apply(find(values.shape[-dims:], *given, **named), values, dims)

    def differentiate(gradient: Tensor, *given: Any, **named: Any) -> Tensor:
        if "upsample" in name:
            out, sizes, *more = given
            more = [out, *more]
        else:
            values, *more = given
            sizes, more = values.shape[-dims:], more or [gradient.shape[-dims:]]  # if adaptive
        return _apply(find(sizes, *more, **named), gradient, dims, turned=True)

    RULES[f"{name}_backward"] = differentiate
    if forward:
        RULES[name] = apply


for _dims, _modes in enumerate(("linear", "bilinear bicubic", "trilinear"), 1):
    for _mode in (*_modes.split(), "nearest"):
        _name = f"upsample_{_mode}{_dims}d"
        _register(_dims, _name, partial(_resize, _name), forward=_mode != "nearest")
    _name = f"_upsample_nearest_exact{_dims}d"
    _register(_dims, _name, partial(_resize, _name), forward=False)
    _register(_dims, f"avg_pool{_dims}d", _average)
    _register(_dims, f"_adaptive_avg_pool{_dims}d", _average_adaptively)
for _mode in ("bilinear", "bicubic", "lanczos"):
    _name = f"_upsample_{_mode}2d_aa"
    _register(2, _name, partial(_resize, _name))
