"""Matrix products and convolutions, rounded once from their exact values."""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_d9m.portability.sums import BLOCK, combine, multiply, multiply_doubles

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

    return combine(function, left, right, find_terms, length, (roundings or length) + 1)


def convolve(values: Tensor, weight: Tensor, given: Convolution) -> Tensor:
    """Return what ``aten::convolution`` returns without a bias."""
    if values.dim() == weight.dim() - 1:
        return convolve(values.unsqueeze(0), weight, given)[0]
    given = given.expand(weight.dim() - 2)

    def function(left: Tensor, right: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.convolution(left, right, None, *given)
        return result

    meta = (one.to("meta") for one in (values, weight))
    sizes = function(*meta).shape[2:]
    length = weight[0].numel()
    vectors = given.list_forward(values, weight, sizes)
    if given.transposed:
        length = weight[:, 0].numel() // given.groups
        vectors = given.list_backward(values, weight, sizes)
    return _form(function, values, weight, vectors, length, 1).to(values.dtype)


def convolve_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, given: Convolution, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a convolution for its input and its weight, where the mask asks."""
    kernel = weight.shape[2:]
    given = given.expand(len(kernel))
    differentiate = torch.ops.aten.convolution_backward
    for_input = for_weight = None
    if mask[0]:

        def find_input(left: Tensor, right: Tensor) -> Tensor:
            like, wanted = left.new_empty(()).expand(values.shape), [True, False, False]
            return differentiate(left, like, right, None, *given, wanted)[0]  # type: ignore[no-any-return]

        length = weight[:, 0].numel() // given.groups
        vectors = given.list_backward(gradient, weight, values.shape[2:])
        if given.transposed:
            length = weight[0].numel()
            vectors = given.list_forward(gradient, weight, values.shape[2:])
        for_input = _form(find_input, gradient, weight, vectors, length, 1).to(values.dtype)
    if mask[1]:
        small, large = (values, gradient) if given.transposed else (gradient, values)
        each = max(1, BLOCK // prod(small.shape[2:]))

        def find_weight(left: Tensor, right: Tensor) -> Tensor:
            like, wanted = left.new_empty(()).expand(weight.shape), [False, True, False]
            total = torch.zeros((), dtype=left.dtype, device=left.device)
            for part, other in zip(left.split(each), right.split(each), strict=True):
                total = total + differentiate(part, other, like, None, *given, wanted)[1]
            return total

        length = len(values) * prod(small.shape[2:])
        roundings = each * prod(small.shape[2:]) + len(values) // each
        vectors = given.list_weight(small, large, kernel)
        for_weight = _form(find_weight, gradient, values, vectors, length, 0, roundings)
        for_weight = for_weight.to(weight.dtype)
    return for_input, for_weight
