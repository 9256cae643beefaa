"""Sums that do not depend on the order of their terms.

Each sum has an exponent, that of its greatest term. Each term is cut into pieces at bits that only
this exponent and the number of terms decide (Demmel and Nguyen 2013, Rump 2009): adding a constant
to a float64 number and subtracting it again rounds the number to a multiple of the constant's last
place. A piece has so few bits that float64 holds every sum of pieces exactly. Additions that never
round may come in any order, on any device, in torch's own reductions and atomics. The pieces' sums
are then added and rounded once, to nearest with ties to even.

What is below the last piece is rounded off each term. A sum is exact before it is rounded if its
terms span less than ``2**GUARD``; else the error before it is rounded is at most ``2**-GUARD``
units in the last place of the greatest term, for each term.

Infinities, NaN and -0.0 need no case of their own: a piece keeps them, and IEEE additions of them
give the same in any order, except the payload of a NaN, which the result does not keep.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9m.ops.patches.triton.launch import run_kernel

KERNEL = "kernels:accumulate"
"""The path of the kernel of ``accumulate``, see ``run_kernel``."""
GUARD = 40
"""Bits below the last place of the greatest term that are added, at least."""

_FORMATS = {  # bits of the significand, and the exponent of the least normal number
    torch.float16: (11, -14),
    torch.bfloat16: (8, -126),
    torch.float32: (24, -126),
}


class Layout(NamedTuple):
    """The order in which terms and sums lie in memory.

    Attributes:
        taps: The number of places that each value goes to.
        batch: The values are of shape ``[batch, group, rows, inner]``, contiguous.
        group, rows, inner: As above.
        places: The sums are of shape ``[batch, group, places, inner]``, contiguous.
        steps: The strides of the keys by tap, batch, row and column; 0 along what shares one.
    """

    taps: int
    batch: int
    group: int
    rows: int
    inner: int
    places: int
    steps: tuple[int, int, int, int]


class Pieces(NamedTuple):
    """``number`` pieces of each term, for sums of at most ``2**size`` terms."""

    number: int
    size: int


@lru_cache(maxsize=4096)
def plan_pieces(dtype: torch.dtype, terms: int, guard: int = GUARD) -> Pieces:
    """Return the pieces for sums of at most so many terms of a dtype.

    ``guard`` bits below the last place of the greatest term are kept, or more.
    """
    # The more terms, the fewer bits has a piece: float64 must hold the sum of all first pieces, and
    # that of all second ones.
    size = max((terms - 1).bit_length(), 2)
    # The bits of the significand below its first one, in which sums are taken: float16 and bfloat16
    # are added as float32 is.
    kept = (52 if dtype == torch.float64 else 23) + guard
    first, more = 52 - size, 54 - size
    return Pieces(1 + max(0, -((first - kept) // more)), size)


def accumulate(
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor | None,
    layout: Layout,
    pieces: Pieces,
    *,
    include: bool = True,
) -> None:
    """Write into each place the sum of the terms that go to it: values, or values times weights.

    Args:
        out: Floating point, contiguous.
        keys: The place of each value, from 0 to ``places``, or counted from the end; a place
            outside is skipped.
        values: Floating point; float64 only if the sums are.
        weights: Factors, with the strides of the keys, or None.
        layout: How they lie in memory.
        pieces: Those of as many terms as a place can get, with its own.
        include: Whether what is in ``out`` is a term as well. A place without a value then keeps
            its bits; else it becomes 0.
    """
    if out.numel():
        more = (keys, values, weights, layout, pieces, _FORMATS.get(out.dtype, (0, 0)), include)
        run_kernel(KERNEL, _make_example, out, *more)


def _make_example(device: torch.device) -> tuple[Any, ...]:
    """Return arguments of the kernel for sums: terms over 200 binary orders, in two pieces."""
    terms = torch.arange(1, 601, dtype=torch.float32, device="cpu")
    # The binary orders need the second piece, without which a wrong kernel could pass.
    values = (terms * 0.37).sin() * (terms * 29 % 200 - 100).exp2()
    index = (terms.to(torch.int64) * 7 % 12).to(device)
    layout = Layout(2, 1, 2, 300, 1, 11, (300, 0, 1, 0))
    out = torch.ones(1, 2, 11, 1, device=device)
    more = (layout, plan_pieces(out.dtype, 2**10), _FORMATS[out.dtype], True)
    return out, index, values.to(device), None, *more
