"""Products and sums in torch operations, for all matrices and blocks at once.

They have the sequences of ``triton/kernels.py``, whose text torch operations could run, too: but
they would run one program after the other, which takes up to 100 times as long. They serve where
neither a C compiler nor a device is.
"""

from functools import reduce
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.ops.patches.triton import language
from lightning_d9m.ops.portability.triton.kernels import BLOCK, DEPTH, LANES


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
        total = one * other + total if is_wide else language.fma(one, other, total)
    return total


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
