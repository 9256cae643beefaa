"""Computations with a fixed sequence of operations: by compiled kernels, or by torch operations.

The text of the kernels in ``triton/`` is the definition. Triton compiles it for CUDA devices, where
each kernel computes a small example first, and torch operations run it without a C compiler.
Inputs are float32 or float64 tensors (``widen`` converts others); results have their dtype.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides

from lightning_d9m.ops.patches.exact_sums import KERNEL, Layout, Pieces
from lightning_d9m.ops.patches.triton.launch import natives, run_kernel
from lightning_d9m.ops.portability.expressions import RowKernel
from lightning_d9m.ops.portability.formulas import KERNELS
from lightning_d9m.ops.portability.library import find_kernel, run

_TRITON = "lightning_d9m.ops.portability.triton"
_COUNTERS, _MASK = 16, 0xFFFFFFFF  # of random numbers
_COLUMNS = 64  # that a kernel adds at a time: with 32 lanes they fit the first cache
_FEW = 16  # columns that are too few: most of a tile, or of the columns added at a time, is empty


# The digits of a product of two such numbers fit a float32, and a sum is rounded to 16 bits once,
# at the end.
def widen(values: Tensor) -> Tensor:
    """Return numbers of 16 bits as float32 numbers, and others unchanged."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def compute(name: str, **given: Tensor | Sequence[float] | None) -> tuple[Tensor, ...]:
    """Return the outputs of a kernel of rows.

    Args:
        name: One of ``formulas.KERNELS``.
        **given: Its inputs in their order; tensors of one dtype, those with all rows of one shape.
            An output that has the name of an input replaces it.
    """
    name = "_without_".join((name, *(key for key, one in given.items() if one is None)))
    formula = KERNELS[name]
    inputs: dict[str, Any] = {k: one for k, one in given.items() if one is not None}
    x = next(one for one in inputs.values() if isinstance(one, Tensor))
    count = x.shape[-1] if formula.in_rows else 1
    rows = x.numel() // max(count, 1)
    # A kernel sees pointers only: elements must be at the same places in all tensors.
    tensors = [one for one in inputs.values() if isinstance(one, Tensor)]
    lay_out: Callable[[Tensor], Tensor] = Tensor.contiguous
    like = x.new_empty
    if not (formula.in_rows or all(map(Tensor.is_contiguous, tensors))):
        steps = compute_elementwise_output_strides(*tensors)
        like = partial(x.new_empty_strided, stride=steps)  # as torch's kernels
        lay_out = lambda one: one if one.stride() == steps else like(x.shape).copy_(one)  # noqa: E731
    out = tuple(
        like(x.shape) if formula.outputs[one].each else x.new_empty(rows) for one in formula.fresh
    )
    # Statistics of batches may have 16 bits.
    places = {
        key: lay_out(one.to(x.dtype)) if isinstance(one, Tensor) else [*map(float, one)]
        for key, one in inputs.items()
    }
    kernel, used = find_kernel(name, x), [*places.values()]
    if kernel is None:
        run_kernel(
            f"{_TRITON}.formulas:{name}", partial(_make_example, formula, x.dtype), *out, *used
        )
    else:
        members = chain.from_iterable([one] if isinstance(one, Tensor) else one for one in used)
        periods = (len(inputs[k]) for k, place in formula.inputs.items() if place == "r % period")
        run(kernel, rows, 16 * x.numel(), count, next(periods, 1), *members, *out)
    # Of what is replaced a copy was made where it is not contiguous, as a weight in channels_last.
    for key in formula.outputs.keys() & inputs.keys():
        if places[key] is not inputs[key]:
            inputs[key].copy_(places[key])
    return out


# In float64 on the CPU, and then moved: a device might compute other numbers.
def _number(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return numbers between 0 and 1, with all digits, of which a fused kernel rounds others."""
    numbers = torch.arange(1, prod(shape) + 1, dtype=torch.float64, device="cpu")
    # Multiples of the golden ratio spread evenly between 0 and 1 and do not repeat.
    return (numbers * 0.61803398875).frac_().view(shape).to(device, dtype)


def _make_example(formula: RowKernel, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Return small arguments of a kernel of rows."""
    # 70 is not a multiple of the 32 lanes, nor 3 of the 4 rows of a program, so that the example
    # has incomplete blocks.
    shapes = {"at": (3, 70), "0": (70,), "r % period": (3,)}
    fresh = [(3, 70) if formula.outputs[one].each else (3,) for one in formula.fresh]
    given = [one if isinstance(one, int) else shapes[one] for one in formula.inputs.values()]
    return tuple(
        [0.5] * one if isinstance(one, int) else _number(device, dtype, *one)
        for one in fresh + given
    )


class Offsets(NamedTuple):
    """Places of the elements of matrices in memory: ``rows[i] + columns[j] + batch[b]``."""

    rows: Tensor
    columns: Tensor
    batch: Tensor


# The layers of a model need the same ones in each step.
@lru_cache(maxsize=512)
def count_steps(count: int, step: int, device: torch.device) -> Tensor:
    """Return the offsets of elements in even steps."""
    return (
        torch.arange(0, count * step, step, device=device)
        if step
        else torch.zeros(count, dtype=torch.int64, device=device)
    )


def multiply_at(left: Tensor, right: Tensor, out: Tensor, *places: Offsets) -> None:
    """Write products of matrices, whose elements are where offsets say, into a tensor.

    Args:
        left: Of shape ``[batch, rows, terms]`` by its offsets.
        right: Of shape ``[batch, terms, columns]``.
        out: Of shape ``[batch, rows, columns]``.
        *places: The offsets of the three tensors.
    """
    of_left, of_right, of_out = places
    rows, columns = of_left.rows.numel(), of_right.columns.numel()
    terms, batch = of_left.columns.numel(), of_left.batch.numel()
    if not rows * columns * batch:
        return
    if not terms:  # as of a convolution without input channels
        out.zero_()
        return
    # A kernel shares out columns; a product of the transposed matrices has the same sequence for
    # each result, and as many columns as this one has rows.
    if columns < min(_FEW, rows):
        places = tuple(Offsets(one.columns, one.rows, one.batch) for one in places)
        left, right, rows, columns = right, left, columns, rows
        of_right, of_left, of_out = places
    kernel = find_kernel("product", out)
    if kernel is None:
        path, example = f"{_TRITON}.kernels:multiply", partial(_make_product, out.dtype)
        run_kernel(path, example, out, left, right, of_left, of_right, of_out)
        return
    given, results = (rows, columns, terms, left, right, out), batch * columns
    run(kernel, results, results * rows * terms // 16, *given, *of_left, *of_right, *of_out)


def _make_product(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Return small arguments of a product, with two blocks of terms."""
    # A block has 256 terms.
    shapes = (2, 3, 5), (2, 3, 300), (2, 300, 5)
    tensors = [_number(device, dtype, *shape) for shape in shapes]
    out, left, right = (_place(one.shape, one.stride(), device) for one in tensors)
    return (*tensors, left, right, out)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return products of matrices: ``[batch, rows, terms]`` and ``[batch, terms, columns]``."""
    shape = (left.shape[0], left.shape[1], right.shape[2])
    if not left.shape[2]:
        return left.new_zeros(shape)
    out = left.new_empty(shape)
    places = (_place(one.shape, one.stride(), one.device) for one in (left, right, out))
    multiply_at(left, right, out, *places)
    return out


@lru_cache(maxsize=512)
def _place(shape: Sequence[int], strides: Sequence[int], device: torch.device) -> Offsets:
    batch, rows, columns = map(count_steps, shape, strides, [device] * 3)
    return Offsets(rows, columns, batch)


def _merge(x: Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    """Return sizes and strides of dimensions, those joined that follow each other in memory."""
    found: list[tuple[int, int]] = []
    for dim in dims:
        size, stride = x.shape[dim], x.stride(dim)
        # Its stride is never used and may be anything, so that it would keep others from being
        # joined.
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            size *= found.pop()[0]
        found.append((size, stride))
    return found


def add(x: Tensor, dims: Sequence[int], *, keepdim: bool = False) -> Tensor:
    """Return sums over dimensions.

    Args:
        x: The values.
        dims: None of them twice, none negative; the terms of a sum are in row-major order of them.
        keepdim: Whether they remain, with size 1.
    """
    kept, dims = [dim for dim in range(x.dim()) if dim not in dims], sorted(dims)
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    out = x.new_empty(shape if keepdim else [x.shape[dim] for dim in kept])
    if not x.numel():
        return out.zero_()
    # By sizes and strides: a transposed view, such as that of a gradient, needs no copy.
    kernel, results, terms = find_kernel("row_sums", x), _merge(x, kept), _merge(x, dims)
    if kernel and results and len(results) <= 2 and len(terms) <= 1 and results[-1][1] == 1:
        # Neighboring results are neighbors in memory: whole pieces of rows are added to them.
        columns = results[-1][0]
        matrices, step = results[0] if len(results) == 2 else (1, 0)
        count, row_step = terms[0] if terms else (1, 0)
        if columns >= _FEW or count == 1:
            items, wide = matrices * -(-columns // _COLUMNS), find_kernel("column_sums", x)
            assert wide
            run(wide, items, x.numel(), count, columns, step, row_step, x, out)
            return out
    # Of other layouts a copy in order: kernels have so many pairs of a size and a step.
    if len(results) > (1 if kernel else 2) or len(terms) > 2:
        x, length = x.permute((*kept, *dims)).contiguous(), x.numel() // out.numel()
        results, terms = [(out.numel(), length)], [(length, 1)]
    results, terms = ([(1, 0)] * (2 - len(one)) + one for one in (results, terms))
    if kernel:
        run(kernel, results[1][0], x.numel(), results[1][1], *terms[0], *terms[1], x, out)
    else:
        path = f"{_TRITON}.kernels:add"
        run_kernel(path, partial(_make_sums, out.dtype), out, x, results, terms)
    return out


def _make_sums(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Return small arguments of sums, with two blocks of terms."""
    # A block has 4096 terms.
    x = _number(device, dtype, 5000, 3)
    return (torch.zeros_like(x[0]), x, [(1, 0), (3, 1)], [(1, 0), (5000, 3)])


def _accumulate(
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor | None,
    layout: Layout,
    pieces: Pieces,
    _: Any,
    include: bool,
) -> Any:
    """Compute ``exact_sums.accumulate`` by C."""
    kernel = find_kernel("place_sums", out)
    if kernel is None:
        return NotImplemented
    if not include:
        out.zero_()
    taps, batch, group, rows, inner, places, steps = layout
    sizes = (taps, batch, rows, inner)
    # Steps of 0 would be lost where numbers are converted.
    keys = keys.as_strided(sizes, steps, keys.storage_offset()).long()
    if weights is not None:
        weights = weights.as_strided(sizes, steps, weights.storage_offset())
        weights = out.new_empty_strided(sizes, keys.stride()).copy_(weights)
    # -0.0 leaves any term as it is, also another -0.0.
    sums = out.new_full((out.numel() * (pieces.number + 1),), -0.0, dtype=torch.float64)
    given = (keys, values.to(out.dtype), weights if weights is not None else 0, out, sums)
    cost = 16 * (taps * values.numel() + out.numel())
    count = batch * group * places
    run(kernel, count, cost, *pieces, *layout[:-1], *keys.stride(), *given)
    return None


natives[KERNEL] = _accumulate


def draw(key: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1), float32 or float64, on the CPU."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    kernel = find_kernel("draw", out)
    if kernel is None:
        return define_draws(key, out.numel(), dtype).view(out.shape)
    each = _COUNTERS * (4 if dtype == torch.float32 else 2)
    run(kernel, -(-out.numel() // each), 16 * out.numel(), key, out.numel(), out)
    return out


def define_draws(key: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1) of 24 or 53 bits, of Philox4x32-10.

    ``_COUNTERS`` counters give a block of words: the first words of all, then the second ones. A
    number of 53 bits takes a word of the first half of a block, and one of the second half.
    """
    each = _COUNTERS * (4 if dtype == torch.float32 else 2)
    size = -(-count // each)
    counter = torch.arange(size * _COUNTERS, device="cpu").view(size, _COUNTERS)
    x, y, z, w = counter & _MASK, counter >> 32, counter * 0, counter * 0
    first, second = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # The constants of Philox4x32 (Salmon et al., 2011), as torch has on CUDA: two multipliers
        # and two steps of the key. A product may pass 2**63; int64 wraps, and the mask removes the
        # sign that the shift brings in, so the upper 32 bits are those of the unsigned product.
        left, right = x * 0xD2511F53, z * 0xCD9E8D57
        x = ((right >> 32) & _MASK) ^ y ^ first
        z = ((left >> 32) & _MASK) ^ w ^ second
        y, w = right & _MASK, left & _MASK
        # After the words have used it: the first of the ten rounds has the key itself.
        first, second = (first + 0x9E3779B9) & _MASK, (second + 0xBB67AE85) & _MASK
    words = torch.stack([x, y, z, w], 1).flatten(1)
    if dtype == torch.float32:
        # As many bits as a float32 has: all 32 would be rounded, and the largest words to 1.0.
        drawn = (words >> 8).to(dtype) * 2.0**-24
    else:
        # 27 and 26 bits, together the 53 of a float64.
        high, low = (words[:, :each] >> 5).to(dtype), (words[:, each:] >> 6).to(dtype)
        drawn = (high * 2.0**26 + low) * 2.0**-53
    return drawn.flatten()[:count]
