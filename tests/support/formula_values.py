"""The formulas of portable bits on tensors: each operation by one of torch or NumPy.

This is independent of what writes C and Triton from the same formulas.
"""

import operator
from functools import reduce

import numpy as np
import torch

from lightning_d9m.ops.portability.expressions import Number
from lightning_d9m.ops.portability.formulas import TWO_OVER_PI


def as_tensors(*numbers):
    tensors = [one for one in numbers if isinstance(one, torch.Tensor)]
    dtype = next((one.dtype for one in tensors if one.dtype != torch.bool), torch.float64)
    return [
        one if isinstance(one, torch.Tensor) else torch.tensor(one, dtype=dtype) for one in numbers
    ]


def total(x):
    """Add 32 lanes of each block of 4096 terms, then the lanes by halves, then the blocks."""
    blocks = []
    for block in x.split(4096, -1):
        lanes = x.new_zeros((*block.shape[:-1], 32))
        for chunk in torch.nn.functional.pad(block, (0, -block.shape[-1] % 32)).split(32, -1):
            lanes = lanes + chunk
        while lanes.shape[-1] > 1:
            lower, upper = lanes.chunk(2, -1)
            lanes = lower + upper
        blocks.append(lanes)
    return reduce(torch.add, blocks)


OPERATIONS = {
    "truediv": lambda *given: torch.div(*as_tensors(*given)),
    "where": lambda *given: torch.where(*as_tensors(*given)),
    "copysign": lambda *given: torch.copysign(*as_tensors(*given)),
    "to_bits": lambda x: x.view(torch.int64),
    "from_bits": lambda x: x.view(torch.float64),
    "wide": torch.Tensor.double,
    # As signed numbers of 64 bits, as torch has them.
    "lookup": lambda x: torch.tensor([word - (word >> 63 << 64) for word in TWO_OVER_PI])[x],
    "rest": lambda x, y: torch.from_numpy(np.fmod(x.numpy(), as_tensors(x, y)[1].numpy())),
    "root": lambda x: torch.from_numpy(np.asarray(np.sqrt(x.numpy()))),
    "total": total,
    "greatest": lambda x: x.amax(-1, keepdim=True),
    "length": lambda x: x.new_full((1, 1), x.shape[-1]),
}


class Values(Number):
    """Numbers of a formula, and the type to which it rounds wide ones."""

    def __init__(self, tensor, real):
        self.tensor, self.real = tensor, real

    def apply(self, operation, *operands):
        given = [one.tensor if isinstance(one, Values) else one for one in operands]
        if operation == "narrow":
            return Values(given[0].to(self.real), self.real)
        function = OPERATIONS.get(operation) or getattr(operator, operation)
        with np.errstate(invalid="ignore"):
            return Values(function(*given), self.real)


def compute_formula(kernel, like, inputs):
    """Return the outputs of a formula by name, computed in the dtype of a tensor."""
    numbers = {}
    for name, place in kernel.inputs.items():
        one = inputs[name]
        if isinstance(place, int):
            rounded = torch.tensor(one, dtype=torch.float64).to(like)
            numbers[name] = [Values(each, like.dtype) for each in rounded]
        else:
            rows = one.repeat(len(like) // len(one)).unsqueeze(1) if place == "r % period" else one
            numbers[name] = Values(rows, like.dtype)
    return {name: found.tensor for name, found in kernel.formula(**numbers).items()}
