"""Kernels of padding, under Triton's interpreter: the results of the torch ops."""

from unittest import mock

import torch
from patches.cases import GRADIENT_CASES
from patches.triton.comparison import DTYPES, compare, compare_case, select
from patches.triton.interpreted import interpreted
from torch import Tensor

from lightning_d9m.patches.kernels import padding
from lightning_d9m.patches.triton import input_gradient

OPS = {"reflected": "reflection", "replicated": "replication"}


def compare_padding(
    kind: str, shape: tuple[int, ...], *sides: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compare for paddings of the last dimensions, two numbers each, the last dimension first."""
    dims = len(sides) // 2
    padded = list(shape)
    for back in range(dims):
        padded[-1 - back] += sides[2 * back] + sides[2 * back + 1]
    return compare(
        f"padding:{kind}",
        getattr(padding, f"{OPS[kind]}_pad_backward"),
        torch.randn(padded, dtype=torch.promote_types(dtype, torch.float32)).to(dtype),
        torch.empty(shape, dtype=dtype),
        list(sides),
    )


@interpreted
def test_reflections() -> None:
    """In 1 to 3 dimensions: none, on one side, on both, as wide as can be, cut off, no batch."""
    for sides in [(0, 0), (3, 0), (0, 4), (4, 4), (2, -3), (-3, 1), (-4, 0)]:
        compare_padding("reflected", (2, 3, 5), *sides)
    compare_padding("reflected", (3, 1), 0, 0)
    compare_padding("reflected", (2, 3, 4, 5), 2, 4, 3, 1)
    compare_padding("reflected", (2, 4, 5), -1, 4, 3, -2)
    compare_padding("reflected", (2, 2, 4, 3, 5), 4, 2, 2, 1, 0, 3)
    compare_padding("reflected", (0, 2, 4, 5), 1, 1, 1, 1)


@interpreted
def test_replications() -> None:
    """In 1 to 3 dimensions: none, wide, cut off up to the last input, of one input, no batch."""
    for sides in [(0, 0), (9, 0), (0, 7), (4, 4), (2, -3), (-3, 1), (-4, 2), (-6, 8), (8, -6)]:
        compare_padding("replicated", (2, 3, 5), *sides)
    compare_padding("replicated", (3, 1), 2, 3)
    compare_padding("replicated", (2, 3, 4, 1), 2, 4, 3, 1)
    compare_padding("replicated", (2, 4, 5), -1, 4, 3, -2)
    compare_padding("replicated", (2, 2, 4, 3, 5), 1, 2, 2, 1, 0, 3)
    compare_padding("replicated", (0, 2, 4, 5), 9, 9, 9, 9)


@interpreted
def test_wide_replications_take_a_launch_for_each_dimension() -> None:
    """One thread for a corner would add all its copies; the bits are the same in both ways."""
    for dtype in (torch.float32, torch.float16, torch.complex64):
        torch.manual_seed(1)
        with mock.patch.object(input_gradient, "_MOST_READS", 3):
            lines = compare_padding("replicated", (1, 2, 3, 2, 4), 6, 2, 0, 2, 3, 3, dtype=dtype)
        torch.manual_seed(1)
        with mock.patch.object(input_gradient, "_MOST_READS", 1000):
            once = compare_padding("replicated", (1, 2, 3, 2, 4), 6, 2, 0, 2, 3, 3, dtype=dtype)
        assert torch.equal(lines, once)
        compare_padding("replicated", (2, 3, 5, 4), 9, 2, 0, 13, dtype=dtype)


@interpreted
def test_dtypes_and_layouts() -> None:
    """Real and complex; the layout is that of torch's CUDA kernels."""
    for dtype in (*DTYPES, torch.complex64, torch.complex128):
        compare_padding("reflected", (2, 3, 4, 5), 2, 4, 3, 1, dtype=dtype)
        compare_padding("replicated", (2, 3, 4, 5), 2, 4, 3, 1, dtype=dtype)
    for case in select(GRADIENT_CASES, "reflection2d-crop", "replication2d"):
        compare_case(case)


@interpreted
def test_conjugates() -> None:
    """A gradient that torch has only marked as conjugate."""
    gradient = torch.randn(2, 3, 9, dtype=torch.complex64)
    image = torch.empty(2, 3, 5, dtype=torch.complex64)
    replacement = padding.reflection_pad_backward
    compare("padding:reflected", replacement, gradient.conj(), image, [2, 2])
