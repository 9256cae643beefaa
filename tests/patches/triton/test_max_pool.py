"""Kernels of max pooling, under Triton's interpreter: the bits of the torch ops."""

import itertools

import torch
import torch.nn.functional as nnf
from patches.cases import GRADIENT_CASES
from patches.triton.comparison import (
    ADAPTIVE_2D,
    ADAPTIVE_3D,
    DTYPES,
    compare,
    compare_case,
    select,
)
from patches.triton.interpreted import interpreted
from torch import Tensor

from lightning_d9m.patches.kernels import max_pool


def make_image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def compare_strided(image: Tensor, *window: object, ceil_mode: bool = False) -> None:
    size, stride, padding, dilation = window
    output, indices = nnf.max_pool3d_with_indices(image, size, stride, padding, dilation, ceil_mode)
    sides = [value if isinstance(value, tuple) else (value,) * 3 for value in window]
    compare(
        "max_pool:strided",
        max_pool.max_pool3d_backward,
        torch.randn_like(output),
        image,
        *sides,
        ceil_mode,
        indices,
    )


@interpreted
def test_windows_of_a_fixed_stride() -> None:
    """Overlapping, with gaps, padded, dilated, one for each side, ceil_mode."""
    image = make_image(1, 2, 6, 7, 8)
    for window in [
        (3, 2, 1, 1),
        (1, 3, 0, 1),
        (2, 3, 1, 1),
        (3, 1, 1, 2),
        (2, 3, 1, 3),
        ((2, 3, 4), (1, 2, 3), (1, 0, 2), (1, 2, 1)),
        ((6, 7, 8), (3, 4, 5), 0, 1),
        (7, 3, 3, 1),
    ]:
        compare_strided(image, *window, ceil_mode=True)
    compare_strided(image, 3, 2, 1, 1)
    compare_strided(image[0], 3, 2, 1, 1)
    compare_strided(make_image(1, 1, 1, 1, 1), 2, 1, 1, 1)
    compare_strided(make_image(0, 3, 4, 4, 4), 2, 2, 0, 1)


@interpreted
def test_windows_of_an_adaptive_pooling() -> None:
    """Sizes larger and smaller than the input, divisible and not, in 2 and 3 dimensions."""
    for sizes, outputs in ADAPTIVE_2D:
        image = make_image(2, 2, *sizes)
        output, indices = nnf.adaptive_max_pool2d_with_indices(image, outputs)
        grad_output = torch.randn_like(output)
        compare(
            "max_pool:adaptive",
            max_pool.adaptive_max_pool2d_backward,
            grad_output,
            image,
            indices,
        )
    image = make_image(2, 3, 4, 6, 5)
    for sides in ADAPTIVE_3D:
        output, indices = nnf.adaptive_max_pool3d_with_indices(image, sides)
        compare(
            "max_pool:adaptive",
            max_pool.adaptive_max_pool3d_backward,
            torch.randn_like(output),
            image,
            indices,
        )


@interpreted
def test_windows_of_a_fractional_pooling() -> None:
    """For random and extreme samples, negative ones too."""
    planes = torch.linspace(0, 1 - 2**-24, 12).view(1, 6, 2), torch.rand(1, 6, 2) * -9
    for (shape, size, outputs), samples in itertools.product(
        [
            ((9, 8), (1, 2), (4, 7)),
            ((5, 17), (2, 3), (4, 6)),
            ((6, 6), (3, 6), (1, 1)),
            ((3, 30), (2, 2), (1, 11)),
        ],
        planes,
    ):
        image = make_image(1, 6, *shape)
        output, indices = nnf.fractional_max_pool2d_with_indices(
            image, size, outputs, _random_samples=samples
        )
        compare(
            "max_pool:fractional",
            max_pool.fractional_max_pool2d_backward,
            torch.randn_like(output),
            image,
            list(size),
            list(outputs),
            indices,
        )
    image = make_image(3, 6, 7, 5)
    output, indices = nnf.fractional_max_pool3d_with_indices(image, (2, 3, 2), (4, 3, 3))
    compare(
        "max_pool:fractional",
        max_pool.fractional_max_pool3d_backward,
        torch.randn_like(output),
        image,
        [2, 3, 2],
        [4, 3, 3],
        indices,
    )


@interpreted
def test_dtypes_and_layouts() -> None:
    """Half and bfloat16 are added in float32; the layout is that of torch's CUDA kernels."""
    first, *others = [
        case
        for case in select(GRADIENT_CASES, "max_pool")
        if case.label != "fractional_max_pool3d"  # many windows to visit, interpreted slowly
    ]
    for dtype in DTYPES:
        compare_case(first, dtype)
    for case in others:
        compare_case(case)
