"""Matrix products and convolutions from exact sums."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_d9m.portability.sums import BLOCK, multiply, multiply_doubles, multiply_parts

_MOST_COLUMNS = 2**19  # elements of unfolded columns that exist at a time

Product = Callable[[Tensor, Tensor], Tensor]


def choose_product(dtype: torch.dtype) -> Product:
    """Return the product of float64 matrices that hold numbers of a dtype."""
    return multiply_doubles if dtype == torch.float64 else multiply


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of matrices, or of batches of them (``mm``, ``bmm``)."""
    if not left.is_floating_point():
        return torch.matmul(left, right)  # whole numbers are exact
    shape = (*left.shape[:-1], right.shape[-1])
    wide = (one.to(torch.float64).view(-1, *one.shape[-2:]) for one in (left, right))
    return choose_product(left.dtype)(*wide).view(shape).to(left.dtype)


class Convolution(NamedTuple):
    """The arguments of ``aten::convolution`` after input, weight and bias.

    Inputs and weights are float64 here. A weight is ``[groups, out, in, *kernel]``.
    """

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

    def count_windows(self, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Return the number of windows in each dimension of a padded input."""
        sides = zip(sizes, kernel, self.stride, self.dilation, strict=True)
        return [(size - step * (length - 1) - 1) // by + 1 for size, length, by, step in sides]

    def view_windows(self, values: Tensor, kernel: Sequence[int]) -> Tensor:
        """Return a view of a padded input: ``[groups, channels, *kernel, n, *windows]``."""
        batch, channels, *sizes = values.shape
        each, between, *steps = values.stride()
        inner = [s * step for s, step in zip(steps, self.dilation, strict=True)]
        outer = [s * step for s, step in zip(steps, self.stride, strict=True)]
        part = channels // self.groups
        return values.as_strided(
            [self.groups, part, *kernel, batch, *self.count_windows(sizes, kernel)],
            [part * between, between, *inner, each, *outer],
            values.storage_offset(),
        )

    def _measure_windows(self, values: Tensor, kernel: Sequence[int]) -> Tensor:
        """Return bounds of the norms of all windows, ``[groups, 1, windows]``."""
        squares = values.square().unflatten(1, (self.groups, -1)).sum(2)
        view = self.view_windows(squares, kernel).reshape(self.groups, prod(kernel), -1)
        return view.sum(1, keepdim=True).sqrt_().mul_(1.0 + 2.0**-20)

    def correlate(self, values: Tensor, weight: Tensor, product: Product) -> Tensor:
        """Return the sums over the windows of a padded input ``[n, c, *sizes]``."""
        groups, rows, _, *kernel = weight.shape
        matrices = weight.reshape(groups, rows, -1)
        counts = self.count_windows(values.shape[2:], kernel)
        outputs = []
        each = max(1, groups * matrices.shape[2] * prod(counts))
        for part in values.split(max(1, _MOST_COLUMNS // each)):
            columns = self.view_windows(part, kernel).reshape(groups, matrices.shape[2], -1)
            if product is multiply:
                out = multiply(matrices, columns, self._measure_windows(part, kernel))
            else:
                out = product(matrices, columns)
            out = out.view(groups, rows, len(part), *counts)
            outputs.append(out.movedim(2, 0).reshape(len(part), groups * rows, *counts))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def pad(self, values: Tensor, kernel: Sequence[int], counts: Sequence[int] | None) -> Tensor:
        """Return the padded input of the convolution that is not transposed.

        With ``counts`` it ends where that many windows end: the padding of a transposed
        convolution's output may have room for more windows than there are inputs.
        """
        wide: list[int] = []
        for axis, before in enumerate(self.padding):
            after = before
            if counts is not None:
                reach = self.dilation[axis] * (kernel[axis] - 1) + 1
                size = values.shape[2 + axis] + before
                after = (counts[axis] - 1) * self.stride[axis] + reach - size
            wide = [before, after, *wide]
        return pad(values, wide).contiguous() if any(wide) else values.contiguous()

    def forward(
        self,
        values: Tensor,
        weight: Tensor,
        product: Product,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Convolve with a weight ``[out, in / groups, *kernel]``; at ``counts`` windows, or all."""
        grouped = weight.unflatten(0, (self.groups, -1))
        return self.correlate(self.pad(values, weight.shape[2:], counts), grouped, product)

    def backward(
        self, gradient: Tensor, weight: Tensor, sizes: Sequence[int], product: Product
    ) -> Tensor:
        """Return the gradient for an input of these spatial sizes: the transposed convolution."""
        batch, channels, *counts = gradient.shape
        spread = [(count - 1) * step + 1 for count, step in zip(counts, self.stride, strict=True)]
        if any(step > 1 for step in self.stride):
            wide = gradient.new_zeros((batch, channels, *spread))
            chosen = tuple(slice(None, None, step) for step in self.stride)
            wide[(slice(None), slice(None)) + chosen] = gradient  # noqa: RUF005 - mypy reads 3.11's
            gradient = wide
        margins: list[int] = []
        for axis, size in enumerate(sizes):
            reach = self.dilation[axis] * (weight.shape[2 + axis] - 1)
            before = reach - self.padding[axis]
            margins = [before, size + reach - before - spread[axis], *margins]
        turned = weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        turned = turned.flip(tuple(range(3, turned.dim())))
        close = self._replace(stride=(1,) * len(sizes))
        return close.correlate(pad(gradient, margins).contiguous(), turned, product)

    def backward_weight(
        self, gradient: Tensor, values: Tensor, kernel: Sequence[int], product: Product
    ) -> Tensor:
        """Return the gradient for the weight."""
        padded, groups = self.pad(values, kernel, gradient.shape[2:]), self.groups
        view = self.view_windows(padded, kernel)
        windowed, out = view.movedim(2 + len(kernel), 0), view.shape[1 : 2 + len(kernel)]
        batch, rows, inner = len(gradient), gradient.shape[1] // groups, prod(out)
        places = prod(gradient.shape[2:])
        grown = gradient.reshape(batch, groups, rows, places).permute(1, 2, 0, 3)
        some = batch
        if product is multiply and batch * places > BLOCK:
            some = max(1, min(_MOST_COLUMNS // (groups * inner * places), BLOCK // places))

        def list_parts() -> Iterator[tuple[Tensor, Tensor]]:
            for start in range(0, max(batch, 1), max(some, 1)):
                part = slice(start, start + some)
                columns = windowed[part].movedim(0, 2 + len(kernel)).reshape(groups, inner, -1)
                yield grown[:, :, part].reshape(groups, rows, -1), columns.mT

        def find_terms(flat: Tensor) -> Tensor:
            group, place = flat // (rows * inner), flat % (rows * inner)
            row, index = place // inner, [place % inner]
            for size in reversed(out[1:]):
                index[:1] = [index[0] // size, index[0] % size]
            chosen = (group, *index)
            other = view[chosen].reshape(len(flat), -1)
            return grown[group, row].reshape(len(flat), -1) * other

        if some < batch and gradient.numel():
            result = multiply_parts(list_parts(), find_terms)
        else:
            result = product(*next(list_parts()))
        return result.view(groups * rows, *out)


def convolve(values: Tensor, weight: Tensor, given: Convolution) -> Tensor:
    """Return what ``aten::convolution`` returns without a bias."""
    squeezed = values.dim() == weight.dim() - 1
    if squeezed:
        values = values.unsqueeze(0)
    kernel = weight.shape[2:]
    given = given.expand(len(kernel))
    product = choose_product(values.dtype)
    x, w = values.to(torch.float64), weight.to(torch.float64)
    if given.transposed:
        sides = zip(values.shape[2:], kernel, *given[:3], given.output_padding, strict=True)
        sizes = [
            (size - 1) * stride - 2 * margin + step * (length - 1) + more + 1
            for size, length, stride, margin, step, more in sides
        ]
        result = given.backward(x, w, sizes, product)
    else:
        result = given.forward(x, w, product)
    result = result.to(values.dtype)
    return result[0] if squeezed else result


def convolve_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, given: Convolution, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a convolution for its input and its weight, where the mask asks."""
    kernel = weight.shape[2:]
    given = given.expand(len(kernel))
    product = choose_product(values.dtype)
    g, x, w = (one.to(torch.float64) for one in (gradient, values, weight))
    for_input = for_weight = None
    if mask[0]:
        if given.transposed:
            for_input = given.forward(g, w, product, values.shape[2:])
        else:
            for_input = given.backward(g, w, values.shape[2:], product)
    if mask[1]:
        pair = (x, g) if given.transposed else (g, x)
        for_weight = given.backward_weight(*pair, kernel, product)
    return tuple(  # type: ignore[return-value]
        None if one is None else one.to(values.dtype) for one in (for_input, for_weight)
    )
