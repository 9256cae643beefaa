"""Products, sums and formulas in torch operations: what kernels compute, by the same sequences.

Formulas serve without a C compiler and on devices; products and sums only without a compiler, and
where a device's kernel fails. They compute all matrices and blocks at once: to run the text of
``triton/kernels.py``, one program after the other, took up to 100 times as long.
"""

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_d9m.ops.portability.expressions import Kernel, Number
from lightning_d9m.ops.portability.formulas import TWO_OVER_PI
from lightning_d9m.ops.portability.triton.kernels import BLOCK, DEPTH, LANES

_SLICE = 2**20  # numbers that are computed at a time: their intermediate results take 8 MiB each


def multiply(out: Tensor, left: Tensor, right: Tensor, *places: Any) -> None:
    """Write products of matrices; ``multiply_at`` describes the arguments.

    In each block of ``DEPTH`` terms, one product after the other is added to 0; then one block
    after the other is added.
    """
    (rows, of_left), (columns, of_right), (view, of_out) = map(_gather, (left, right, out), places)
    pairs = zip(of_left.split(DEPTH, -1), of_right.split(DEPTH, -2), strict=True)
    blocks = [_add_products(rows[one], columns[other]) for one, other in pairs]
    view[of_out] = reduce(torch.add, blocks)


def _gather(values: Tensor, places: Any) -> tuple[Tensor, Tensor]:
    """Return the memory of matrices, and where their elements are in it."""
    where = places.batch.view(-1, 1, 1) + places.rows.unsqueeze(1) + places.columns
    return values.as_strided((1 + int(where.max()),), (1,)), where


def _add_products(rows: Tensor, columns: Tensor) -> Tensor:
    total = rows.new_zeros((*rows.shape[:-1], columns.shape[-1]))
    for k in range(rows.shape[-1]):
        one, other = rows[..., k : k + 1], columns[..., k : k + 1, :]
        is_wide = total.dtype == torch.float64
        total = one * other + total if is_wide else add_product(one, other, total)
    return total


def add_product(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """Return ``left * right + total`` of float32 numbers, rounded once."""
    # The product is exact. A last bit of 1 of an inexact sum lets it be rounded again.
    product, wide = left.double() * right.double(), total.double()
    result = product + wide
    given = result - product
    error = (product - (result - given)) + (wide - given)
    bits = result.view(torch.int64)
    nearer = torch.where((error > 0) == (bits >= 0), bits + 1, bits - 1)
    odd = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    return torch.where(odd, nearer, bits).view(torch.float64).float()


def add(out: Tensor, x: Tensor, *places: Any) -> None:
    """Write sums; ``add`` in ``triton/kernels.py`` describes the arguments.

    In each block of ``BLOCK`` terms, term i is added to lane i % ``LANES``, which begins with 0;
    then the upper half of the lanes is added to the lower half, until one is left. One block after
    the other is added.
    """
    sizes, steps = zip(*chain.from_iterable(places), strict=True)
    blocks = []
    for block in x.as_strided(sizes, steps).flatten(2).split(BLOCK, -1):
        padded = torch.nn.functional.pad(block, (0, -block.shape[-1] % LANES))
        lanes = x.new_zeros((*block.shape[:-1], LANES))
        for chunk in padded.split(LANES, -1):
            lanes = lanes + chunk
        while lanes.shape[-1] > 1:
            lower, upper = lanes.chunk(2, -1)
            lanes = lower + upper
        blocks.append(lanes[..., 0])
    out.copy_(reduce(torch.add, blocks).view(out.shape))


def add_running(x: Tensor, dim: int) -> Tensor:
    """Return the sum up to each element, in order, from 0: the sum of -0.0 is 0.0."""
    first = torch.zeros_like(x.select(dim, 0))
    return torch.stack([*accumulate(x.unbind(dim), initial=first)][1:], dim)


def find_root(x: Tensor) -> Tensor:
    """Return roots, rounded to nearest."""
    if x.device.type != "cpu":
        return x.sqrt()
    # NumPy's are the processor's; those of torch come from MKL, which may be off by one unit.
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))


@lru_cache(maxsize=64)
def _put_table(device: torch.device) -> Tensor:
    """Return the words of 2 / pi as signed numbers of 64 bits, which torch has."""
    words = [word - (word >> 63 << 64) for word in TWO_OVER_PI]
    return torch.tensor(words, device="cpu").to(device)


def _as_tensor(number: Any) -> Tensor:
    """Return a number as a tensor that leaves the type of a result, and the device, to others."""
    if isinstance(number, Tensor):
        return number
    kind = torch.int64 if isinstance(number, int) else torch.float64
    return torch.tensor(number, dtype=kind, device="cpu")


def _choose(mask: Tensor, *given: Any) -> Tensor:
    chosen, other = map(_as_tensor, given)
    return torch.where(mask, chosen, other)


# The others are operators of Python. No divisor is a number on the CPU, by whose reciprocal CUDA
# would multiply.
_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "where": _choose,
    "copysign": lambda *given: torch.copysign(*map(_as_tensor, given)),
    "to_bits": lambda x: x.view(torch.int64),
    "from_bits": lambda x: x.view(torch.float64),
    "wide": Tensor.double,
    "lookup": lambda x: _put_table(x.device)[x],
    "root": find_root,
    "greatest": lambda x: x.amax(-1, keepdim=True),
    "length": lambda x: x.new_full((1, 1), x.shape[-1]),
}


class Values(Number):
    """A number of a formula for many elements, as a tensor, and what operations do with it."""

    def __init__(self, tensor: Tensor, operations: Mapping[str, Callable[..., Tensor]]) -> None:
        self.tensor, self._operations = tensor, operations

    def apply(self, operation: str, *operands: Any) -> "Values":
        """Return the result of an operation."""
        given = [one.tensor if isinstance(one, Values) else one for one in operands]
        function = self._operations.get(operation) or getattr(operator, operation)
        return Values(function(*given), self._operations)


def compute(kernel: Kernel, places: Mapping[str, Any], total: Callable[[Tensor], Tensor]) -> None:
    """Write the outputs of a formula.

    Args:
        kernel: The formula.
        places: Contiguous tensors of inputs and outputs by name, and lists of numbers.
        total: Returns the sums of rows, of shape ``[rows, 1]``.
    """
    x = next(places[name] for name, place in kernel.inputs.items() if place == "at")
    count = x.shape[-1] if kernel.in_rows else 1
    rows, step = x.numel() // max(count, 1), max(_SLICE // max(count, 1), 1)
    operations = _OPERATIONS | {"narrow": lambda one: one.to(x.dtype), "total": total}
    for begin in range(0, rows, step):
        part, given = slice(begin, min(begin + step, rows)), dict[str, Any]()
        for name, place in kernel.inputs.items():
            own = places[name]
            if isinstance(place, int):
                numbers = torch.tensor(own, dtype=torch.float64, device="cpu").to(x)
                given[name] = [Values(one, operations) for one in numbers]
                continue
            if place == "at":
                own = own.view(rows, count)[part]
            elif place == "r % period":
                channels = torch.arange(part.start, part.stop, device=x.device) % len(own)
                own = own[channels].unsqueeze(1)
            given[name] = Values(own, operations)
        for name, found in kernel.formula(**given).items():
            places[name].view(rows, -1)[part] = found.tensor
