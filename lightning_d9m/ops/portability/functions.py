"""Elementary functions in torch operations that round once: what ``functions.h`` computes.

Both compute in float64 by additions, products, quotients and square roots, in the same order, so
that they give the same bits. Their errors are a few units in the last place of float64 (up to some
hundred where a result is far from 1), and rounding to float32 leaves at most one of its units.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lightning_d9m.ops.portability.roots import find_root

_WORDS = re.compile(r"\b(\w+)\[\] = \{(.*?)\}", re.DOTALL)


def _read_tables() -> dict[str, list[float]]:
    """Return the coefficients that the C kernels take."""
    text = Path(__file__).with_name("coefficients.h").read_text()
    tables = {name: re.split(r",\s*", body.strip()) for name, body in _WORDS.findall(text)}
    words = [int(word, 16) for word in tables.pop("TWO_OVER_PI")]
    # As signed numbers of 64 bits, as torch has them.
    _TWO_OVER_PI.extend(word - (word >> 63 << 64) for word in words)
    return {name: [*map(float.fromhex, body)] for name, body in tables.items()}


_TWO_OVER_PI: list[int] = []
_TABLES = _read_tables()
_ROUND = 1.5 * 2.0**52  # added and subtracted, it rounds to a whole number
_ROUND_BITS = 0x4338 << 48
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_PI = float.fromhex("0x1.921fb54442d18p+1")
_HIGH, _LOW = _TABLES["LOG2"]
_LOG2 = _HIGH + _LOW
_ROOT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_MASK = 0xFFFFFFFF


def _polynomial(name: str, x: Tensor) -> Tensor:
    first, *rest = _TABLES[name]
    total = torch.full_like(x, first)
    for one in rest:
        total = (total * x).add_(one)
    return total


def _round_whole(x: Tensor) -> Tensor:
    return (x + _ROUND) - _ROUND


def _power_of_2(k: Tensor) -> Tensor:
    return (((k + _ROUND).view(torch.int64) + 1023) << 52).view(torch.float64)


def _scale(q: Tensor, k: Tensor) -> Tensor:
    half = _round_whole(k * 0.5)
    return ((1.0 + q) * _power_of_2(half)) * _power_of_2(k - half)


def exp(x: Tensor) -> Tensor:
    """The exponential function."""
    x = torch.where(x < -746.0, -746.0, torch.where(x > 710.0, 710.0, x))
    k = _round_whole(x * _LOG2_E)
    r = (x - k * _HIGH) - k * _LOW
    return _scale(r * _polynomial("EXPM1", r), k)


def exp2(x: Tensor) -> Tensor:
    """2 to the power of x."""
    x = torch.where(x < -1080.0, -1080.0, torch.where(x > 1025.0, 1025.0, x))
    k = _round_whole(x)
    r = (x - k) * _LOG2
    return _scale(r * _polynomial("EXPM1", r), k)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1."""
    return torch.where(x.abs() < 0.34657, x * _polynomial("EXPM1", x), exp(x) - 1.0)


def _split_log(x: Tensor) -> tuple[Tensor, Tensor]:
    small = x < 2.0**-1022
    bits = torch.where(small, x * 2.0**54, x).view(torch.int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = (bits - (exponent << 52)).view(torch.float64)
    k = (exponent + _ROUND_BITS).view(torch.float64) - _ROUND
    k = torch.where(small, k - 54.0, k)
    f = m - 1.0
    s = f / (2.0 + f)
    return k, (2.0 * s) * _polynomial("ATANH", s * s)


def _guard_log(x: Tensor, found: Tensor) -> Tensor:
    other = torch.where(x == 0.0, -math.inf, math.nan).to(x)
    return torch.where(x > 0.0, torch.where(x < math.inf, found, x), other)


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    k, y = _split_log(x)
    return _guard_log(x, k * _HIGH + (y + k * _LOW))


def log2(x: Tensor) -> Tensor:
    """The logarithm to base 2."""
    k, y = _split_log(x)
    return _guard_log(x, k + y * _LOG2_E)


def log10(x: Tensor) -> Tensor:
    """The logarithm to base 10."""
    return log(x) * float.fromhex("0x1.bcb7b1526e50ep-2")


def log1p(x: Tensor) -> Tensor:
    """log(1 + x)."""
    u = 1.0 + x
    lost, y = (x - (u - 1.0)) / u, log(u)
    return torch.where(x == 0.0, x, torch.where((u > 0.0) & (u < math.inf), y + lost, y))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.ones_like(x) / (1.0 + exp(-x))


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    t = expm1(-2.0 * x.abs())
    return torch.copysign(-t / (t + 2.0), x)


def sinh(x: Tensor) -> Tensor:
    """The hyperbolic sine."""
    size = x.abs()
    t, h = expm1(size), exp(size * 0.5)
    found = torch.where(size > 20.0, (0.5 * h) * h, 0.5 * (t + t / (t + 1.0)))
    return torch.copysign(found, x)


def cosh(x: Tensor) -> Tensor:
    """The hyperbolic cosine."""
    size = x.abs()
    e, h = exp(size), exp(size * 0.5)
    return torch.where(size > 20.0, (0.5 * h) * h, 0.5 * e + _divide(0.5, e))


def _divide(number: float, x: Tensor) -> Tensor:
    return torch.full_like(x, number) / x  # torch may multiply a number by a reciprocal


def asinh(x: Tensor) -> Tensor:
    """The inverse hyperbolic sine."""
    a = x.abs()
    near = log1p(a + a * a / (1.0 + find_root(a * a + 1.0)))
    return torch.copysign(torch.where(a > 1e8, log(a) + _LOG2, near), x)


def acosh(x: Tensor) -> Tensor:
    """The inverse hyperbolic cosine."""
    t = x - 1.0
    near = log1p(t + find_root(2.0 * t + t * t))
    return torch.where(x > 1e8, log(x) + _LOG2, torch.where(x >= 1.0, near, math.nan))


def atanh(x: Tensor) -> Tensor:
    """The inverse hyperbolic tangent."""
    a = x.abs()
    return torch.copysign(0.5 * log1p((2.0 * a) / (1.0 - a)), x)


def _find_angle(t: Tensor) -> Tensor:
    wide = t > 0.41421356237309503
    s = torch.where(wide, (t - 1.0) / (t + 1.0), t)
    angle = s * _polynomial("ATAN", s * s)
    return torch.where(wide, _PI / 4 + angle, angle)


def atan(x: Tensor) -> Tensor:
    """The inverse tangent."""
    a = x.abs()
    angle = _find_angle(torch.where(a > 1.0, _divide(1.0, a), a))
    return torch.copysign(torch.where(a > 1.0, _PI / 2 - angle, angle), x)


def asin(x: Tensor) -> Tensor:
    """The inverse sine."""
    return atan(x / find_root((1.0 - x) * (1.0 + x)))


def acos(x: Tensor) -> Tensor:
    """The inverse cosine."""
    return 2.0 * atan(find_root((1.0 - x) / (1.0 + x)))


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle of a point."""
    a, b = x.abs(), y.abs()
    high, low = torch.where(a > b, a, b), torch.where(a > b, b, a)
    t = torch.where(high == 0.0, 0.0, torch.where(low == math.inf, 1.0, low / high))
    angle = _find_angle(t)
    angle = torch.where(b > a, _PI / 2 - angle, angle)
    angle = torch.copysign(torch.where(x.view(torch.int64) < 0, _PI - angle, angle), y)
    return torch.where(x.isnan() | y.isnan(), math.nan, angle)


def _reduce_small(x: Tensor) -> tuple[Tensor, Tensor]:
    n = _round_whole(x * (2.0 / _PI))
    first, second, third = _TABLES["HALF_PI"]
    return ((x - n * first) - n * second) - n * third, (n + _ROUND).view(torch.int64) & 3


def _reduce(x: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the nearest multiple of pi / 2; return the rest and the multiple, modulo 4."""
    rest, quadrant = _reduce_small(x)
    large = x.abs() >= 2.0**20
    if bool(large.any()):
        rest[large], quadrant[large] = _reduce_large(x[large])
    return rest, quadrant


def _reduce_large(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same for any size, by whole numbers; see ``functions.h``."""
    bits = x.abs().view(torch.int64)
    place = ((bits >> 52) - 1023 - 52 - 2 + 64).clamp(max=64 * 17)
    m = (bits & ((1 << 52) - 1)) | (1 << 52)
    table = torch.tensor([0, *_TWO_OVER_PI], device=x.device)
    word, shift = place >> 6, place & 63
    parts = []
    for i in (0, 1):
        # Logical shifts: the bits that an arithmetic one repeats are cut off.
        low = (table[word + i + 1] >> (64 - shift).clamp(max=63)) & ((1 << shift) - 1)
        parts.append(torch.where(shift > 0, (table[word + i] << shift) | low, table[word + i]))
    turns = m * parts[0] + _multiply_high(m, parts[1])
    nearest = ((turns + (1 << 61)) >> 62) & 3
    rest = (turns - (nearest << 62)).to(torch.float64) * (2.0**-62 * (_PI / 2))
    rest = torch.where(x.isfinite(), rest, math.nan)
    nearest = torch.where(x.isfinite(), nearest, 0)
    return torch.where(x < 0, -rest, rest), torch.where(x < 0, -nearest & 3, nearest)


def _multiply_high(m: Tensor, word: Tensor) -> Tensor:
    """Return the upper 64 bits of the product of a positive and an unsigned number."""
    m_high, m_low, high, low = m >> 32, m & _MASK, (word >> 32) & _MASK, word & _MASK
    middle = m_high * low + (((m_low * low) >> 32) & _MASK)
    other = m_low * high
    carry = (middle & _MASK) + (other & _MASK)
    return m_high * high + (middle >> 32) + ((other >> 32) & _MASK) + (carry >> 32)


def _turn(rest: Tensor, quadrant: Tensor) -> Tensor:
    cosine, sine = _polynomial("COS", rest * rest), rest * _polynomial("SIN", rest * rest)
    size = torch.where((quadrant & 1).bool(), cosine, sine)
    return torch.where((quadrant & 2).bool(), -size, size)


def sin(x: Tensor) -> Tensor:
    """The sine."""
    return _turn(*_reduce(x))


def cos(x: Tensor) -> Tensor:
    """The cosine."""
    rest, quadrant = _reduce(x)
    return _turn(rest, quadrant + 1)


def tan(x: Tensor) -> Tensor:
    """The tangent."""
    rest, quadrant = _reduce(x)
    s, c = rest * _polynomial("SIN", rest * rest), _polynomial("COS", rest * rest)
    return torch.where((quadrant & 1).bool(), -c / s, s / c)


def _erfc_above(a: Tensor) -> Tensor:
    t = _divide(2.0, 2.0 + a)
    return t * exp(_polynomial("ERFC", 2.0 * t - 1.0) - a * a)


def erfc(x: Tensor) -> Tensor:
    """1 - erf(x)."""
    found = _erfc_above(x.abs())
    return torch.where(x < 0.0, 2.0 - found, found)


def erf(x: Tensor) -> Tensor:
    """The error function."""
    a = x.abs()
    large = torch.copysign(1.0 - _erfc_above(a), x)
    return torch.where(a < 1.0, x * _polynomial("ERF", x * x), large)


def erfinv(x: Tensor) -> Tensor:
    """The inverse of the error function, by Halley's method."""
    a = x.abs()
    rest = 1.0 - a
    w = -log(rest * (1.0 + a))
    tail = _polynomial("ERFINV_TAIL", find_root(w) - 3.0)
    y = a * torch.where(w < 5.0, _polynomial("ERFINV", w - 2.5), tail)
    for _ in range(3):
        error = torch.where(rest < 0.5, rest - _erfc_above(y), erf(y) - a)
        step = error * exp(y * y) * float.fromhex("0x1.c5bf891b4ef6ap-1")
        y = y - step / (1.0 + y * step)
    ends = torch.where(a == 1.0, torch.copysign(torch.full_like(x, math.inf), x), math.nan)
    return torch.where(a < 1.0, torch.copysign(y, x), ends)


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """The length of a vector of two numbers."""
    a, b = x.abs(), y.abs()
    high, low = torch.where(a > b, a, b), torch.where(a > b, b, a)
    r = low / high
    found = torch.where(high == 0.0, high + low, high * find_root(1.0 + r * r))
    found = torch.where(x.isnan() | y.isnan(), math.nan, found)
    return torch.where((a == math.inf) | (b == math.inf), math.inf, found)


def _is_whole(size: Tensor) -> Tensor:
    return (size >= 2.0**52) | ((size + 2.0**52) - 2.0**52 == size)


def power(x: Tensor, y: Tensor) -> Tensor:
    """Compute x to the power of y."""
    a, b = x.abs(), y.abs()
    found, whole = exp(y * log(a)), _is_whole(b)
    odd = whole & (b < 2.0**53) & ~_is_whole(b * 0.5)
    found = torch.where((x.view(torch.int64) < 0) & odd, -found, found)
    found = torch.where((x < 0.0) & (a < math.inf) & ~whole, math.nan, found)
    found = torch.where(x.isnan() | y.isnan(), math.nan, found)
    one = (y == 0.0) | (x == 1.0) | ((a == 1.0) & (b == math.inf))
    return torch.where(one, 1.0, found)


def normal(u: Tensor, angle: Tensor) -> Tensor:
    """A normal number from two uniform ones, of which one is an angle (Box and Muller)."""
    rest, quadrant = _reduce_small(angle)
    return find_root(log(u) * -2.0) * _turn(rest, quadrant + 1)


def gelu(x: Tensor) -> Tensor:
    """The Gaussian error linear unit."""
    return x * (0.5 * erfc(x * -_ROOT_HALF))


def gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``gelu``."""
    density = exp(-0.5 * x * x) * float.fromhex("0x1.9884533d43651p-2")
    return g * (0.5 * erfc(x * -_ROOT_HALF) + x * density)


def silu(x: Tensor) -> Tensor:
    """The sigmoid linear unit."""
    return x / (1.0 + exp(-x))


def silu_backward(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``silu``."""
    s = sigmoid(x)
    return g * (s * (1.0 + x * (1.0 - s)))


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    one.__name__: one
    for one in (
        *(acos, acosh, asin, asinh, atan, atan2, atanh, cos, cosh, erf, erfc, erfinv, exp, exp2),
        *(expm1, gelu, gelu_backward, hypot, log, log10, log1p, log2, normal, sigmoid, silu),
        *(silu_backward, sin, sinh, tan, tanh),
    )
} | {"pow": power, "sqrt": find_root}
"""The functions by their names in torch; of float64 tensors."""
