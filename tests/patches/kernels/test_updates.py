"""Updates by an index where other tests do not look: shared memory, memory, half precision."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from patches.cases import deterministic_algorithms
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_d9m.ops.patches.kernels import updates
from lightning_d9m.ops.patches.registration import patches_applied

pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce.* is in beta"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
]
INDEX = torch.tensor([0, 1, 1])
NAN, INF = float("nan"), float("inf")

APART: dict[str, Callable[[Tensor], object]] = {
    "index_add_": lambda x: x[:3].index_add_(0, INDEX, x[3:]),
    "scatter_reduce_": lambda x: x[:3].scatter_reduce_(0, INDEX, x[3:], "prod"),
    "put_": lambda x: x[:3].put_(INDEX, x[3:]),
    "out-self": lambda x: torch.index_reduce(x[:3], 0, INDEX, x[3:], "prod", out=x[:3]),
}


def test_half_is_rounded_once() -> None:
    """Losses and products of half precision, which torch rounds after each term."""
    scores, target = torch.randn(2, 5, 4, 3).half(), torch.randint(0, 5, (2, 4, 3))
    low, index = torch.full((1,), 1.1, dtype=torch.half), torch.zeros(6, dtype=torch.int64)
    with patches_applied("CPU"):
        loss = nnf.nll_loss(scores, target)
        products = [
            low.index_reduce(0, index, low.expand(6), "prod"),
            low.scatter_reduce(0, index, low.expand(6), "prod"),
        ]
    reference = nnf.nll_loss(scores.double(), target)
    assert abs(loss.double() - reference) <= torch.finfo(torch.half).eps * abs(reference)
    for product in products:
        assert torch.equal(product, low.float().pow(7).half())


@pytest.mark.parametrize("name", APART)
def test_parts_of_one_storage_that_do_not_meet_are_taken(name: str) -> None:
    """Both halves of a buffer."""
    expected = APART[name](torch.arange(1.0, 7))
    with patches_applied("CPU"):
        assert torch.equal(APART[name](torch.arange(1.0, 7)), expected)


def test_places_without_a_value_keep_their_bits() -> None:
    """Also next to an infinite factor, and a negative zero."""
    target = torch.tensor([-0.0, 2.0, -0.0])
    with patches_applied("CPU"):
        added = target.index_add(0, torch.tensor([1]), torch.ones(1), alpha=float("inf"))
        summed = target.scatter_add(0, torch.tensor([1]), torch.ones(1))
    for result, value in ((added, float("inf")), (summed, 3.0)):
        assert result.tolist() == [0.0, value, 0.0]
        assert result.signbit().tolist() == [True, False, True]


@settings(deadline=None, max_examples=60)
@given(
    keys=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    count=st.sampled_from([7, 1000]),
    include_self=st.booleans(),
    rest=st.sampled_from([(), (2,)]),
)
def test_products_have_the_bits_of_a_loop(
    keys: list[int], count: int, include_self: bool, rest: tuple[int, ...]
) -> None:
    """From first to last, with more places than values and with fewer."""
    draws = torch.Generator().manual_seed(len(keys))
    target, values = (torch.randn(rows, *rest, generator=draws) for rows in (count, len(keys)))
    expected, seen = target.clone(), set()
    for key, value in zip(keys, values, strict=True):
        expected[key] = expected[key] * value if include_self or key in seen else value
        seen.add(key)
    with patches_applied("CPU"):
        target.index_reduce_(0, torch.tensor(keys), values, "prod", include_self=include_self)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_grid_sample_where_no_integer_reaches(mode: int, padding: int) -> None:
    """A coordinate that is NaN touches no input and has no slope; an infinite one is padded.

    So on CUDA; torch's CPU kernel answers NaN, or reads outside of the input and crashes.
    """
    grid = torch.rand(1, 1, 4, 2)
    grid[0, 0, 0, 0], grid[0, 0, 1, 1], grid[0, 0, 2] = NAN, INF, -INF
    given = (torch.ones(1, 2, 1, 4), torch.randn(1, 2, 5, 6), grid, mode, padding)
    with patches_applied("CPU"):
        both = torch.ops.aten.grid_sampler_2d_backward(*given, False, [True, True])
    assert all(bool(one.isfinite().all()) for one in both)
    assert both[1][0, 0, 0, 0] == 0


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_grid_sample_has_the_slopes_of_torch_at_the_first_and_the_last_pixel(padding: int) -> None:
    places = torch.tensor([-1.0, 0.2, 1.0])
    grid = torch.cartesian_prod(places, places)[None, None]
    given = (torch.ones(1, 2, 1, 9), torch.randn(1, 2, 5, 6), grid, 0, padding, True)
    backward = torch.ops.aten.grid_sampler_2d_backward
    expected = backward(*given, [True, True])[1]
    with patches_applied("CPU"):
        torch.testing.assert_close(backward(*given, [True, True])[1], expected)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("mask", [[True, True], [False, True]])
@pytest.mark.parametrize("empty", ["batch", "channels", "outputs"])
def test_grid_sample_of_nothing_has_zero_gradients(empty: str, mask: list[bool], dims: int) -> None:
    """As a detector without proposals; torch's CPU kernel leaves the image's gradient to chance."""
    batch, channels = (0 if empty == name else 2 for name in ("batch", "channels"))
    sizes, outputs = (5, 6, 4)[:dims], (0 if empty == "outputs" else 4, *(7, 3)[: dims - 1])
    image, grid = torch.randn(batch, channels, *sizes), torch.randn(batch, *outputs, dims)
    backward = getattr(torch.ops.aten, f"grid_sampler_{dims}d_backward")
    gradient = torch.randn(batch, channels, *outputs)
    with patches_applied("CPU"):
        by_image, by_grid = backward(gradient, image, grid, 0, 0, False, mask)
    assert torch.equal(by_grid, torch.zeros_like(grid))
    assert torch.equal(by_image, torch.zeros_like(image)) if mask[0] else by_image is None


LARGE_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, index: x.index_add(0, index, x[:6]),
    "index_put": lambda x, index: x.index_put((index,), x[:6], accumulate=True),
    "scatter_add": lambda x, index: x.scatter_add(0, index[:, None].expand(6, 9), x[:6]),
    "scatter": lambda x, index: x.scatter(0, index[:, None].expand(6, 9), x[:6], reduce="add"),
}


@pytest.mark.parametrize("add", LARGE_SUMS.values(), ids=LARGE_SUMS)
def test_a_large_sum_is_torchs_where_that_needs_less_memory(add, monkeypatch) -> None:
    """An index for each row, not one for each element; and only with the flag on."""
    x, index = torch.randn(8, 9), torch.zeros(6, dtype=torch.int64)
    x[0] = 1e8 * torch.randn(9)  # torch rounds after each term
    expected = add(x, index)
    monkeypatch.setattr(updates, "_MUCH", 100)
    with patches_applied("CPU"):
        exact = add(x, index)
    with patches_applied("CPU"), deterministic_algorithms():
        found = add(x, index)
    assert not torch.equal(exact, expected)
    one_index = add in {LARGE_SUMS["index_add"], LARGE_SUMS["index_put"]}
    assert torch.equal(found, expected if one_index else exact)


@pytest.mark.parametrize(("dims", "mode", "most"), [(2, 0, 90), (3, 0, 132), (2, 2, 106)])
def test_sampling_starts_few_operations_whatever_the_number_of_neighbors(dims, mode, most) -> None:
    """Each may be a kernel on a device; those that only make views are not counted."""

    class Count(TorchDispatchMode):
        started = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            self.started += not func.is_view and "empty" not in str(func)
            return found

    image, grid = torch.randn(1, 3, *[6] * dims), torch.rand(1, *[5] * dims, dims)
    gradient = torch.ones(1, 3, *[5] * dims)
    with pytest.MonkeyPatch.context() as patch, Count() as counted:
        patch.setattr(updates, "accumulate", lambda *_, **__: None)
        updates._sample_backward(gradient, image, grid, mode, 0, False, (True, True), dims=dims)
    assert 20 < counted.started <= most
    expected = updates._sample_backward(
        gradient, image, grid, mode, 0, False, (True, True), dims=dims
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "_GATHERED", 1)  # one neighbor after the other
        found = updates._sample_backward(
            gradient, image, grid, mode, 0, False, (True, True), dims=dims
        )
    assert all(map(torch.equal, found, expected))
