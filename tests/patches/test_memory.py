"""Ops that write in place: parts of one storage, and sums that are cut into slices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_d9m.patches import exact_sums
from lightning_d9m.patches.kernels import separable
from lightning_d9m.patches.registration import patches_applied

LEGACY = "ignore:(index_reduce.* is in beta|The reduce argument of torch.scatter)"
INDEX = torch.tensor([0, 1, 1])

APART: dict[str, Callable[[Tensor], object]] = {
    "index_add_": lambda x: x[:3].index_add_(0, INDEX, x[3:]),
    "scatter_reduce_": lambda x: x[:3].scatter_reduce_(0, INDEX, x[3:], "prod"),
    "put_": lambda x: x[:3].put_(INDEX, x[3:]),
    "out-self": lambda x: torch.index_reduce(x[:3], 0, INDEX, x[3:], "prod", out=x[:3]),
}


@pytest.mark.filterwarnings(LEGACY)
@pytest.mark.parametrize("name", APART)
def test_parts_of_one_storage_that_do_not_meet_are_taken(name: str) -> None:
    """Both halves of a buffer."""
    expected = APART[name](torch.arange(1.0, 7))
    with patches_applied("CPU"):
        assert torch.equal(APART[name](torch.arange(1.0, 7)), expected)


def test_torch_ops_work_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is as large as all terms, or as the gradients that all taps read: same bits."""
    gradient, grid = torch.randn(1, 40, 5, 6), torch.rand(1, 5, 6, 2) * 2 - 1
    backward = torch.ops.aten.grid_sampler_2d_backward
    columns = torch.arange(1200).view(300, 4) % 3
    calls: list[Callable[[], Tensor]] = [
        lambda: backward(gradient, torch.zeros(1, 40, 3, 4), grid, 0, 0, False, [True, False])[0],
        lambda: torch.ops.aten.upsample_bicubic2d_backward(gradient, [5, 6], [1, 40, 3, 4], False),
        # Few rows, and much in each or many of them.
        lambda: torch.ones(4, 300).index_add(0, torch.tensor([1, 1]), gradient.view(4, 300)[:2]),
        lambda: torch.ones(300, 4).scatter_add(1, columns, gradient.view(300, 4)),
    ]
    with patches_applied("CPU"):
        whole = [call() for call in calls]
        monkeypatch.setattr(exact_sums, "_SLICE", 120)
        monkeypatch.setattr(separable, "_SOME", 120)
        found = []
        run = exact_sums.cut_terms
        monkeypatch.setattr(
            exact_sums, "cut_terms", lambda *args: found.append(len(args[0])) or run(*args)
        )
        for call, expected in zip(calls, whole, strict=True):
            assert torch.equal(call(), expected)
    assert max(found) <= 120


def test_places_without_a_value_keep_their_bits() -> None:
    """Also next to an infinite factor, and a negative zero."""
    target = torch.tensor([-0.0, 2.0, -0.0])
    with patches_applied("CPU"):
        added = target.index_add(0, torch.tensor([1]), torch.ones(1), alpha=float("inf"))
        summed = target.scatter_add(0, torch.tensor([1]), torch.ones(1))
    for result, value in ((added, float("inf")), (summed, 3.0)):
        assert result.tolist() == [0.0, value, 0.0]
        assert result.signbit().tolist() == [True, False, True]
