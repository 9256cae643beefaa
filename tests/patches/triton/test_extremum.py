"""The kernels of maxima and minima by index, under Triton's interpreter: the torch ops' bits."""

from unittest import mock

import torch
from patches.kernels.exact_cases import DTYPES, bits
from patches.triton.interpreted import interpreted, kernels_on_cpu, refuse
from torch import Tensor

from lightning_d9m.patches.kernels import index_reduce
from lightning_d9m.patches.triton import extremum, launch

SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 1e-7, -1e-7)


def compare_both(rows: Tensor, index: Tensor, source: Tensor, dim: int = 0) -> None:
    """Compare maxima and minima with those by torch ops, with and without the rows' values."""
    for reduce in ("amax", "amin"):
        for include_self in (True, False):

            def choose(reduce: str = reduce, include: bool = include_self) -> Tensor:
                out = rows.clone()
                update = index_reduce.index_reduce(
                    refuse, out, dim, index, source, reduce, include_self=include
                )
                update.write(out)
                return out

            expected = choose()
            with kernels_on_cpu(), launch.kernels_noted() as used:
                actual = choose()
            assert used == ["extremum:choose"]
            assert torch.equal(actual.isnan(), expected.isnan())
            assert torch.equal(bits(actual.nan_to_num(7)), bits(expected.nan_to_num(7)))


@interpreted
def test_every_pair_of_special_numbers() -> None:
    """Signed zeros, infinities, NaN, subnormals; of the row, and of values for it."""
    for dtype in DTYPES:
        numbers = torch.tensor(SPECIAL).to(dtype)
        pairs = torch.cartesian_prod(numbers, numbers)
        compare_both(pairs[:, :1], torch.arange(81), pairs[:, 1:])
        compare_both(
            torch.zeros(90, 1).to(dtype), torch.arange(81).repeat(2), pairs.t().reshape(-1, 1)
        )


@interpreted
def test_layouts_and_sizes() -> None:
    """Every dimension, strided, int32 keys, rows without a value, many rows for few values."""
    rows, source, index = torch.randn(6, 9, 3), torch.randn(6, 40, 3), torch.randint(0, 7, (40,))
    compare_both(rows, index, source, 1)
    compare_both(rows.half(), index.int(), source.half(), -2)
    compare_both(rows.transpose(0, 2), index, source.transpose(0, 2), 1)
    compare_both(torch.randn(6, 900, 3), index, source, 1)
    compare_both(torch.randn(5000), torch.randint(0, 5000, (9000,)), torch.randn(9000))


@interpreted
def test_a_thousand_orders_give_one_output() -> None:
    """Each order is a column."""
    for dtype in (torch.float32, torch.float64):
        values = torch.cat([torch.randn(15), torch.tensor(SPECIAL)]).to(dtype)
        orders = torch.stack([torch.randperm(24) for _ in range(1000)])
        index, rows = torch.zeros(24, dtype=torch.int64), torch.zeros(1, 1000, dtype=dtype)
        for kept in (24, 19):  # with and without NaN
            given = torch.where(orders < kept, orders, 0)
            extremum.choose(rows, index, values[given].t(), greatest=False, include_self=False)
            assert (bits(rows) == bits(rows[:, :1])).all()
            assert bool(rows.isnan().any()) == (kept == 24)


@interpreted
def test_offsets_of_64_bits() -> None:
    """The code for tensors of more than 2**31 elements, on small ones."""
    with mock.patch.object(extremum, "needs_int64", return_value=True):
        compare_both(torch.randn(5, 3), torch.randint(0, 5, (50,)), torch.randn(50, 3))
