# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, N803 - Triton's compiler reads these functions
"""Products and sums. They say the sequence of each result, which ``kernels.c`` computes, too."""

from lightning_d9m.ops.patches.triton import language as tl
from lightning_d9m.ops.patches.triton.launch import jit, prepare_launch

LANES, BLOCK, DEPTH = 32, 4096, 256  # of a sum, of its terms, and of those of a product
_TILE = 64  # rows and columns of a product that a program computes
_SIDE = 512  # as many, for torch ops


@jit()
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


@jit()
def divide(left, right):
    """Return a quotient, rounded to nearest: `/` of float32 numbers is not."""
    return left / right if left.dtype == tl.float64 else tl.div_rn(left, right)


@jit()
def find_root(values):
    """Return a root, rounded to nearest."""
    return tl.sqrt(values) if values.dtype == tl.float64 else tl.sqrt_rn(values)


@jit()
def find_rest(x, y):
    """Return what C's ``fmod`` gives for float64 numbers.

    As whole numbers: `x = m * 2**e`, and 53 bits of a rest of m can be shifted by 10 bits at a time
    before the next rest is taken.
    """
    m, e = split_number(x)
    divisor, last = split_number(y)
    divisor = tl.where(divisor == 0, 1, divisor)
    rest, shifts = m % divisor, tl.maximum(e - last, 0)
    for _ in range(0, tl.max(shifts), 10):
        shift = tl.minimum(shifts, 10)
        rest, shifts = (rest << shift) % divisor, shifts - shift
    # Two powers: 2**-1074 is subnormal.
    found = rest.to(tl.float64) * make_power(tl.maximum(last - 1075, -1000))
    found *= make_power(tl.minimum(last - 75, 0))
    negative = tl.cast(x, tl.int64, bitcast=True) < 0
    found = tl.where(e < last, x, found * tl.where(negative, -1, 1))
    return tl.where((tl.abs(x) < float("inf")) & (tl.abs(y) > 0), found, float("nan"))


@jit()
def split_number(x):
    """Return the significand of float64 numbers as a whole number, and their biased exponents."""
    bits = tl.cast(tl.abs(x), tl.int64, bitcast=True)
    exponent = bits >> 52
    m = (bits & ((1 << 52) - 1)) | (tl.minimum(exponent, 1) << 52)
    return m, tl.maximum(exponent, 1)


@jit()
def make_power(k):
    """Return 2 to the power of whole numbers from -1022 to 1023."""
    return tl.cast((k + 1023) << 52, tl.float64, bitcast=True)


@jit("rows", "columns", "terms")  # one kernel for all sizes
def multiply_tiles(
    left, right, out,
    left_rows, left_terms, left_batch,
    right_terms, right_columns, right_batch,
    out_rows, out_columns, out_batch,
    rows, columns, terms,
    DEPTH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a product. Results beside the matrix repeat the last row or column.

    In each block of ``DEPTH`` terms, one product after the other is added to 0; then one block
    after the other is added.
    """
    program = tl.program_id(0)
    if WIDE:  # a number rounded up to whole tiles or blocks could pass 2**31
        program, terms = program.to(tl.int64), terms.to(tl.int64)
        rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    across, down = tl.cdiv(columns, BLOCK), tl.cdiv(rows, BLOCK)
    batch = program // (across * down)
    row = (program // across) % down * BLOCK + tl.arange(0, BLOCK)
    column = program % across * BLOCK + tl.arange(0, BLOCK)
    left += tl.load(left_batch + batch) + tl.load(left_rows + tl.minimum(row, rows - 1))
    right += tl.load(right_batch + batch)
    right += tl.load(right_columns + tl.minimum(column, columns - 1))
    total = tl.zeros([BLOCK, BLOCK], out.dtype.element_ty)
    for begin in range(0, terms, DEPTH):
        block = tl.zeros([BLOCK, BLOCK], out.dtype.element_ty)
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
    rows, columns, batch = (one.numel() for one in (of_left.rows, of_right.columns, of_left.batch))
    places = [one.to(out.device) for own in (of_left, of_right, of_out) for one in own]
    terms, side = of_left.columns.numel(), max(rows, columns)
    launch = prepare_launch(
        multiply_tiles, side, terms, rows, columns, terms, DEPTH, block=_TILE, width=_SIDE,
        count=lambda side: -(-rows // side) * -(-columns // side) * batch,
    )  # fmt: skip
    launch(left, right, out, *places)


_SUMS = "results terms blocks size outer_step step inner outer_term term_step"


@jit(*_SUMS.split())
def add_blocks(
    x, out, results, terms, blocks,
    size, outer_step, step, inner, outer_term, term_step,
    AXIS: tl.constexpr, STEPS: tl.constexpr, TERMS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a block of ``TERMS`` terms of each of ``BLOCK`` sums.

    The lanes are ``AXIS``. Term i is added to lane i % ``2**STEPS``, which begins with 0; then the
    upper half of the lanes is added to the lower half, until one is left.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    first = program // blocks * BLOCK
    result = tl.expand_dims(first + tl.arange(0, BLOCK), AXIS)
    lane = tl.expand_dims(tl.arange(0, 2**STEPS), 1 - AXIS) + result * 0
    place = result // size * outer_step + result % size * step
    there = result < results
    lanes = tl.zeros(lane.shape, out.dtype.element_ty)
    begin = program % blocks * TERMS
    # Not a conditional expression, whose branches must have one type: `begin` may have 64 bits.
    end = tl.where(blocks == 1, terms, tl.minimum(begin + TERMS, terms))
    for done in range(begin, end, 2**STEPS):
        term = done + lane
        here = there & (term < terms)
        at = place + term // inner * outer_term + term % inner * term_step
        lanes = tl.where(here, lanes + tl.load(x + at, mask=here, other=0.0), lanes)
    lanes = add_lanes(lanes, AXIS, STEPS)
    tl.store(out + program % blocks * results + result, lanes, mask=there)


def add(out, x, results, terms, steps=5):
    """Write sums into ``out``: of ``2**steps`` lanes, and if that is 1, in order.

    With lanes, terms are added in blocks of ``BLOCK``, and then one block after the other.

    ``results`` and ``terms`` have sizes and steps in memory of an outer and an inner dimension.
    """
    (size, step), (inner, _) = results[1], terms[1]
    count = terms[0][0] * inner
    blocks = max(-(-count // BLOCK), 1) if steps else 1
    parts = out if blocks == 1 else out.new_empty((blocks, out.numel()))
    # Neighbors in memory are neighbors among the threads: results of columns, else lanes of a row,
    # of which a warp has one.
    axis = int(step != 1 or size == 1)
    launch = prepare_launch(
        add_blocks, out.numel(), max(parts.numel(), count + BLOCK, x.untyped_storage().nbytes()),
        out.numel(), count, blocks, size, results[0][1], step, inner, terms[0][1], terms[1][1],
        axis, steps, BLOCK, block=4 if axis else 32, width=LANES,
        count=lambda each: -(-out.numel() // each) * blocks,
    )  # fmt: skip
    launch(x, parts)
    if blocks > 1:
        places = [(1, 0), (out.numel(), 1)], [(1, 0), (blocks, out.numel())]
        add(out, parts, *places, steps=0)
