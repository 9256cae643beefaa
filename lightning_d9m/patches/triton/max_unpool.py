# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, N803 - Triton's compiler reads these signatures
"""Max unpooling: of several values for one place, the last one is written.

Each place gets the greatest position of its values by an integer atomic, whose result does not
depend on their order; then each place reads that value.
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


@triton.jit(do_not_specialize=["inputs", "outputs", "spare", "elements"])
def mark_last(
    places, last, inputs, outputs, spare, elements, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Write for each place the greatest position of its values.

    Args:
        places: For each value its place in the plane; int64, contiguous.
        last: For each place of all planes -1; contiguous.
        inputs: The number of values in a plane, as a divisor.
        outputs: The number of places in a plane.
        spare: Where the values go that have a place outside their plane.
        elements: The number of values.
        BLOCK: The number of values of a program.
        WIDE: Whether an offset may exceed 32 bits.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    plane = divide_index(offsets, inputs)
    position = (offsets - plane * inputs[0]).to(last.dtype.element_ty)
    place = tl.load(places + offsets, mask=exists, other=0)
    inside = (place >= 0) & (place < outputs)
    target = tl.where(inside, plane.to(tl.int64) * outputs + place, spare)
    tl.atomic_max(last + target, position, mask=exists, sem="relaxed")


@triton.jit(do_not_specialize=["inputs", "outputs", "elements"])
def read_last(
    values, last, result, inputs, outputs, elements, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Write for each place the value at the position that was marked, or 0.

    Args:
        values: Contiguous.
        last: What ``mark_last`` writes.
        result: The values by place, contiguous.
        inputs: The number of values in a plane.
        outputs: The number of places in a plane, as a divisor.
        elements: The number of places of all planes.
        BLOCK: The number of places of a program.
        WIDE: Whether an offset may exceed 32 bits.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    plane = divide_index(offsets, outputs)
    position = tl.load(last + offsets, mask=exists, other=-1)
    found = position >= 0
    value = tl.load(values + plane * inputs + position, mask=found, other=0)
    tl.store(result + offsets, value, mask=exists)


def unpool(values: Tensor, places: Tensor, output_size: Sequence[int]) -> Tensor:
    """Return zeros with each value at the place in its plane.

    Args:
        values: Of shape ``[..., *inputs]``.
        places: For each value the flat place in its plane; int64.
        output_size: The sizes of the spatial dimensions.
    """
    dims = len(output_size)
    result = allocate((*values.shape[:-dims], *output_size), values, torch.contiguous_format)
    inputs, outputs = prod(values.shape[-dims:]), prod(output_size)
    if not result.numel():
        return result
    values, places = values.contiguous(), places.contiguous()
    dtype = torch.int64 if inputs > INT32_LIMIT else torch.int32
    last = torch.full((result.numel() + 1,), -1, dtype=dtype, device=values.device)
    wide = needs_int64(values, last)
    launch_blocks(
        mark_last, places, places, last, as_divisor(inputs), outputs, result.numel(), WIDE=wide
    )
    # On a device the host does not wait; a failed check surfaces at a later call, as in torch.
    torch.ops.aten._assert_async(last[-1] < 0)  # noqa: SLF001 - it does not wait for the device
    launch_blocks(read_last, result, values, last, result, inputs, as_divisor(outputs), WIDE=wide)
    return result
