"""Kernels of interpolation, under Triton's interpreter: the results of the torch ops."""

from unittest import mock

import torch
from patches.cases import GRADIENT_CASES
from patches.triton.comparison import DTYPES, compare, compare_case, select
from patches.triton.interpreted import interpreted
from torch import Tensor

from lightning_d9m.patches.kernels import interpolation
from lightning_d9m.patches.triton import input_gradient

# Units of rounding of the greatest gradient: the torch ops may fuse a product with its sum.
ROUNDINGS = 16
OPS = {1: ("linear1d",), 2: ("bilinear2d", "bicubic2d"), 3: ("trilinear3d",)}
FILTERS = ("bilinear2d_aa", "bicubic2d_aa", "lanczos2d_aa")


def compare_sizes(
    name: str,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    align_corners: bool = False,
    *scales: float | None,
    dtype: torch.dtype = torch.float32,
    roundings: int = ROUNDINGS,
) -> Tensor:
    gradient = torch.randn(2, 2, *outputs, dtype=torch.promote_types(dtype, torch.float32))
    return compare(
        "interpolation:resampled",
        getattr(interpolation, f"{name}_backward"),
        gradient.to(dtype),
        list(outputs),
        [2, 2, *inputs],
        align_corners,
        *scales,
        tolerance=roundings if dtype.itemsize > 2 else 1,
    )


@interpreted
def test_sizes_along_one_dimension() -> None:
    """All pairs of small sizes, with aligned corners and without, linear and cubic."""
    for inputs in (1, 2, 3, 5):
        for outputs in (1, 2, 3, 8):
            compare_sizes("linear1d", (inputs,), (outputs,), align_corners=inputs % 2 == 0)
            compare_sizes("bicubic2d", (inputs, 2), (outputs, 2), align_corners=outputs % 2 == 0)
    for inputs, outputs in ((60, 64), (97, 200)):
        compare_sizes("linear1d", (inputs,), (outputs,))
        compare_sizes("linear1d", (inputs,), (outputs,), align_corners=True)


@interpreted
def test_scale_factors() -> None:
    """Given by the user: not the quotient of the sizes, even far from it."""
    for scale in (2.0, 2.3, 0.4, 7.7, 0.2, 30.0, -1.0):
        compare_sizes("linear1d", (5,), (11,), False, scale, roundings=99)
        compare_sizes("bicubic2d", (4, 5), (2, 11), False, None, scale)


@interpreted
def test_many_dimensions() -> None:
    """Enlarged and reduced at once, in 2 and 3 dimensions."""
    for names in OPS.values():
        for name in names:
            dims = int(name[-2])
            compare_sizes(name, (3, 6, 2)[:dims], (5, 2, 4)[:dims])
            compare_sizes(name, (3, 2, 4)[:dims], (6, 3, 2)[:dims], align_corners=True)
            assert not compare(
                "interpolation:resampled",
                getattr(interpolation, f"{name}_backward"),
                torch.empty(0, 2, *(4, 4, 4)[:dims]),
                [4] * dims,
                [0, 2, *[2] * dims],
                False,
            ).numel()


@interpreted
def test_great_factors_take_a_launch_for_each_dimension() -> None:
    """One thread for an input would read all outputs; the bits are the same in both ways."""
    for name, inputs in (("bilinear2d", (1, 2)), ("bicubic2d", (2, 2)), ("bicubic2d_aa", (2, 2))):
        for dtype in (torch.float32, torch.float16):
            results = []
            for most in (3, 1000):
                torch.manual_seed(1)
                with mock.patch.object(input_gradient, "_MOST_READS", most):
                    results.append(compare_sizes(name, inputs, (4, 6), dtype=dtype))
            assert torch.equal(*results)


@interpreted
def test_antialiasing() -> None:
    """Enlarged and reduced, by much and by little; aligned corners change the step."""
    for name in FILTERS:
        compare_sizes(name, (9, 4), (4, 7))
        compare_sizes(name, (2, 17), (5, 3), align_corners=True)
        compare_sizes(name, (3, 1), (3, 2), False, 1.7, 0.9)


@interpreted
def test_dtypes_and_layouts() -> None:
    """Half and bfloat16 are added in float32; the layout is that of torch's CUDA kernels."""
    for dtype in DTYPES:
        compare_sizes("bilinear2d", (4, 3), (6, 5), dtype=dtype)
        compare_sizes("bicubic2d_aa", (4, 3), (3, 5), dtype=dtype)
    for case in select(GRADIENT_CASES, "bilinear-one", "bilinear-antialiased", "bicubic-corners"):
        compare_case(case, tolerance=ROUNDINGS)
