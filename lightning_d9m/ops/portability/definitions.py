"""The sequence of operations of each result, in torch operations: the specification.

The compiled kernels of ``real.h`` give the same bits. These functions serve where there is none: on
other devices, and without a compiler. Each has the arguments of its counterpart in ``kernels.py``.
"""

import operator
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_d9m.ops.portability.expressions import Kernel, Number
from lightning_d9m.ops.portability.formulas import TWO_OVER_PI

LANES, BLOCK, DEPTH, COUNTERS = 32, 4096, 256, 16
_MASK = 0xFFFFFFFF


def find_root(values: Tensor) -> Tensor:
    """Return the roots of float32 or float64 numbers.

    NumPy's are the processor's; those of torch come from MKL, which may be off by one unit.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(values.detach().numpy())))


def divide(left: Any, right: Any) -> Tensor:
    """Divide numbers and tensors: CUDA multiplies by the reciprocal of a number."""
    return torch.div(*_as_tensors(left, right))


def _as_tensors(*numbers: Any) -> list[Tensor]:
    """Return numbers as tensors of the type of those that are."""
    tensors = [one for one in numbers if isinstance(one, Tensor)]
    dtype = next((one.dtype for one in tensors if one.dtype != torch.bool), torch.float64)
    device = tensors[0].device
    return [
        one if isinstance(one, Tensor) else torch.full((), one, dtype=dtype, device=device)
        for one in numbers
    ]


def _look_up(places: Tensor) -> Tensor:
    # As signed numbers of 64 bits, as torch has them.
    words = [word - (word >> 63 << 64) for word in TWO_OVER_PI]
    return torch.tensor(words, device=places.device)[places]


class Values(Number):
    """The numbers of a formula, as a tensor, and the type to which it rounds wide numbers."""

    def __init__(self, tensor: Tensor, real: torch.dtype) -> None:
        self.tensor, self.real = tensor, real

    def apply(self, operation: str, *operands: Any) -> "Values":
        """Compute an operation."""
        given = [one.tensor if isinstance(one, Values) else one for one in operands]
        if operation == "narrow":
            return Values(given[0].to(self.real), self.real)
        function = _OPERATIONS.get(operation) or getattr(operator, operation)
        return Values(function(*given), self.real)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "truediv": divide,
    "where": lambda *given: torch.where(*_as_tensors(*given)),
    "copysign": lambda *given: torch.copysign(*_as_tensors(*given)),
    "to_bits": lambda x: x.view(torch.int64),
    "from_bits": lambda x: x.view(torch.float64),
    "wide": Tensor.double,
    "lookup": _look_up,
    "root": find_root,
    "total": lambda x: add_rows(x).unsqueeze(-1),
    "greatest": lambda x: x.amax(-1, keepdim=True),
    "length": lambda x: x.new_full((1, 1), x.shape[-1]),
}


def add_product(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """Return left * right + total: of float32 numbers rounded once, of float64 numbers twice."""
    if total.dtype == torch.float64:
        return left * right + total
    # The product is exact. A last bit of 1 of an inexact sum lets it be rounded again.
    product, wide = left.double() * right.double(), total.double()
    result = product + wide
    given = result - product
    error = (product - (result - given)) + (wide - given)
    bits = result.view(torch.int64)
    nearer = torch.where((error > 0) == (bits >= 0), bits + 1, bits - 1)
    odd = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    return torch.where(odd, nearer, bits).view(torch.float64).float()


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return products of matrices ``[..., rows, terms]`` and ``[..., terms, columns]``.

    In each block of ``DEPTH`` terms, one product after the other is added to 0; then one block
    after the other is added.
    """
    blocks = []
    for rows, columns in zip(left.split(DEPTH, -1), right.split(DEPTH, -2), strict=True):
        total = rows.new_zeros(()).expand(*rows.shape[:-1], columns.shape[-1])
        for k in range(rows.shape[-1]):
            total = add_product(rows[..., k : k + 1], columns[..., k : k + 1, :], total)
        blocks.append(total)
    return _add_in_order(blocks)


def _add_in_order(blocks: list[Tensor]) -> Tensor:
    total = blocks[0]
    for one in blocks[1:]:
        total = total + one
    return total


def add_rows(terms: Tensor) -> Tensor:
    """Return the sums of rows ``[..., terms]``.

    In each block of ``BLOCK`` terms, term i is added to lane i % ``LANES``, which begins with 0;
    then the upper half of the lanes is added to the lower half, until one is left. One block after
    the other is added.
    """
    blocks = []
    for block in terms.split(BLOCK, -1):
        padded = torch.nn.functional.pad(block, (0, -block.shape[-1] % LANES))
        lanes = terms.new_zeros((*terms.shape[:-1], LANES))
        for chunk in padded.split(LANES, -1):
            lanes = lanes + chunk
        while lanes.shape[-1] > 1:
            lower, upper = lanes.chunk(2, -1)
            lanes = lower + upper
        blocks.append(lanes[..., 0])
    return _add_in_order(blocks)


def add_running(x: Tensor, dim: int) -> Tensor:
    """Return the sum up to each element, in order, from 0: the sum of -0.0 is 0.0."""
    first = torch.zeros_like(x.select(dim, 0))
    return torch.stack([*accumulate(x.unbind(dim), initial=first)][1:], dim)


def compute(kernel: Kernel, given: Mapping[str, Any], like: Tensor) -> dict[str, Tensor]:
    """Return the outputs of a kernel of rows; those that are inputs are replaced in place.

    Args:
        kernel: One of ``formulas.KERNELS``.
        given: Its inputs by their names.
        like: One of them, with all rows.
    """
    numbers = dict[str, Any]()
    for name, place in kernel.inputs.items():
        one: Any = given[name]
        if isinstance(place, int):
            rounded = torch.tensor(one, dtype=torch.float64, device="cpu").to(like)
            numbers[name] = [Values(each, like.dtype) for each in rounded]
        else:
            rows = one.repeat(len(like) // len(one)).unsqueeze(1) if place == "r % period" else one
            numbers[name] = Values(rows, like.dtype)
    outputs = {name: one.tensor for name, one in kernel.formula(**numbers).items()}
    for name, one in given.items():
        if isinstance(one, Tensor) and name in outputs:
            one.copy_(outputs.pop(name))
    return {n: one if kernel.outputs[n].each else one.view(-1) for n, one in outputs.items()}


def draw(key: int, count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return uniform numbers in [0, 1) of 24 or 53 bits, of Philox4x32-10.

    ``COUNTERS`` counters give a block of words: the first words of all, then the second ones. A
    number of 53 bits takes a word of the first half of a block, and one of the second half.
    """
    each = COUNTERS * (4 if dtype == torch.float32 else 2)
    size = -(-count // each)
    counter = torch.arange(size * COUNTERS, device=device).view(size, COUNTERS)
    x, y, z, w = counter & _MASK, counter >> 32, counter * 0, counter * 0
    first, second = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        left, right = x * 0xD2511F53, z * 0xCD9E8D57
        x = ((right >> 32) & _MASK) ^ y ^ first
        z = ((left >> 32) & _MASK) ^ w ^ second
        y, w = right & _MASK, left & _MASK
        first, second = (first + 0x9E3779B9) & _MASK, (second + 0xBB67AE85) & _MASK
    words = torch.stack([x, y, z, w], 1).flatten(1)
    if dtype == torch.float32:
        drawn = (words >> 8).to(dtype) * 2.0**-24
    else:
        high, low = (words[:, :each] >> 5).to(dtype), (words[:, each:] >> 6).to(dtype)
        drawn = (high * 2.0**26 + low) * 2.0**-53
    return drawn.flatten()[:count]
