"""Matrix products and convolutions, rounded once from their exact values."""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_d9m.portability.sums import (
    BLOCK,
    add_squares,
    combine,
    multiply,
    multiply_doubles,
)

Vectors = Callable[[], tuple[Tensor, Tensor]]
"""A function that returns the vectors that a convolution multiplies.

The first ones are ``[rows, *inner]``, the second ones ``[groups, *outer, *inner]``.
"""


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of matrices, or of batches of them (``mm``, ``bmm``)."""
    shape = (*left.shape[:-1], right.shape[-1])
    if not left.numel() or not right.numel():
        return left.new_zeros(shape)
    product = multiply_doubles if left.dtype == torch.float64 else multiply
    return product(*(one.view(-1, *one.shape[-2:]) for one in (left, right))).view(shape).to(left)


class Convolution(NamedTuple):
    """The arguments of ``aten::convolution`` after input, weight and bias."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def expand(self, dims: int) -> "Convolution":
        """Return the arguments with a number for each spatial dimension."""
        lists = (self.stride, self.padding, self.dilation, self.output_padding)
        stride, padding, dilation, output = (
            tuple(one) * (dims if len(one) == 1 else 1) for one in lists
        )
        return Convolution(stride, padding, dilation, self.transposed, output, self.groups)

    def view_windows(self, values: Tensor, kernel: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the windows of an input: ``[groups, n, *counts, channels, *kernel]``."""
        wide: list[int] = []
        for axis, before in enumerate(self.padding):
            reach = self.dilation[axis] * (kernel[axis] - 1) + 1
            end = (counts[axis] - 1) * self.stride[axis] + reach
            wide = [before, end - before - values.shape[2 + axis], *wide]
        padded = pad(values, wide).contiguous()
        each, between, *steps = padded.stride()
        channels = padded.shape[1] // self.groups
        inner = [s * step for s, step in zip(steps, self.dilation, strict=True)]
        outer = [s * step for s, step in zip(steps, self.stride, strict=True)]
        return padded.as_strided(
            [self.groups, len(padded), *counts, channels, *kernel],
            [channels * between, each, *outer, between, *inner],
        )

    def list_forward(self, values: Tensor, weight: Tensor, counts: Sequence[int]) -> Vectors:
        """Return the vectors for the output of a convolution that is not transposed."""
        return lambda: (weight, self.view_windows(values, weight.shape[2:], counts))

    def list_backward(self, gradient: Tensor, weight: Tensor, sizes: Sequence[int]) -> Vectors:
        """Return the vectors for its input: it convolves the gradient, spread by the strides."""

        def find() -> tuple[Tensor, Tensor]:
            kernel, counts = weight.shape[2:], gradient.shape[2:]
            spread = [(n - 1) * step + 1 for n, step in zip(counts, self.stride, strict=True)]
            wide = gradient.new_zeros((*gradient.shape[:2], *spread))
            places: Any = (..., *(slice(None, None, step) for step in self.stride))
            wide[places] = gradient
            sides = zip(self.dilation, kernel, self.padding, strict=True)
            margins = [step * (length - 1) - before for step, length, before in sides]
            turned = weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
            close = self._replace(stride=(1,) * len(sizes), padding=margins)
            turned = turned.flip(tuple(range(2, turned.dim())))
            return turned, close.view_windows(wide, kernel, sizes)

        return find

    def list_weight(self, gradient: Tensor, values: Tensor, kernel: Sequence[int]) -> Vectors:
        """Return the vectors for its weight."""

        def find() -> tuple[Tensor, Tensor]:
            counts = gradient.shape[2:]
            windows = self.view_windows(values, kernel, counts)
            last = 2 + len(counts)
            order = (0, *range(last, windows.dim()), *range(1, last))
            return gradient.transpose(0, 1), windows.permute(order)

        return find


def _form(
    function: Callable[[Tensor, Tensor], Tensor],
    left: Tensor,
    right: Tensor,
    vectors: Vectors,
    find_lengths: Callable[[Tensor, Tensor], Tensor],
    length: int,
    row_dim: int,
    roundings: int = 0,
) -> Tensor:
    """Return the products of vectors.

    Args:
        function: Torch's convolution, or its gradient.
        left: The first argument of the function.
        right: The second one.
        vectors: The vectors.
        find_lengths: Returns the products of the lengths of the vectors.
        length: The number of products in a sum.
        row_dim: The dimension of the result that counts the rows of the first vectors.
        roundings: The greatest number of roundings of a sum, if it is not ``length``.
    """
    vectors = cache(vectors)
    if left.dtype == torch.float64:
        rows, windows = vectors()
        outer = windows.shape[1 : 1 + windows.dim() - rows.dim()]
        first = rows.reshape(len(windows), len(rows) // len(windows), -1)
        second = windows.reshape(len(windows), prod(outer), -1)
        found = multiply_doubles(first, second.mT)
        return found.view(len(rows), *outer).movedim(0, row_dim).contiguous()

    def find_terms(places: Tensor) -> Tensor:
        rows, windows = vectors()
        shape = list(windows.shape[1 : 1 + windows.dim() - rows.dim()])
        shape.insert(row_dim, len(rows))
        index = list(torch.unravel_index(places, shape))
        row = index.pop(row_dim)
        group = row // (len(rows) // len(windows))
        place = (group, *index)
        first, second = rows[row], windows[place]
        return first.reshape(len(places), -1).double() * second.reshape(len(places), -1).double()

    wide, other = left.double(), right.double()
    lengths = find_lengths(wide, other)
    return combine(function, wide, other, lengths, find_terms, length, roundings or length)


def _convolve_windows(
    function: Callable[[Tensor, Tensor], Tensor],
    values: Tensor,
    weight: Tensor,
    vectors: Vectors,
    given: Convolution,
    *,
    turned: bool,
) -> Tensor:
    """Return a convolution, or a turned one, which multiplies by columns of the weight."""
    groups = given.groups
    rows = weight.unflatten(0, (groups, -1))
    rows = (rows.transpose(1, 2) if turned else rows).flatten(2)  # of each group
    length = rows.shape[2]

    def find_lengths(values: Tensor, weight: Tensor) -> Tensor:
        squares = values.unflatten(1, (groups, -1)).square().sum(2)
        windows = function(squares, weight.new_ones((groups, 1, *weight.shape[2:])))
        others = add_squares(rows.double(), 2).view(groups, -1, *[1] * (values.dim() - 2))
        return (windows.unsqueeze(2).sqrt() * others.sqrt()).flatten(1, 2)

    return _form(function, values, weight, vectors, find_lengths, length, 1).to(values.dtype)


def convolve(values: Tensor, weight: Tensor, given: Convolution) -> Tensor:
    """Return what ``aten::convolution`` returns without a bias."""
    if values.dim() == weight.dim() - 1:
        return convolve(values.unsqueeze(0), weight, given)[0]
    given = given.expand(weight.dim() - 2)

    def function(left: Tensor, right: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.convolution(left, right, None, *given)
        return result

    sizes = function(*(one.to("meta") for one in (values, weight))).shape[2:]
    find = given.list_backward if given.transposed else given.list_forward
    more = (find(values, weight, sizes), given)
    return _convolve_windows(function, values, weight, *more, turned=given.transposed)


def convolve_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, given: Convolution, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a convolution for its input and its weight, where the mask asks."""
    given = given.expand(weight.dim() - 2)
    return (
        _differentiate_by_input(gradient, values.shape, weight, given) if mask[0] else None,
        _differentiate_by_weight(gradient, values, weight.shape, given) if mask[1] else None,
    )


def _differentiate_by_input(
    gradient: Tensor, shape: Sequence[int], weight: Tensor, given: Convolution
) -> Tensor:
    def function(left: Tensor, right: Tensor) -> Tensor:
        channels = len(right) if given.transposed else right.shape[1] * given.groups
        like = left.new_empty(()).expand(shape[0], channels, *shape[2:])
        more = (like, right, None, *given, [True, False, False])
        return torch.ops.aten.convolution_backward(left, *more)[0]  # type: ignore[no-any-return]

    find = given.list_forward if given.transposed else given.list_backward
    more = (find(gradient, weight, shape[2:]), given)
    return _convolve_windows(function, gradient, weight, *more, turned=not given.transposed)


def _differentiate_by_weight(
    gradient: Tensor, values: Tensor, shape: Sequence[int], given: Convolution
) -> Tensor:
    small, large = (values, gradient) if given.transposed else (gradient, values)
    area = prod(small.shape[2:])
    each = max(1, BLOCK // area)

    def function(left: Tensor, right: Tensor) -> Tensor:
        like, wanted = left.new_empty(()).expand(shape), [False, True, False]
        total = torch.zeros((), dtype=left.dtype, device=left.device)
        for one in zip(left.split(each), right.split(each), strict=True):
            more = (*one, like, None, *given, wanted)
            total = total + torch.ops.aten.convolution_backward(*more)[1]
        return total

    def find_lengths(left: Tensor, right: Tensor) -> Tensor:
        dims = (0, *range(2, left.dim()))
        squares = [add_squares(one, *dims).view(given.groups, -1) for one in (left, right)]
        rows, others = reversed(squares) if given.transposed else squares
        found = rows.unsqueeze(2).sqrt() * others.unsqueeze(1).sqrt()
        return found.view(*shape[:2], *[1] * len(shape[2:]))

    vectors = given.list_weight(small, large, shape[2:])
    more = (len(values) * area, 0, each * area + len(values) // each)
    return _form(function, gradient, values, vectors, find_lengths, *more).to(values.dtype)
