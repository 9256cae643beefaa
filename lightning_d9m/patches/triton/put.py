# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0917 - Triton's compiler reads these signatures
"""``put_`` and max unpooling: of several values for one place, the last one is written.

Each place gets the greatest position of its values by an integer atomic, whose result does not
depend on their order; then the values at these positions are written. Places without a value are
neither read nor written, also among the marks.
"""

from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9m.patches.triton.geometry import divide_index, find_block
from lightning_d9m.patches.triton.input_gradient import as_divisor
from lightning_d9m.patches.triton.launch import (
    INT32_LIMIT,
    allocate,
    launch_blocks,
    needs_int64,
)

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LONGEST = 8  # bytes


@triton.jit
def find_place(places, offsets, exists, inputs, outputs, spare, WRAPS: tl.constexpr):
    """Return the places of values among those of all planes; ``spare`` for one outside its own."""
    place = tl.load(places + offsets, mask=exists, other=0)
    if WRAPS:
        place = tl.where(place < 0, place + outputs, place)
    first = divide_index(offsets, inputs).to(tl.int64) * outputs
    return tl.where((place >= 0) & (place < outputs), first + place, spare)


@triton.jit(do_not_specialize=["inputs", "outputs", "spare", "elements"])
def clear_marks(
    places,
    last,
    inputs,
    outputs,
    spare,
    elements,
    WRAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write -1 for each place that gets a value.

    Args:
        places: For each value its place in its plane; int64, contiguous.
        last: An integer for each place, and one for values without a place.
        inputs: The number of values of a plane, as a divisor.
        outputs: The number of places of a plane.
        spare: The number of places of all planes.
        elements: The number of values.
        WRAPS: Whether a negative place counts from the end.
        BLOCK: The number of values of a program.
        WIDE: Whether an offset may exceed 32 bits.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    place = find_place(places, offsets, exists, inputs, outputs, spare, WRAPS)
    nothing = tl.full([BLOCK], -1, last.dtype.element_ty)
    tl.store(last + place, nothing, mask=exists & (place < spare))


@triton.jit(do_not_specialize=["inputs", "outputs", "spare", "elements"])
def mark_last(
    places,
    last,
    inputs,
    outputs,
    spare,
    elements,
    WRAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write for each place the greatest position of its values; see ``clear_marks``."""
    offsets, exists = find_block(elements, BLOCK, WIDE)
    place = find_place(places, offsets, exists, inputs, outputs, spare, WRAPS)
    tl.atomic_max(last + place, offsets.to(last.dtype.element_ty), mask=exists, sem="relaxed")


@triton.jit(do_not_specialize=["inputs", "outputs", "spare", "elements"])
def write_last(
    places,
    last,
    values,
    target,
    inputs,
    outputs,
    spare,
    elements,
    WORDS: tl.constexpr,
    WRAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the values whose positions are marked; see ``clear_marks``.

    A value consists of ``WORDS`` integers, in ``values`` as in ``target``, both contiguous.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    place = find_place(places, offsets, exists, inputs, outputs, spare, WRAPS)
    exists &= place < spare
    wins = exists & (tl.load(last + place, mask=exists, other=-1) == offsets)
    for word in tl.static_range(WORDS):
        value = tl.load(values + offsets * WORDS + word, mask=wins)
        tl.store(target + place * WORDS + word, value, mask=wins)


def put_last(
    target: Tensor, places: Tensor, values: Tensor, *, planes: int = 1, wraps: bool = True
) -> None:
    """Write values into a contiguous tensor, at positions counted as if it were flat.

    Places count within one of ``planes`` equal parts; if ``wraps``, a negative one counts from the
    end.
    """
    size, elements = target.numel(), values.numel()
    places, values = places.contiguous(), values.contiguous()
    like = torch.empty(
        0, dtype=torch.int64 if elements > INT32_LIMIT else torch.int32, device=target.device
    )
    last = allocate((size + 1,), like)
    last[size:].fill_(-1)
    integer = _WORDS[min(target.itemsize, _LONGEST)]
    words, written = values.view(-1).view(integer), target.view(-1).view(integer)
    more: dict[str, int] = {"WRAPS": wraps, "WIDE": needs_int64(words, written, last)}
    shape = (as_divisor(elements // planes), size // planes, size)
    launch_blocks(clear_marks, places, places, last, *shape, **more)
    launch_blocks(mark_last, places, places, last, *shape, **more)
    # On a device the host does not wait; a failed check surfaces at a later call, as in torch.
    torch.ops.aten._assert_async(last[-1] < 0)  # noqa: SLF001 - it does not wait for the device
    more["WORDS"] = words.numel() // elements
    launch_blocks(write_last, places, places, last, words, written, *shape, **more)


def unpool(values: Tensor, places: Tensor, output_size: Sequence[int]) -> Tensor:
    """Return zeros with each value at the place in its plane."""
    sizes = values.shape[: -len(output_size)]
    result = values.new_zeros((*sizes, *output_size))
    if result.numel():
        put_last(result, places, values, planes=prod(sizes), wraps=False)
    return result
