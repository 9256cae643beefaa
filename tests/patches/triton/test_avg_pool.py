"""Kernels of average pooling, under Triton's interpreter: the bits of the torch ops."""

import torch
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

from lightning_d9m.patches.kernels import avg_pool
from lightning_d9m.patches.primitives.pooling_windows import count_outputs, read_windows


def compare_strided(
    shape: tuple[int, ...],
    window: tuple[object, ...],
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    image = torch.empty(shape, dtype=dtype)
    sides = [list(value) if isinstance(value, tuple) else [value] * 3 for value in window]
    outputs = [
        count_outputs(*side, ceil_mode=ceil_mode)
        for side in zip(shape[-3:], read_windows(3, *sides), strict=True)
    ]
    arguments = [*sides, ceil_mode, count_include_pad, divisor]
    gradient = torch.randn(*shape[:-3], *outputs).to(dtype)
    compare("avg_pool:strided", avg_pool.avg_pool3d_backward, gradient, image, *arguments)


@interpreted
def test_windows_of_a_fixed_stride() -> None:
    """Overlapping, with gaps, padded, one for each side, ceil_mode, as large as the input."""
    shape = (1, 2, 6, 7, 8)
    compare_strided(shape, (2, 2, 0))
    compare_strided(shape, (1, 3, 0))
    compare_strided(shape, (3, 2, 1), ceil_mode=True)
    compare_strided(shape, (3, 2, 1), ceil_mode=True, count_include_pad=False)
    compare_strided(shape, ((2, 3, 4), (1, 2, 3), (1, 0, 2)), count_include_pad=False)
    compare_strided(shape, ((6, 7, 8), (3, 4, 5), 0))
    compare_strided(shape, (7, 3, 3), divisor=-11)
    compare_strided(shape[1:], (3, 1, 1), divisor=5)
    compare_strided((1, 1, 1, 1, 1), (2, 1, 1))
    compare_strided((0, 3, 4, 4, 4), (2, 2, 0))


@interpreted
def test_windows_of_an_adaptive_pooling() -> None:
    """Sizes larger and smaller than the input, divisible and not, in 2 and 3 dimensions."""
    for sizes, outputs in ADAPTIVE_2D:
        compare(
            "avg_pool:adaptive",
            avg_pool.adaptive_avg_pool2d_backward,
            torch.randn(2, 2, *outputs),
            torch.empty(2, 2, *sizes),
        )
    for outputs in ADAPTIVE_3D:
        compare(
            "avg_pool:adaptive",
            avg_pool.adaptive_avg_pool3d_backward,
            torch.randn(3, *outputs),
            torch.empty(3, 4, 6, 5),
        )


@interpreted
def test_dtypes_and_layouts() -> None:
    """Half and bfloat16 are added in float32; the layout is that of torch's CUDA kernels."""
    for dtype in DTYPES:
        compare_strided((1, 1, 5, 6, 8), (3, 2, 1), ceil_mode=True, dtype=dtype)
    first, *others = select(GRADIENT_CASES, "adaptive_avg_pool")
    for dtype in DTYPES:
        compare_case(first, dtype)
    for case in [*others, *select(GRADIENT_CASES, "avg_pool3d-sides")]:
        compare_case(case)
