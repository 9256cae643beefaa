# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, N803 - Triton's compiler reads these functions
"""Products and sums, in the sequences of ``definitions.py``."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9m.ops.patches.triton.launch import INT32_LIMIT
from lightning_d9m.ops.portability import definitions

_TILE = 64  # rows and columns of a product that a program computes
# A multiplication that is meant to be rounded before an addition must not be fused with it.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
BLOCK, DEPTH = map(tl.constexpr, (definitions.BLOCK, definitions.DEPTH))


def start(kernel: Any, programs: int, tensors: Sequence[Tensor], *numbers: Any) -> None:
    """Launch programs of a kernel on the device of its tensors."""
    with torch.cuda.device(tensors[0].device.index if tensors[0].is_cuda else -1):
        kernel[programs, 1, 1](*tensors, *numbers, **OPTIONS)


@triton.jit
def add_lanes(lanes, AXIS: tl.constexpr, STEPS: tl.constexpr):
    """Add the upper half of ``2**STEPS`` lanes to the lower half, until one is left."""
    results: tl.constexpr = lanes.shape[1 - AXIS]
    for step in tl.static_range(1, STEPS + 1):
        if AXIS:
            lanes = tl.reshape(lanes, [results, 2, 2 ** (STEPS - step)])
        else:
            lanes = tl.reshape(lanes, [2, 2 ** (STEPS - step), results])
        lanes = tl.sum(lanes, AXIS)
    return lanes


@triton.jit(do_not_specialize=["rows", "columns", "terms"])  # one kernel for all sizes
def multiply_tiles(
    left, right, out,
    left_rows, left_terms, left_batch,
    right_terms, right_columns, right_batch,
    out_rows, out_columns, out_batch,
    rows, columns, terms,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a product. Results beside the matrix repeat the last row or column."""
    program = tl.program_id(0)
    across, down = tl.cdiv(columns, TILE), tl.cdiv(rows, TILE)
    batch = program // (across * down)
    row = (program // across) % down * TILE + tl.arange(0, TILE)
    column = program % across * TILE + tl.arange(0, TILE)
    left += tl.load(left_batch + batch) + tl.load(left_rows + tl.minimum(row, rows - 1))
    right += tl.load(right_batch + batch)
    right += tl.load(right_columns + tl.minimum(column, columns - 1))
    total = tl.zeros([TILE, TILE], out.dtype.element_ty)
    for begin in range(0, terms, DEPTH):
        block = tl.zeros([TILE, TILE], out.dtype.element_ty)
        for term in range(begin, tl.minimum(begin + DEPTH, terms)):
            one = tl.load(left + tl.load(left_terms + term))[:, None]
            other = tl.load(right + tl.load(right_terms + term))[None, :]
            # The rounding of ``add_product`` in kernels.c.
            if block.dtype == tl.float64:
                block += one * other
            else:
                block = tl.fma(one, other, block)
        # The first block is not added to 0, because its sum may be -0.0.
        total = tl.where(begin == 0, block, total + block)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    out += tl.load(out_batch + batch)
    out += tl.load(out_rows + row, mask=row < rows, other=0)[:, None]
    out += tl.load(out_columns + column, mask=column < columns, other=0)[None, :]
    tl.store(out, total, mask=inside)


def multiply(out, left, right, of_left, of_right, of_out):
    """Write products of matrices; ``multiply_at`` describes the arguments."""
    rows, columns = of_left.rows.numel(), of_right.columns.numel()
    tiles = triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE) * of_left.batch.numel()
    places = [one.to(out.device) for own in (of_left, of_right, of_out) for one in own]
    terms = of_left.columns.numel()
    start(multiply_tiles, tiles, (left, right, out, *places), rows, columns, terms, _TILE)


@triton.jit(do_not_specialize=[*range(2, 11)])
def add_blocks(
    x, out, results, terms, blocks,
    size, outer_step, step, inner, outer_term, term_step,
    AXIS: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    """Add a block of terms of each of ``RESULTS`` sums. Its ``2**STEPS`` lanes are ``AXIS``."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    first = program // blocks * RESULTS
    result = tl.expand_dims(first + tl.arange(0, RESULTS), AXIS)
    lane = tl.expand_dims(tl.arange(0, 2**STEPS), 1 - AXIS) + result * 0
    place = result // size * outer_step + result % size * step
    there = result < results
    lanes = tl.zeros(lane.shape, out.dtype.element_ty)
    begin = program % blocks * BLOCK
    # Not a conditional expression, whose branches must have one type: `begin` may have 64 bits.
    end = tl.where(blocks == 1, terms, tl.minimum(begin + BLOCK, terms))
    for done in range(begin, end, 2**STEPS):
        term = done + lane
        here = there & (term < terms)
        at = place + term // inner * outer_term + term % inner * term_step
        lanes = tl.where(here, lanes + tl.load(x + at, mask=here, other=0.0), lanes)
    lanes = add_lanes(lanes, AXIS, STEPS)
    tl.store(out + program % blocks * results + result, lanes, mask=there)


def add(out, x, results, terms, steps=5):
    """Write sums into ``out``: of ``2**steps`` lanes, and if that is 1, in order.

    ``results`` and ``terms`` have sizes and steps in memory of an outer and an inner dimension.
    """
    (size, step), (inner, _) = results[1], terms[1]
    count = terms[0][0] * inner
    blocks = max(-(-count // definitions.BLOCK), 1) if steps else 1
    parts = out if blocks == 1 else out.new_empty((blocks, out.numel()))
    # Neighbors in memory are neighbors among the threads: results of columns, else lanes of a row,
    # of which a warp has one. 2**5 is `definitions.LANES`.
    axis = int(step != 1 or size == 1)
    each = 4 if axis else 32
    start(
        add_blocks, triton.cdiv(out.numel(), each) * blocks, [x, parts],
        out.numel(), count, blocks, size, results[0][1], step, inner, terms[0][1], terms[1][1],
        axis, steps, max(parts.numel(), x.untyped_storage().nbytes()) > INT32_LIMIT, each,
    )  # fmt: skip
    if blocks > 1:
        places = [(1, 0), (out.numel(), 1)], [(1, 0), (blocks, out.numel())]
        add(out, parts, *places, steps=0)
