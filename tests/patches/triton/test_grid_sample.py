"""Kernels of grid sampling, under Triton's interpreter: equal bits for the image's gradient."""

import os

import torch
from patches.kernels.exact_cases import DTYPES, bits
from patches.triton.comparison import assert_close
from patches.triton.interpreted import interpreted, kernels_on_cpu, refuse
from torch import Tensor

from lightning_d9m.patches.kernels import grid_sample
from lightning_d9m.patches.triton import grid_sample as kernels
from lightning_d9m.patches.triton import launch

if os.environ.get("TRITON_INTERPRET") == "1":  # other tests of pytest's process compile kernels
    kernels._BLOCK = 1024
    kernels._PROGRAMS = 1  # all channels to a program, which is faster under the interpreter
BACKWARD = {2: grid_sample.grid_sampler_2d_backward, 3: grid_sample.grid_sampler_3d_backward}


def compare(
    gradient: Tensor, image: Tensor, grid: Tensor, *options: object, by_image: bool = True
) -> Tensor | None:
    """Compare with the torch ops: the bits of the image's gradient, the grid's within roundings."""
    arguments = (refuse, gradient, image, grid, *options, [by_image, True])
    backward = BACKWARD[image.dim() - 2]
    expected, expected_grid = backward(*arguments)
    with kernels_on_cpu(), launch.kernels_noted() as used:
        actual, actual_grid = backward(*arguments)
    assert used == ["grid_sample:differentiate"]
    assert actual_grid.stride() == expected_grid.stride()
    assert_close(actual_grid, expected_grid, 64)
    if by_image:
        assert actual.stride() == expected.stride()
        assert torch.equal(bits(actual), bits(expected)), options
    return actual


def make(dims: int, dtype: torch.dtype, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients, images and grids; some coordinates are whole, half, huge, or no numbers."""
    outputs = (5, 3, 2)[:dims]
    image = torch.randn(2, 2, *(4, 5, 3)[:dims]).to(dtype)
    grid = torch.randn(2, *outputs, dims) * spread
    flat = grid.view(-1)
    special = [0.0, 1.0, -1.0, 0.2, 0.5, 3.0, -7.0, 1e4, 1e30, torch.inf, -torch.inf, torch.nan]
    flat[: len(special)] = torch.tensor(special)
    return torch.randn(2, 2, *outputs).to(dtype), image, grid.to(dtype)


@interpreted
def test_every_mode_padding_and_dtype() -> None:
    """In 2 and 3 dimensions, with samples inside and outside."""
    variants = [(0, 2, 0, False), (0, 2, 1, True), (0, 2, 2, False), (0, 2, 2, True)]
    variants += [(1, 2, 0, True), (1, 3, 2, False), (2, 2, 2, False), (0, 3, 1, False)]
    for number, (mode, dims, padding, corners) in enumerate(variants):
        compare(*make(dims, DTYPES[number % 4], 1.5), mode, padding, corners)
    for padding, corners in ((1, True), (2, False)):
        compare(*make(2, torch.float32, 40.0), 0, padding, corners)


@interpreted
def test_layouts_and_sizes() -> None:
    """Strided and expanded; one pixel; one sample many times; no gradient of the image."""
    gradient, image, grid = make(2, torch.float32, 0.7)
    channels_last = image.to(memory_format=torch.channels_last)
    compare(gradient, channels_last, grid.transpose(1, 2).contiguous().transpose(1, 2), 0, 0, False)
    compare(torch.ones(()).expand(gradient.shape), image, grid, 0, 1, True)
    for padding in (0, 2):
        compare(gradient, image[..., :1, :1], grid, 0, padding, True)
    same = torch.full((2, 40, 1, 2), 0.3)
    compare(torch.randn(2, 2, 40, 1), image, same, 0, 0, False)
    assert compare(gradient, image, grid, 0, 0, False, by_image=False) is None


@interpreted
def test_the_order_of_the_samples_has_no_effect() -> None:
    """On the image's gradient; nor has the number of programs."""
    gradient, image, grid = make(2, torch.float32, 0.7)
    kernels._PROGRAMS = 4096
    first = compare(gradient, image, grid, 0, 1, False)
    kernels._PROGRAMS = 1
    for _ in range(3):
        order = torch.randperm(15)
        mixed = gradient.view(2, 2, 15)[..., order].view_as(gradient)
        moved = grid.view(2, 15, 2)[:, order].view_as(grid)
        assert torch.equal(bits(compare(mixed, image, moved, 0, 1, False)), bits(first))


@interpreted
def test_cudnns_variant() -> None:
    """Bilinear with zeros outside and aligned corners."""
    gradient, image, grid = make(2, torch.float32, 1.0)
    expected = grid_sample.cudnn_grid_sampler_backward(refuse, image, grid, gradient)
    with kernels_on_cpu():
        actual = grid_sample.cudnn_grid_sampler_backward(refuse, image, grid, gradient)
    assert torch.equal(bits(actual[0]), bits(expected[0]))
    assert_close(actual[1], expected[1], 64)
