"""Coordinates and offsets of kernels, also beyond 32 bits."""

from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from patches.cases import GRADIENT_CASES
from patches.triton.comparison import compare_case, select
from patches.triton.interpreted import interpreted

from lightning_d9m.patches.triton import input_gradient
from lightning_d9m.patches.triton.input_gradient import as_divisor

NUMBERS = st.integers(1, 2**31 - 1)


@given(number=st.integers(0, 2**31 - 1), divisor=NUMBERS)
def test_a_product_and_a_shift_divide(number: int, divisor: int) -> None:
    """For numbers just below and at a multiple as well; the product fits into 64 bits."""
    multiple = number - number % divisor
    _, factor, shift = as_divisor(divisor)
    assert -(2**31) <= factor < 2**31
    for dividend in (number, multiple, max(multiple - 1, 0), 2**31 - 1):
        product = dividend * (factor % 2**32)
        assert product < 2**64
        assert product >> shift == dividend // divisor


@interpreted
def test_coordinates_beyond_32_bits() -> None:
    """As NumPy unravels offsets, with the channels second and last, in 1 to 3 dimensions."""
    from patches.triton.coordinates import write_coordinates

    shape = (7, 300, 70, 500, 900)  # batch, channels, depth, height, width
    for first in (0, 2**31 - 40, 2**31, 2**32 - 10, 5 * 10**10):
        for dims in (1, 2, 3):
            sizes = [*shape[:2], *[1] * (3 - dims), *shape[5 - dims :]]
            for channels_last in (False, True):
                order = [0, 2, 3, 4, 1] if channels_last else [0, 1, 2, 3, 4]
                result = torch.empty(32, 5, dtype=torch.int64)
                write_coordinates[(1,)](
                    result,
                    first,
                    tuple(map(as_divisor, sizes[1:])),
                    DIMS=dims,
                    CHANNELS_LAST=channels_last,
                    BLOCK=32,
                )
                offsets = first + np.arange(32)
                inner = [sizes[dim] for dim in order[1:]]
                batch, rest = np.divmod(offsets, np.prod(inner))
                expected = np.stack([batch, *np.unravel_index(rest, inner)])
                actual = result.numpy().T[order]
                assert (actual == expected).all(), (first, dims, channels_last)


@interpreted
def test_kernels_with_offsets_of_64_bits() -> None:
    """The code for large tensors gives the same results on small ones."""
    labels = ("avg_pool3d-sides", "adaptive_max_pool2d-up", "max_pool3d-dilated")
    others = ("adaptive_avg_pool2d-odd", "reflection2d-crop", "replication1d")
    with mock.patch.object(input_gradient, "needs_int64", return_value=True) as asked:
        for label in (*labels, *others, "fractional_max_pool2d"):
            (case,) = (case for case in select(GRADIENT_CASES, label) if case.label == label)
            compare_case(case)
        for case in select(GRADIENT_CASES, "linear-corners", "bicubic-antialiased"):
            compare_case(case, tolerance=16)
    assert asked.called
