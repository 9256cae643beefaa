"""Comparisons of kernels of input gradients with the torch ops of their replacements."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from patches.cases import GradientCase, compute_gradient, make_inputs
from patches.triton.interpreted import kernels_on_cpu, refuse
from torch import Tensor

from lightning_d9m.patches.triton import launch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Sizes of inputs and outputs of adaptive poolings: larger and smaller, divisible and not.
ADAPTIVE_2D = [
    ((1, 7), (5, 1)),
    ((2, 3), (7, 2)),
    ((5, 6), (5, 3)),
    ((7, 8), (3, 5)),
    ((3, 4), (11, 8)),
    ((9, 10), (8, 9)),
]
ADAPTIVE_3D = [(1, 1, 1), (2, 3, 4), (9, 13, 2)]


def compare(
    path: str, replacement: Callable[..., Tensor], *args: Any, tolerance: float = 0.0
) -> Tensor:
    """Compare a kernel with the torch ops of its replacement.

    Args:
        path: The kernel that must be used.
        replacement: The function of the catalog.
        *args: Its arguments after torch's kernel.
        tolerance: The allowed difference in units of rounding of the greatest finite magnitude; an
            infinity may be a NaN. 0: equal values; a NaN equals a NaN.

    Returns:
        The kernel's result.
    """
    expected = replacement(refuse, *args)
    with kernels_on_cpu(), launch.kernels_noted() as used:
        actual = replacement(refuse, *args)
    assert used == [path], used
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride(), (actual.stride(), expected.stride())
    assert_close(actual, expected, tolerance)
    return actual


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare values; see :func:`compare`."""
    if tolerance:
        nan = torch.full_like(actual, torch.nan)
        actual, expected = (torch.where(x.isfinite(), x, nan) for x in (actual, expected))
    finite = expected.nan_to_num(0, 0, 0).abs()
    eps = torch.finfo(expected.dtype).eps
    bound = tolerance * eps * float(finite.max()) if finite.numel() and tolerance else 0
    # The interpreter truncates to bfloat16, which devices round to.
    relative = eps if expected.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(actual, expected, rtol=relative, atol=bound, equal_nan=True)


def compare_case(
    case: GradientCase, dtype: torch.dtype = torch.float32, tolerance: float = 0
) -> None:
    """Compare a gradient by a kernel with that by torch ops.

    In four layouts: as they come, strided, expanded, and channels_last; the last one with what is
    not finite.
    """
    image, gradient = make_inputs(case, dtype)
    wide = torch.zeros(*gradient.shape, 2, dtype=dtype)
    wide[..., 1] = gradient
    layouts = [
        (image, gradient),
        (image, wide[..., 1]),
        (image, torch.ones((), dtype=dtype).expand(gradient.shape)),
    ]
    if case.has_channels_last:
        memory_format = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
        holed = gradient.clone()
        holed.view(-1)[:: max(gradient.numel() // 3, 1)] = torch.tensor(
            [float("inf"), float("nan"), -float("inf"), -0.0], dtype=dtype
        )[: len(holed.view(-1)[:: max(gradient.numel() // 3, 1)])]
        layouts.append(
            (
                image.contiguous(memory_format=memory_format),
                holed.contiguous(memory_format=memory_format),
            )
        )
    for given, direction in layouts:
        expected = compute_gradient(case, given, direction, patched=True)
        with kernels_on_cpu():
            actual = compute_gradient(case, given, direction, patched=True)
        assert actual.stride() == expected.stride(), case.label
        assert_close(actual, expected, tolerance)


def select(cases: Sequence[GradientCase], *words: str) -> list[GradientCase]:
    """Return the cases whose label contains one of the words."""
    chosen = [case for case in cases if any(word in case.label for word in words)]
    assert chosen
    return chosen
