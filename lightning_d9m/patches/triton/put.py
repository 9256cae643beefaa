# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0917 - Triton's compiler reads these signatures
"""``put_``: of several values for one place, the last one is written.

Each place gets the greatest position of its values by an integer atomic, whose result does not
depend on their order; then the values at these positions are written. Places without a value are
neither read nor written, also among the marks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9m.patches.triton.geometry import find_block
from lightning_d9m.patches.triton.launch import (
    INT32_LIMIT,
    allocate,
    launch_blocks,
    needs_int64,
)

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LONGEST = 8  # bytes


@triton.jit
def find_place(places, offsets, exists, size):
    """Return the places of values, counted from 0; ``size`` for one outside the tensor."""
    place = tl.load(places + offsets, mask=exists, other=0)
    place = tl.where(place < 0, place + size, place)
    return tl.where((place >= 0) & (place < size), place, size)


@triton.jit(do_not_specialize=["size", "elements"])
def clear_marks(places, last, size, elements, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Write -1 for each place that gets a value.

    Args:
        places: For each value its place; int64, contiguous.
        last: An integer for each place, and one for values without a place.
        size: The number of places.
        elements: The number of values.
        BLOCK: The number of values of a program.
        WIDE: Whether an offset may exceed 32 bits.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    place = find_place(places, offsets, exists, size)
    nothing = tl.full([BLOCK], -1, last.dtype.element_ty)
    tl.store(last + place, nothing, mask=exists & (place < size))


@triton.jit(do_not_specialize=["size", "elements"])
def mark_last(places, last, size, elements, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Write for each place the greatest position of its values; see ``clear_marks``."""
    offsets, exists = find_block(elements, BLOCK, WIDE)
    place = find_place(places, offsets, exists, size)
    tl.atomic_max(last + place, offsets.to(last.dtype.element_ty), mask=exists, sem="relaxed")


@triton.jit(do_not_specialize=["size", "elements"])
def write_last(
    places,
    last,
    values,
    target,
    size,
    elements,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the values whose positions are marked.

    Args:
        places: See ``clear_marks``.
        last: What ``mark_last`` writes.
        values: ``WORDS`` integers for each value, contiguous.
        target: ``WORDS`` integers for each place, contiguous.
        size: The number of places.
        elements: The number of values.
        WORDS: The number of integers that a value consists of.
        BLOCK: The number of values of a program.
        WIDE: Whether an offset may exceed 32 bits.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    place = find_place(places, offsets, exists, size)
    exists &= place < size
    wins = exists & (tl.load(last + place, mask=exists, other=-1) == offsets)
    for word in tl.static_range(WORDS):
        value = tl.load(values + offsets * WORDS + word, mask=wins)
        tl.store(target + place * WORDS + word, value, mask=wins)


def put_last(target: Tensor, places: Tensor, values: Tensor) -> None:
    """Write values into a contiguous tensor, at positions counted as if it were flat.

    Args:
        target: The tensor.
        places: For each value its position; int64. A negative one counts from the end.
        values: Of the target's dtype.
    """
    size, elements = target.numel(), values.numel()
    places, values = places.contiguous(), values.contiguous()
    like = torch.empty(
        0, dtype=torch.int64 if elements > INT32_LIMIT else torch.int32, device=target.device
    )
    last = allocate((size + 1,), like)
    last[size:].fill_(-1)
    integer = _WORDS[min(target.itemsize, _LONGEST)]
    words, written = values.view(integer), target.view(-1).view(integer)
    wide = needs_int64(words, written, last)
    launch_blocks(clear_marks, places, places, last, size, WIDE=wide)
    launch_blocks(mark_last, places, places, last, size, WIDE=wide)
    # On a device the host does not wait; a failed check surfaces at a later call, as in torch.
    torch.ops.aten._assert_async(last[-1] < 0)  # noqa: SLF001 - it does not wait for the device
    more = {"WORDS": words.numel() // elements, "WIDE": wide}
    launch_blocks(write_last, places, places, last, words, written, size, **more)
