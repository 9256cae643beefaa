"""Gradients of ``grid_sample``: where no integer reaches, at the border, of nothing, far away."""

import pytest
import torch

from lightning_d9m.ops.patches.registration import patches_applied

NAN, INF = float("nan"), float("inf")


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


@pytest.mark.parametrize("corners", [True, False])
def test_far_coordinates_are_reflected_as_torch_reflects_them(corners: bool) -> None:
    """By exact remainders, also of a thousand turns and of a quotient that is rounded up."""
    near, turns = torch.rand(40), torch.arange(40) * 25 - 500
    ends = torch.tensor([-1.0, 1.0]).nextafter(torch.tensor([0.0, 2.0]))
    x = torch.cat([near + turns, ends, ends * 301])
    grid = torch.stack([x, x.flip(0)], -1)[None, None]
    given = (torch.ones(1, 2, 1, len(x)), torch.randn(1, 2, 7, 3), grid, 0, 2, corners)
    backward = torch.ops.aten.grid_sampler_2d_backward
    expected = backward(*given, [True, True])
    with patches_applied("CPU"):
        found = backward(*given, [True, True])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
