"""The kernels of ``put_`` and max unpooling, under Triton's interpreter: the torch ops' bits."""

from unittest import mock

import pytest
import torch
from patches.triton.comparison import DTYPES as FLOATS
from patches.triton.comparison import compare
from patches.triton.interpreted import interpreted, kernels_on_cpu, refuse
from torch import Tensor

from lightning_d9m.patches.kernels import put_unpool
from lightning_d9m.patches.triton import launch, put

# One of each size in bytes, and those with values that are not numbers.
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def write(target: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """Return a copy of the target after ``put_``."""
    out = target.clone()
    put_unpool.put(refuse, out, index, source).write(out)
    return out


def compare_put(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Compare the bits with those of the torch ops, and with those of torch's own kernel."""
    expected = write(target, index, source)
    with kernels_on_cpu(), launch.kernels_noted() as used:
        actual = write(target, index, source)
    assert used == ["put:put_last"]
    own = target.clone().put_(index, source)
    bits = [part.view(-1).view(torch.uint8) for part in (actual, expected, own)]
    assert torch.equal(bits[0], bits[1])
    if index.is_contiguous():  # else torch goes through memory
        assert torch.equal(bits[0], bits[2])


def compare_unpool(values: Tensor, places: Tensor, output_size: list[int]) -> None:
    op, more = put_unpool.max_unpool2d, ()
    if len(output_size) == 3:
        op, more = put_unpool.max_unpool3d, ([1] * 3, [0] * 3)
    compare("put:unpool", op, values, places, output_size, *more)


@interpreted
def test_the_last_value_of_a_place_is_written() -> None:
    """Many values for one place, places without one, negative and strided indices, one place."""
    for dtype in DTYPES:
        source = torch.randn(7, 9).mul(3).to(dtype)
        if dtype.is_floating_point:
            source[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0]).to(dtype)
        target, index = torch.ones(4, 5, dtype=dtype), torch.randint(-20, 20, (7, 9))
        compare_put(target, index, source)
        compare_put(target, index.t(), source.t())
    compare_put(torch.zeros(()), torch.tensor([0, -1, 0]), torch.tensor([1.0, 2.0, 3.0]))
    compare_put(torch.zeros(300), torch.randint(-300, 300, (5000,)), torch.randn(5000))


@interpreted
def test_every_order_of_the_places_keeps_the_last_value() -> None:
    """A thousand permutations of the values, whose places are known."""
    index = torch.randint(0, 6, (40,))
    orders = torch.stack([torch.randperm(40) for _ in range(1000)])
    places = (index[orders] + 6 * torch.arange(1000).view(-1, 1)).flatten()
    values = torch.arange(40.0).repeat(1000)
    found = torch.full((6000,), -1.0)
    with kernels_on_cpu():
        put.put_last(found, places, values)
    last = torch.full((6000,), -1.0).scatter_reduce_(0, places, values, "amax")
    assert torch.equal(found, last)


@interpreted
def test_offsets_of_64_bits() -> None:
    """The code for tensors of more than 2**31 elements, on small ones."""
    sizes = mock.patch.multiple(put, needs_int64=lambda *_: True, INT32_LIMIT=10)
    with sizes:
        compare_put(torch.zeros(9), torch.randint(-9, 9, (50,)), torch.randn(50))
        compare_unpool(torch.randn(2, 3, 4, 5), torch.randint(0, 12, (2, 3, 4, 5)), [6, 2])


@interpreted
def test_a_place_outside_is_an_error() -> None:
    """Nothing is written there; on a device the error comes later."""
    target = torch.zeros(3)
    for place in (3, -4, 2**40):
        with pytest.raises(RuntimeError):
            put.put_last(target, torch.tensor([0, place]), torch.ones(2))
    assert not target.any()


@interpreted
def test_few_values_are_sorted() -> None:
    """Marks for each place would take more memory than the values."""
    target, index, source = torch.zeros(900), torch.randint(0, 9, (50,)), torch.randn(50)
    with kernels_on_cpu(), launch.kernels_noted() as used:
        assert torch.equal(write(target, index, source), target.put(index, source))
    assert used == []


@interpreted
def test_the_last_value_of_a_place_in_a_plane_is_written() -> None:
    """Many values for one place, more places than values and fewer, without a batch, strided."""
    for dtype in FLOATS:
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
            put.unpool(torch.ones(1, 1, 1, 2), places, [2, 3])
    with kernels_on_cpu():
        assert put.unpool(torch.ones(1, 1, 1, 2), places.clamp(max=5), [2, 3]).sum() == 2
