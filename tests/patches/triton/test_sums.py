"""Kernels of exact sums, under Triton's interpreter: the bits of the torch ops."""

import torch
from patches.triton.interpreted import interpreted, kernels_on_cpu
from torch import Tensor

from lightning_d9m.patches.exact_sums import Layout, accumulate, plan_pieces

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 1e-300, -1e300])


def make(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return numbers of many magnitudes, some of them special ones."""
    values = torch.randn(shape, dtype=torch.float64)
    values *= (torch.rand(shape).double() * 200 - 100).exp2()
    rare = SPECIAL[torch.randint(0, len(SPECIAL), shape)].double()
    return torch.where(torch.rand(shape) < 0.05, rare, values).to(dtype)


def read_bits(values: Tensor) -> Tensor:
    """Return the bits of numbers, of NaNs one."""
    values = torch.where(values.isnan(), torch.nan, values)
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def lay_out(
    out: Tensor, index: Tensor, values: Tensor, weights: Tensor | None = None
) -> tuple[object, ...]:
    """Return terms, of an index that is the same along its sides of one element."""
    taps, *_ = index.shape
    steps = [
        step if size > 1 else 0 for size, step in zip(index.shape, index.stride(), strict=True)
    ]
    return index, values, weights, Layout(taps, *values.shape, out.shape[2], tuple(steps))


def compare(out: Tensor, part: tuple[object, ...], terms: int, *, include: bool) -> None:
    """Compare the bits by torch ops with those by the kernels."""
    expected, actual = out.clone(), out.clone()
    pieces = plan_pieces(out.dtype, terms)
    accumulate(expected, *part, pieces, include=include)
    with kernels_on_cpu("kernels:accumulate"):
        accumulate(actual, *part, pieces, include=include)
    assert torch.equal(read_bits(actual), read_bits(expected))


@interpreted
def test_every_dtype_and_shape_has_the_bits_of_the_torch_ops() -> None:
    """One place to a row, or to an element; skipped ones; of one and several pieces."""
    for number in range(48):
        dtype, include = DTYPES[number % 4], number % 8 < 4
        batch, group, rows, inner = torch.randint(1, 5, (4,)).tolist()
        rows, count = rows * 9, 1 + number % 6
        out, values = (
            make(dtype, batch, group, count, inner),
            make(dtype, batch, group, rows, inner),
        )
        shape = [size if (number >> bit) & 1 else 1 for bit, size in ((1, batch), (2, inner))]
        index = torch.randint(-count - 1, count + 1, (1 + number % 2, shape[0], rows, shape[1]))
        index = index.to((torch.int64, torch.int32)[number % 3 % 2])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weights = make(wide, *index.shape) if number % 5 == 0 else None
        terms = (rows * inner, 2**12, 2**24)[number % 3]
        compare(out, lay_out(out, index, values, weights), terms, include=include)


@interpreted
def test_nothing_is_added() -> None:
    """No values, or no value with a place: zeros, or what was there, bit by bit."""
    out = make(torch.float32, 1, 1, 9, 1)
    none = lay_out(out, torch.zeros(1, 1, 0, 1, dtype=torch.int64), torch.zeros(1, 1, 0, 1))
    outside = lay_out(out, torch.full((1, 1, 3, 1), 9), make(torch.float32, 1, 1, 3, 1))
    for part in (none, outside):
        for include in (True, False):
            compare(out, part, 4, include=include)
