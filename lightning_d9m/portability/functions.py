"""Elementary functions with the same bits on every machine.

torch's functions of float64 numbers differ between machines in the last places, by at most two
units in the last place (``benchmarks/portable_functions.py`` measures it). If all numbers within a
bound round to one number, that is the exact value rounded, whatever torch's error was; otherwise
mpmath computes the value. For float32, rounded to 24 bits, the bound is 256 units, which mpmath
must decide for about two elements in a million. Results for float64 keep 41 bits with a bound of 8
units: mpmath decides for about one element in 130.
"""

from collections.abc import Callable
from typing import Any

import mpmath
import torch
from torch import Tensor

# Elements that are computed at a time: their float64 numbers stay in a core's cache.
_CHUNK = 2**14
_MARGINS = {torch.float32: 2.0**-44, torch.float64: 2.0**-49}
_DROPPED = 12  # the bits of a float64 number that its results do not keep
_LEAST = 2.0**-1000  # float64 numbers below may have lost bits
_PRECISION = 200  # bits with which mpmath computes


def _erfinv(x: Tensor) -> Tensor:
    """Return torch's inverse of the error function after one more step of Newton's method."""
    size = x.abs()
    rest, y = 1.0 - size, torch.erfinv(size)
    # Both sides lose no digits: the function is near x, or its complement near 1 - x.
    error = torch.where(rest < 0.5, rest - torch.erfc(y), torch.erf(y) - size)
    step = error * torch.exp(y * y) * 0.886226925452758
    return torch.copysign(torch.where(step.isfinite(), y - step, y), x)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]] = {
    name: (getattr(torch, name), getattr(mpmath, name))
    for name in (
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf"),
        *("erfc", "exp", "expm1", "hypot", "log", "log10", "log1p", "sin", "sinh", "tan", "tanh"),
    )
} | {
    "erfinv": (_erfinv, mpmath.erfinv),
    "exp2": (torch.exp2, lambda x: mpmath.mpf(2) ** x),
    "log2": (torch.log2, lambda x: mpmath.log(x, 2)),
    # A number from the normal distribution, of two uniform ones (Box and Muller).
    "normal": (
        lambda u, v: torch.sqrt(torch.log(u) * -2.0) * torch.cos(v),
        lambda u, v: mpmath.sqrt(-2 * mpmath.log(u)) * mpmath.cos(v),
    ),
    "pow": (torch.pow, mpmath.power),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + mpmath.exp(-x))),
}
"""For each function what computes it for float64 tensors, and for numbers of mpmath."""


def evaluate(name: str, *inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Apply a function element by element, and round its exact results.

    Args:
        name: One of ``FUNCTIONS``.
        inputs: Broadcast against each other.
        dtype: The result's, by default the inputs' or else torch's default.
    """
    if dtype is None:
        dtype = inputs[0].dtype if len(inputs) == 1 else torch.result_type(*inputs)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    inputs = torch.broadcast_tensors(*inputs)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.empty_like(inputs[0], dtype=working)
    if out.numel() <= _CHUNK or not out.is_contiguous():
        out.copy_(_evaluate(name, inputs, working))
    else:
        parts = zip(*(one.reshape(-1).split(_CHUNK) for one in inputs), strict=True)
        for target, chunk in zip(out.view(-1).split(_CHUNK), parts, strict=True):
            target.copy_(_evaluate(name, chunk, working))
    return out.to(dtype)


def _evaluate(name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    compute, compute_exactly = FUNCTIONS[name]
    inputs = tuple(one.to(torch.float64) for one in inputs)
    total = compute(*inputs)
    result, other = (_round(total * (1.0 + sign * _MARGINS[dtype]), dtype) for sign in (1, -1))
    differs = result != other
    if dtype == torch.float64:
        differs |= (total.abs() < _LEAST) & (total != 0)
    if bool(differs.any()):
        differs &= total.isfinite()
        rows = zip(*(one[differs].tolist() for one in inputs), strict=True)
        with mpmath.workprec(_PRECISION):
            found = [float(compute_exactly(*map(mpmath.mpf, row))) for row in rows]
        exact = torch.tensor(found, dtype=torch.float64, device=total.device)
        result[differs] = _round(exact, dtype)
    return result


def _round(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 numbers to float32, or to fewer bits."""
    if dtype == torch.float32:
        return values.float()
    bits = values.view(torch.int64) + (1 << (_DROPPED - 1))
    rounded = (bits & -(1 << _DROPPED)).view(torch.float64)
    return torch.where(values.isfinite(), rounded, values)
