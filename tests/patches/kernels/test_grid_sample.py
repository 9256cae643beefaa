"""Patched gradients of ``grid_sample`` and ``CTCLoss``: the answers of the original."""

import pytest
import torch

from lightning_d9m.patches.registration import patches_applied

CORNERS_AND_MASK = (False, [True, True])
NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("one_thread")


def test_grid_sample_where_no_integer_reaches() -> None:
    """A coordinate that is NaN touches no input and has no slope; an infinite one is padded.

    So on CUDA; torch's CPU kernel answers NaN, or reads outside of the input and crashes.
    """
    image = torch.randn(1, 2, 5, 6, requires_grad=True)
    grid = torch.rand(1, 1, 4, 2)
    grid[0, 0, 0, 0], grid[0, 0, 1, 1], grid[0, 0, 2] = NAN, INF, -INF
    grid.requires_grad_()
    for mode in (0, 1):
        for padding in (0, 1, 2):
            with patches_applied("CPU"):
                by_image, by_grid = torch.ops.aten.grid_sampler_2d_backward(
                    torch.ones(1, 2, 1, 4), image, grid, mode, padding, *CORNERS_AND_MASK
                )
            assert by_image.isfinite().all()
            assert by_grid.isfinite().all()
            assert by_grid[0, 0, 0, 0] == 0


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
