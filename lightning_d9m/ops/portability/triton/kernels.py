# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN002, ANN201, N803 - Triton's compiler reads these functions
"""Products, sums, and running sums, in the sequences of ``definitions.py``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9m.ops.patches.triton.launch import INT32_LIMIT
from lightning_d9m.ops.portability import definitions

_TILE = 64  # rows and columns of a product that a program computes
_LINES = 128  # running sums of a program
# A multiplication that is meant to be rounded before an addition must not be fused with it.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
LANES, BLOCK, DEPTH = map(tl.constexpr, (definitions.LANES, definitions.BLOCK, definitions.DEPTH))


def start(kernel, programs, tensors, *numbers):
    """Launch programs of a kernel on the device of its tensors."""
    with torch.cuda.device(tensors[0].device.index if tensors[0].is_cuda else -1):
        kernel[programs, 1, 1](*tensors, *numbers, **OPTIONS)


@triton.jit
def add_product(left, right, total):
    """Return left * right + total: of float32 numbers rounded once, of float64 numbers twice."""
    if total.dtype == tl.float64:
        return left * right + total
    else:  # noqa: RET505 - the branch of one type is compiled, without what follows it
        return tl.fma(left, right, total)


@triton.jit
def divide(left, right):
    """Return the quotient, rounded to nearest: ``/`` of float32 numbers is not."""
    if left.dtype == tl.float64:
        return left / right
    else:  # noqa: RET505
        return tl.div_rn(left, right)


@triton.jit
def find_root(values):
    """Return the root, rounded to nearest."""
    if values.dtype == tl.float64:
        return tl.sqrt(values)
    else:  # noqa: RET505
        return tl.sqrt_rn(values)


@triton.jit
def copy_sign(values, signs):
    """Return float64 numbers with the signs of others."""
    sign: tl.constexpr = -1 << 63
    bits = values.to(tl.int64, bitcast=True) & ~sign
    return (bits | (signs.to(tl.int64, bitcast=True) & sign)).to(tl.float64, bitcast=True)


@triton.jit
def add_pair(left, right):
    """Return the sum."""
    return left + right


@triton.jit
def add_lanes(lanes, AXIS: tl.constexpr):
    """Add the upper half of the lanes to the lower half, until one is left."""
    results: tl.constexpr = lanes.shape[1 - AXIS]
    for step in tl.static_range(5):
        if AXIS == 0:
            pairs = tl.reshape(lanes, [2, LANES >> (step + 1), results])
        else:
            pairs = tl.reshape(lanes, [results, 2, LANES >> (step + 1)])
        lanes = tl.reduce(pairs, AXIS, add_pair)
    return lanes


@triton.jit(do_not_specialize=["rows", "columns", "terms"])
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
            block = add_product(one, tl.load(right + tl.load(right_terms + term))[None, :], block)
        # The first block is not added to 0, because its sum may be -0.0.
        total = tl.where(begin == 0, block, total + block)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    out += tl.load(out_batch + batch)
    out += tl.load(out_rows + row, mask=row < rows, other=0)[:, None]
    out += tl.load(out_columns + column, mask=column < columns, other=0)[None, :]
    tl.store(out, total, mask=inside)


def multiply(out, left, right, of_left, of_right, of_out):
    """Write products of matrices; ``kernels.multiply_at`` has the arguments."""
    rows, columns = of_left.rows.numel(), of_right.columns.numel()
    tiles = triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE) * of_left.batch.numel()
    places = [one.to(out.device) for own in (of_left, of_right, of_out) for one in own]
    numbers = (rows, columns, of_left.columns.numel(), _TILE)
    start(multiply_tiles, tiles, (left, right, out, *places), *numbers)


_STEPS = ["size", "outer_step", "step", "inner", "outer_term", "term_step"]


@triton.jit(do_not_specialize=["results", "terms", "blocks", *_STEPS])
def add_blocks(
    x, y, center, factor, out, results, terms, blocks,
    size, outer_step, step, inner, outer_term, term_step,
    KIND: tl.constexpr, AXIS: tl.constexpr, WIDE: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    """Add a block of the terms of each of ``RESULTS`` sums; lanes are the dimension ``AXIS``.

    ``KIND`` is the place of the terms in ``formulas.TERMS``.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    first = program // blocks * RESULTS
    result = tl.expand_dims(first + tl.arange(0, RESULTS), AXIS)
    lane = tl.expand_dims(tl.arange(0, LANES), 1 - AXIS) + result * 0
    place = result // size * outer_step + result % size * step
    there = result < results
    if KIND > 0:
        middle = tl.load(center + result, mask=there, other=0.0)
    if KIND == 2:
        scale = tl.load(factor + result, mask=there, other=0.0)
    lanes = tl.zeros(lane.shape, out.dtype.element_ty)
    begin = program % blocks * BLOCK
    for done in range(begin, tl.minimum(begin + BLOCK, terms), LANES):
        term = done + lane
        here = there & (term < terms)
        at = place + term // inner * outer_term + term % inner * term_step
        value = tl.load(x + at, mask=here, other=0.0)
        if KIND == 1:
            value = (value - middle) * (value - middle)
        if KIND == 2:
            value = value * ((tl.load(y + at, mask=here, other=0.0) - middle) * scale)
        lanes = tl.where(here, lanes + value, lanes)
    tl.store(out + program % blocks * results + result, add_lanes(lanes, AXIS), mask=there)


def add(out, x, y, center, factor, kind, results, terms):
    """Write sums into ``out``.

    ``results`` and ``terms`` have sizes and steps in memory of an outer and an inner dimension.
    """
    (many, outer_step), (size, step) = results
    (turns, outer_term), (inner, term_step) = terms
    blocks = max(-(-turns * inner // definitions.BLOCK), 1)
    parts = out if blocks == 1 else out.new_empty((blocks, out.numel()))
    axis = int(abs(step) != 1 or size == 1)  # neighbors in memory to neighbors among the threads
    each = 4 if axis else 32
    wide = max(parts.numel(), x.untyped_storage().nbytes()) > INT32_LIMIT
    numbers = (out.numel(), turns * inner, blocks, size, outer_step, step)
    start(
        add_blocks, triton.cdiv(many * size, each) * blocks,
        [x if one is None else one for one in (x, y, center, factor, parts)],
        *numbers, inner, outer_term, term_step, kind, axis, wide, each,
    )  # fmt: skip
    if blocks > 1:
        programs = triton.cdiv(out.numel(), _LINES)
        start(add_in_order, programs, (parts, out), out.numel(), blocks, out.numel(), False, _LINES)


@triton.jit(do_not_specialize=["lines", "terms", "inner"])
def add_in_order(
    x, out, lines, terms, inner, EACH: tl.constexpr, LINES: tl.constexpr
):  # fmt: skip
    """Add ``[outer, terms, inner]`` along the terms, from 0; store each sum, or the last."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    there = line < lines
    place = line // inner * terms * inner + line % inner
    total = tl.zeros([LINES], out.dtype.element_ty)
    for _ in range(terms):
        total += tl.load(x + place, mask=there, other=0.0)
        if EACH:
            tl.store(out + place, total, mask=there)
        place += inner
    if not EACH:
        tl.store(out + line, total, mask=there)


def add_running(out: Tensor, x: Tensor, dim: int) -> None:
    """Write the sum up to each element into ``out``, which is contiguous."""
    terms, inner = x.shape[dim], x.stride(dim)
    lines = x.numel() // terms
    start(add_in_order, triton.cdiv(lines, _LINES), (x, out), lines, terms, inner, True, _LINES)
