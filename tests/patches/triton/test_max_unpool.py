"""The kernels of max unpooling, under Triton's interpreter: the values of the torch ops."""

import pytest
import torch
from patches.triton.comparison import DTYPES, compare
from patches.triton.interpreted import interpreted, kernels_on_cpu
from torch import Tensor

from lightning_d9m.patches.kernels import put_unpool
from lightning_d9m.patches.triton import max_unpool


def compare_unpool(values: Tensor, places: Tensor, output_size: list[int]) -> None:
    op, more = put_unpool.max_unpool2d, ()
    if len(output_size) == 3:
        op, more = put_unpool.max_unpool3d, ([1] * 3, [0] * 3)
    compare("max_unpool:unpool", op, values, places, output_size, *more)


@interpreted
def test_the_last_value_of_a_place_is_written() -> None:
    """Many values for one place, more places than values and fewer, without a batch, strided."""
    for dtype in DTYPES:
        values = torch.randn(2, 3, 4, 5).to(dtype)
        values[0, 0, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0], dtype=dtype)
        places = torch.randint(0, 12, values.shape)
        compare_unpool(values, places, [6, 2])
        compare_unpool(values[1], places[1], [9, 7])
        compare_unpool(values.transpose(2, 3), places.transpose(2, 3), [3, 4])
    compare_unpool(torch.randn(2, 2, 3, 2, 4), torch.randint(0, 30, (2, 2, 3, 2, 4)), [2, 3, 5])
    compare_unpool(torch.randn(0, 2, 3, 4), torch.zeros(0, 2, 3, 4, dtype=torch.int64), [2, 3])


@interpreted
def test_a_place_outside_its_plane_is_an_error() -> None:
    """Nothing is written there; on a device the error comes later."""
    for place in (-1, 6, 2**40):
        places = torch.tensor([[[[0, place]]]])
        with pytest.raises(RuntimeError):
            max_unpool.unpool(torch.ones(1, 1, 1, 2), places, [2, 3])
    with kernels_on_cpu():
        assert max_unpool.unpool(torch.ones(1, 1, 1, 2), places.clamp(max=5), [2, 3]).sum() == 2
