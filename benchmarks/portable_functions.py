"""Measure the error of the portable elementary functions in float32 on ten million points each.

    python benchmarks/portable_functions.py [--points N] [-o FILE]

All points are compared with torch's function in float64. Of every 2**18 points, two that look worst
and six others are compared with mpmath: their greatest error is the result. Half of the points are
any bits within the domain, half are near 0 and 1. An error of 0.5 is that of correct rounding;
more than 0.501 ends with status 1. It takes six minutes on one core.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mpmath
import torch
from torch import Tensor

from lightning_d9m.ops.portability.arithmetic import evaluate

DOMAINS = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1.0, 1.0)),
    **dict.fromkeys(("log", "log2", "log10"), (0.0, math.inf)),
    "acosh": (1.0, math.inf),
    "log1p": (-1.0, math.inf),
}
NAMES = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv"),
    *("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sigmoid", "sin", "sinh"),
    *("tan", "tanh"),
)
CHUNK = 2**18
ALLOWED = 0.501
REFERENCES: dict[str, Callable[..., mpmath.mpf]] = {
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "log2": lambda x: mpmath.log(x, 2),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
}


def sample(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    """Return float32 numbers within a domain."""
    bits = torch.randint(-(2**31), 2**31, (count // 2,), generator=generator)
    anything = bits.to(torch.int32).view(torch.float32)
    near = torch.randn(count // 2, generator=generator) * 3
    values = torch.cat([anything, near])
    values = torch.where(values.isfinite(), values, 0.5)
    if low == -1.0:
        values = torch.where((values > low) & (values < high), values, values.sin())
    return values.abs() + (low if low >= 1 else 0) if low >= 0 else values.clamp(min=low)


def measure(name: str, points: int) -> tuple[float, float, float]:
    """Return the greatest error in units in the last place, where it is, and float64's."""
    low, high = DOMAINS.get(name, (-math.inf, math.inf))
    generator = torch.Generator().manual_seed(5)
    worst, suspects = 0.0, []
    for _ in range(-(-points // CHUNK)):
        values = sample(CHUNK, low, high, generator)
        exact = getattr(torch, name)(values.double())
        found = evaluate(name, values)
        exponent = torch.frexp(exact.abs().clamp(min=2.0**-126))[1]
        unit = torch.ldexp(torch.ones_like(exact), exponent - 24)
        # What float32 cannot hold is infinite in both.
        inside = exact.isfinite() & (exact.abs() < 2.0**128 - 2.0**103)
        error = torch.where(inside, (found.double() - exact).abs() / unit, 0.0)
        error = torch.where(inside | (found.double() == exact.float().double()), error, math.inf)
        error = torch.where(exact.isnan() & found.isnan(), 0.0, error)
        chosen = torch.cat([error.topk(2)[1], torch.arange(0, CHUNK, CHUNK // 6)[:6]])
        worst = max(worst, float(error.max())) if bool(error.isinf().any()) else worst
        suspects += zip(*(one[chosen].tolist() for one in (values, found, exact)), strict=True)
    errors = [(*find_errors(name, *one), one[0]) for one in suspects if math.isfinite(one[1])]
    highest, _, place = max([(worst, 0.0, 0.0), *errors])
    return highest, place, max(error for _, error, _ in errors)


def find_errors(name: str, value: float, found: float, wide: float) -> tuple[float, float]:
    """Return the distance of a result to mpmath's, in units of float32, and that of float64's."""
    with mpmath.workprec(300):
        exact = (REFERENCES.get(name) or getattr(mpmath, name))(mpmath.mpf(value))
        exponent = mpmath.frexp(exact)[1] if exact else 0
        distance = abs(found - exact) / mpmath.mpf(2) ** max(exponent - 24, -149)
        small = not exact or abs(exact) < 2.0**-1000
        return float(distance), 0.0 if small else float(abs(wide / exact - 1) * 2**52)


def main() -> int:
    """Measure all functions, print and write the errors; return 1 if one is too great."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=10_000_000)
    parser.add_argument("--names", nargs="*", default=NAMES)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    greatest = 0.0
    found: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), "points": options.points}
    for name in options.names:
        worst, place, wide = measure(name, options.points)
        greatest = max(greatest, worst)
        found[name] = {"error": round(worst, 7), "at": place.hex(), "float64": round(wide, 3)}
        print(name, found[name], flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return int(greatest > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
