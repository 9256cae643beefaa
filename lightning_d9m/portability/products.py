"""Matrix products and convolutions from exact sums."""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_d9m.portability.sums import (
    BLOCK,
    UNIT,
    measure,
    multiply,
    multiply_doubles,
    settle,
)

_MOST_COLUMNS = 2**19  # elements of unfolded columns that exist at a time


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of matrices, or of batches of them (``mm``, ``bmm``)."""
    if not left.is_floating_point():
        return torch.matmul(left, right)  # whole numbers are exact
    batched = left.dim() == 3
    wide = [one.to(torch.float64) for one in (left, right)]
    if not batched:
        wide = [one.unsqueeze(0) for one in wide]
    exact = multiply_doubles if left.dtype == torch.float64 else multiply
    result = exact(*wide)
    return (result if batched else result[0]).to(left.dtype)


class Windows(NamedTuple):
    """The places of the windows of a convolution; one number for each spatial dimension."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def count_windows(self, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Return the number of windows in each dimension of a padded input."""
        return [
            (size - step * (length - 1) - 1) // stride + 1
            for size, length, stride, step in zip(
                sizes, kernel, self.stride, self.dilation, strict=True
            )
        ]

    def view(self, values: Tensor, kernel: Sequence[int]) -> Tensor:
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


Product = Callable[[Tensor, Tensor], Tensor]


def choose_product(dtype: torch.dtype) -> Product:
    """Return the product of float64 matrices that hold numbers of a dtype."""
    return multiply_doubles if dtype == torch.float64 else multiply


def correlate(values: Tensor, weight: Tensor, windows: Windows, product: Product) -> Tensor:
    """Return the sums over the windows of a padded float64 input ``[n, c, *sizes]``.

    The weight is ``[groups, channels out, channels in, *kernel]`` in float64.
    """
    groups, rows = weight.shape[:2]
    kernel = weight.shape[3:]
    matrices = weight.reshape(groups, rows, -1)
    counts = windows.count_windows(values.shape[2:], kernel)
    outputs = []
    each = max(1, groups * matrices.shape[2] * prod(counts))
    for part in values.split(max(1, _MOST_COLUMNS // each)):
        columns = windows.view(part, kernel).reshape(groups, matrices.shape[2], -1)
        if product is multiply:
            out = multiply(matrices, columns, _measure_windows(part, kernel, windows))
        else:
            out = product(matrices, columns)
        out = out.view(groups, rows, len(part), *counts)
        outputs.append(out.movedim(2, 0).reshape(len(part), groups * rows, *counts))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _measure_windows(values: Tensor, kernel: Sequence[int], windows: Windows) -> Tensor:
    """Return bounds of the norms of all windows, ``[groups, 1, windows]``."""
    squares = values.square().unflatten(1, (windows.groups, -1)).sum(2)
    view = windows.view(squares, kernel)
    sums = view.reshape(windows.groups, prod(kernel), -1).sum(1, keepdim=True)
    return sums.sqrt_().mul_(1.0 + 2.0**-20)


def correlate_weights(
    values: Tensor, gradient: Tensor, kernel: Sequence[int], windows: Windows, product: Product
) -> Tensor:
    """Return the gradient of :func:`correlate` for its weight."""
    groups = windows.groups
    batch, channels = gradient.shape[:2]
    rows = channels // groups
    view = windows.view(values, kernel)
    out = (groups, rows, *view.shape[1 : 2 + len(kernel)])
    inner = view.shape[1] * prod(kernel)
    grown = gradient.view(batch, groups, rows, -1).permute(1, 2, 0, 3)
    places = grown.shape[3]
    if product is multiply_doubles or batch * places <= BLOCK or not gradient.numel():
        columns = view.reshape(groups, inner, -1)
        return product(grown.reshape(groups, rows, -1), columns.transpose(1, 2)).view(out)
    total = values.new_zeros((groups, rows, inner))
    left, right = values.new_zeros((groups, rows, 1)), values.new_zeros((groups, 1, inner))
    each = max(1, min(_MOST_COLUMNS // (groups * inner * places), BLOCK // places))
    rounds = 0
    windowed = view.movedim(2 + len(kernel), 0)
    for start in range(0, batch, each):
        part = slice(start, start + each)
        a = grown[:, :, part].reshape(groups, rows, -1)
        b = windowed[part].movedim(0, 2 + len(kernel)).reshape(groups, inner, -1)
        total += torch.bmm(a, b.transpose(1, 2))
        left += measure(a, 2).square_()
        right += measure(b, 2).square_().transpose(1, 2)
        rounds += 1
    bound = left.sqrt_() * (right.sqrt_() * (2 * (each * places + rounds + 4) * UNIT))

    def find_terms(flat: Tensor) -> Tensor:
        group, place = flat // (rows * inner), flat % (rows * inner)
        row, index = place // inner, [place % inner]
        for size in reversed((view.shape[1], *kernel)[1:]):
            index[:1] = [index[0] // size, index[0] % size]
        chosen = (group, *index)
        other = view[chosen].reshape(len(flat), -1)
        return grown[group, row].reshape(len(flat), -1) * other

    return settle(total, bound, find_terms).view(out)


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
            tuple(one) if len(one) == dims else tuple(one) * dims for one in lists
        )
        return Convolution(stride, padding, dilation, self.transposed, output, self.groups)

    @property
    def windows(self) -> Windows:
        """The windows of the convolution that is not transposed."""
        return Windows(tuple(self.stride), tuple(self.dilation), self.groups)

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
        padded = self.pad(values, weight.shape[2:], counts)
        return correlate(padded, grouped, self.windows, product)

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
        windows = Windows((1,) * len(sizes), tuple(self.dilation), self.groups)
        return correlate(pad(gradient, margins).contiguous(), turned, windows, product)

    def backward_weight(
        self, gradient: Tensor, values: Tensor, kernel: Sequence[int], product: Product
    ) -> Tensor:
        """Return the gradient for the weight."""
        padded = self.pad(values, kernel, gradient.shape[2:])
        return correlate_weights(
            padded, gradient.contiguous(), kernel, self.windows, product
        ).flatten(0, 1)


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
        sizes = [
            (size - 1) * stride - 2 * margin + step * (length - 1) + more + 1
            for size, length, stride, margin, step, more in zip(
                values.shape[2:],
                kernel,
                given.stride,
                given.padding,
                given.dilation,
                given.output_padding,
                strict=True,
            )
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
