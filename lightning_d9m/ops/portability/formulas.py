"""The formulas of elementary functions, softmax, normalizations, and steps of optimizers.

Each is the specification of its results: the sequence of operations that C and torch compute.
Functions compute in float64 by additions, products, quotients and square roots. Their errors are a
few units in the last place of float64 (up to some hundred where a result is far from 1), and
rounding to float32 leaves at most one of its units. Kernels of rows compute in the type of their
inputs.
"""

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from lightning_d9m.ops.portability.expressions import (
    Columns,
    Matrix,
    RowKernel,
    Rows,
    operation,
)  # fmt: skip

root, rest_of, where, copysign, to_bits, from_bits = map(
    operation, ("root", "rest", "where", "copysign", "to_bits", "from_bits")
)
# Of a row; and between the type of rows and float64.
total, greatest, length, narrow, wide, lookup = map(
    operation, ("total", "greatest", "length", "narrow", "wide", "lookup")
)
INF, NAN = math.inf, math.nan
_ROUND = 1.5 * 2.0**52  # added and subtracted, it rounds to a whole number
_ROUND_BITS = 0x4338 << 48
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_PI = float.fromhex("0x1.921fb54442d18p+1")
_ROOT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_MASK = 0xFFFFFFFF


def _read_tables() -> dict[str, list[str]]:
    """Return the coefficients by their names."""
    found = {}
    for part in Path(__file__).with_name("coefficients.txt").read_text().split("\n\n"):
        name, *words = (
            word for line in part.splitlines() if line[0] != "#" for word in line.split()
        )
        found[name] = words
    return found


_WORDS = _read_tables()
# With zeros before the point.
TWO_OVER_PI = [0, *(int(word, 16) for word in _WORDS.pop("TWO_OVER_PI"))]
_TABLES = {name: [*map(float.fromhex, words)] for name, words in _WORDS.items()}
_HIGH, _LOW = _TABLES["LOG2"]
_LOG2 = _HIGH + _LOW

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The functions by their names in torch; of float64 numbers."""


def _function(formula: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Register a function."""
    FUNCTIONS[name or formula.__name__.removeprefix("_")] = formula
    return formula


def _polynomial(name: str, x: Any) -> Any:
    first, second, *others = _TABLES[name]
    value = x * first + second
    for one in others:
        value = value * x + one
    return value


def _round_whole(x: Any) -> Any:
    return (x + _ROUND) - _ROUND


def _power_of_2(k: Any) -> Any:
    """2 to a whole number from -1022 to 1023: the last bits of ``_ROUND + k`` are those of k."""
    return from_bits((to_bits(k + _ROUND) + 1023) << 52)


def _scale(q: Any, k: Any) -> Any:
    """(1 + q) * 2**k, half of k at a time, because 2**k itself may be out of range."""
    half = _round_whole(k * 0.5)
    return ((1.0 + q) * _power_of_2(half)) * _power_of_2(k - half)


_sqrt = _function(root, "sqrt")


@_function
def _exp(x: Any) -> Any:
    # Beyond these bounds the result is 0 or infinity, and k would leave the field of the exponent.
    x = where(x < -746.0, -746.0, where(x > 710.0, 710.0, x))
    k = _round_whole(x * _LOG2_E)
    # The upper part of log(2) has few digits, so that its product with k is exact.
    r = (x - k * _HIGH) - k * _LOW
    return _scale(r * _polynomial("EXPM1", r), k)


@_function
def _exp2(x: Any) -> Any:
    x = where(x < -1080.0, -1080.0, where(x > 1025.0, 1025.0, x))
    k = _round_whole(x)
    r = (x - k) * _LOG2
    return _scale(r * _polynomial("EXPM1", r), k)


# Near 0 the subtraction of 1 would cancel.
_expm1 = _function(
    lambda x: where(abs(x) < 0.34657, x * _polynomial("EXPM1", x), _exp(x) - 1.0), "expm1"
)


def _split_log(x: Any) -> tuple[Any, Any]:
    """Return k and log(m): x = 2**k * m, m between the roots of 1/2 and of 2."""
    small = x < 2.0**-1022
    bits = to_bits(where(small, x * 2.0**54, x))
    # Less the bits of the root of 1/2: so m is near 1 on both sides, where the series is short.
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = from_bits(bits - (exponent << 52))
    k = from_bits(exponent + _ROUND_BITS) - _ROUND
    k = where(small, k - 54.0, k)
    f = m - 1.0
    s = f / (2.0 + f)
    return k, (2.0 * s) * _polynomial("ATANH", s * s)


def _guard_log(x: Any, found: Any) -> Any:
    return where(x > 0.0, where(x < INF, found, x), where(x == 0.0, -INF, NAN))


@_function
def _log(x: Any) -> Any:
    k, y = _split_log(x)
    return _guard_log(x, k * _HIGH + (y + k * _LOW))


@_function
def _log2(x: Any) -> Any:
    k, y = _split_log(x)
    return _guard_log(x, k + y * _LOG2_E)


_log10 = _function(lambda x: _log(x) * float.fromhex("0x1.bcb7b1526e50ep-2"), "log10")


@_function
def _log1p(x: Any) -> Any:
    # What the rounding of u has lost, by the derivative of the logarithm.
    u = 1.0 + x
    lost, y = (x - (u - 1.0)) / u, _log(u)
    return where(x == 0.0, x, where((u > 0.0) & (u < INF), y + lost, y))


_sigmoid = _function(lambda x: 1.0 / (1.0 + _exp(-x)), "sigmoid")


@_function
def _tanh(x: Any) -> Any:
    # Of a negative number, whose exponential cannot overflow.
    t = _expm1(-2.0 * abs(x))
    return copysign(-t / (t + 2.0), x)


@_function
def _sinh(x: Any) -> Any:
    size = abs(x)
    # The square of half the argument's exponential, which would overflow before the result does;
    # from 20 on the other exponential is too small to count.
    t, h = _expm1(size), _exp(size * 0.5)
    return copysign(where(size > 20.0, (0.5 * h) * h, 0.5 * (t + t / (t + 1.0))), x)


@_function
def _cosh(x: Any) -> Any:
    size = abs(x)
    e, h = _exp(size), _exp(size * 0.5)
    return where(size > 20.0, (0.5 * h) * h, 0.5 * e + 0.5 / e)


@_function
def _asinh(x: Any) -> Any:
    a = abs(x)
    # Not log(a + root(a * a + 1)): its argument is 1 for a small a. A large one's square overflows.
    near = _log1p(a + a * a / (1.0 + root(a * a + 1.0)))
    return copysign(where(a > 1e8, _log(a) + _LOG2, near), x)


@_function
def _acosh(x: Any) -> Any:
    t = x - 1.0
    near = _log1p(t + root(2.0 * t + t * t))
    return where(x > 1e8, _log(x) + _LOG2, where(x >= 1.0, near, NAN))


@_function
def _atanh(x: Any) -> Any:
    a = abs(x)
    return copysign(0.5 * _log1p((2.0 * a) / (1.0 - a)), x)


def _find_angle(t: Any) -> Any:
    """Return the angle of a number between 0 and 1."""
    # Beyond the tangent of pi / 8 the angle to pi / 4 is smaller, and the polynomial short.
    large = t > 0.41421356237309503
    s = where(large, (t - 1.0) / (t + 1.0), t)
    angle = s * _polynomial("ATAN", s * s)
    return where(large, _PI / 4 + angle, angle)


@_function
def _atan(x: Any) -> Any:
    a = abs(x)
    angle = _find_angle(where(a > 1.0, 1.0 / a, a))
    return copysign(where(a > 1.0, _PI / 2 - angle, angle), x)


# (1 - x) * (1 + x), because 1 - x * x would cancel near 1.
_asin = _function(lambda x: _atan(x / root((1.0 - x) * (1.0 + x))), "asin")


_acos = _function(lambda x: 2.0 * _atan(root((1.0 - x) / (1.0 + x))), "acos")


def _is_nan(*numbers: Any) -> Any:
    first, *others = (~(one == one) for one in numbers)  # noqa: PLR0124 - only NaN differs from itself
    for one in others:
        first = first | one
    return first


@_function
def _atan2(y: Any, x: Any) -> Any:
    a, b = abs(x), abs(y)
    high, low = where(a > b, a, b), where(a > b, b, a)
    t = where(high == 0.0, 0.0, where(low == INF, 1.0, low / high))
    angle = _find_angle(t)
    angle = where(b > a, _PI / 2 - angle, angle)
    # By the sign bit: -0.0 lies on the other side of the axis than 0.0.
    angle = copysign(where(to_bits(x) < 0, _PI - angle, angle), y)
    return where(_is_nan(x, y), NAN, angle)


def _reduce_small(x: Any) -> tuple[Any, Any]:
    n = _round_whole(x * (2.0 / _PI))
    # The products of n with the first parts are exact: each part has few digits.
    first, second, third = _TABLES["HALF_PI"]
    return ((x - n * first) - n * second) - n * third, to_bits(n + _ROUND) & 3


def _reduce(x: Any) -> tuple[Any, Any]:
    """Subtract the nearest multiple of pi / 2; return the rest and the multiple, modulo 4.

    Large numbers take whole numbers: x = m * 2**e, and of x * 2 / pi only the part below 4 counts,
    so only the bits of 2 / pi from a place that e tells.
    """
    rest, quadrant = _reduce_small(x)
    large = ~(abs(x) < 2.0**20)
    bits = to_bits(where(large & (abs(x) < INF), abs(x), 2.0**20))
    place = (bits >> 52) - 1023 - 52 - 2 + 64
    m = (bits & ((1 << 52) - 1)) | (1 << 52)
    word, shift = place >> 6, place & 63
    parts = []
    for i in (0, 1):
        # Logical shifts: the bits that an arithmetic one repeats are cut off.
        low = lookup(word + i + 1) >> (64 - where(shift > 0, shift, 1))
        parts.append((lookup(word + i) << shift) | (low & ((1 << shift) - 1)))
    turns = m * parts[0] + _multiply_high(m, parts[1])
    nearest = ((turns + (1 << 61)) >> 62) & 3
    other = wide(turns - (nearest << 62)) * (2.0**-62 * (_PI / 2))
    other = where(abs(x) < INF, where(x < 0.0, -other, other), NAN)
    return where(large, other, rest), where(large, where(x < 0.0, -nearest & 3, nearest), quadrant)


def _multiply_high(m: Any, word: Any) -> Any:
    """Return the upper 64 bits of the product of a positive and an unsigned number."""
    m_high, m_low, high, low = m >> 32, m & _MASK, (word >> 32) & _MASK, word & _MASK
    middle = m_high * low + (((m_low * low) >> 32) & _MASK)
    other = m_low * high
    carry = (middle & _MASK) + (other & _MASK)
    return m_high * high + (middle >> 32) + ((other >> 32) & _MASK) + (carry >> 32)


def _sine_of(rest: Any) -> Any:
    return rest * _polynomial("SIN", rest * rest)


def _cosine_of(rest: Any) -> Any:
    return _polynomial("COS", rest * rest)


def _turn(rest: Any, quadrant: Any) -> Any:
    size = where((quadrant & 1) == 1, _cosine_of(rest), _sine_of(rest))
    return where((quadrant & 2) == 2, -size, size)


_sin = _function(lambda x: _turn(*_reduce(x)), "sin")


@_function
def _cos(x: Any) -> Any:
    rest, quadrant = _reduce(x)
    return _turn(rest, quadrant + 1)


@_function
def _tan(x: Any) -> Any:
    rest, quadrant = _reduce(x)
    s, c = _sine_of(rest), _cosine_of(rest)
    return where((quadrant & 1) == 1, -c / s, s / c)


def _erfc_above(a: Any) -> Any:
    t = 2.0 / (2.0 + a)
    return t * _exp(_polynomial("ERFC", 2.0 * t - 1.0) - a * a)


@_function
def _erfc(x: Any) -> Any:
    found = _erfc_above(abs(x))
    return where(x < 0.0, 2.0 - found, found)


@_function
def _erf(x: Any) -> Any:
    a = abs(x)
    large = copysign(1.0 - _erfc_above(a), x)
    return where(a < 1.0, x * _polynomial("ERF", x * x), large)


@_function
def _erfinv(x: Any) -> Any:
    a = abs(x)
    rest = 1.0 - a
    w = -_log(rest * (1.0 + a))
    tail = _polynomial("ERFINV_TAIL", root(w) - 3.0)
    y = a * where(w < 5.0, _polynomial("ERFINV", w - 2.5), tail)
    for _ in range(3):  # Halley's method
        # Near 1 by the complement: erf(y) - a would cancel.
        error = where(rest < 0.5, rest - _erfc_above(y), _erf(y) - a)
        step = error * _exp(y * y) * float.fromhex("0x1.c5bf891b4ef6ap-1")
        y = y - step / (1.0 + y * step)
    return where(a < 1.0, copysign(y, x), where(a == 1.0, copysign(INF, x), NAN))


@_function
def _hypot(x: Any, y: Any) -> Any:
    a, b = abs(x), abs(y)
    high, low = where(a > b, a, b), where(a > b, b, a)
    r = low / high  # a square of the numbers themselves may overflow
    found = where(high == 0.0, high + low, high * root(1.0 + r * r))
    found = where(_is_nan(x, y), NAN, found)
    return where((a == INF) | (b == INF), INF, found)


def _is_whole(size: Any) -> Any:
    return (size >= 2.0**52) | ((size + 2.0**52) - 2.0**52 == size)


@_function
def _pow(x: Any, y: Any) -> Any:
    a, b = abs(x), abs(y)
    found, whole = _exp(y * _log(a)), _is_whole(b)
    # From 2**53 on every number is even.
    odd = whole & (b < 2.0**53) & ~_is_whole(b * 0.5)
    found = where((to_bits(x) < 0) & odd, -found, found)
    found = where((x < 0.0) & (a < INF) & ~whole, NAN, found)
    found = where(_is_nan(x, y), NAN, found)
    return where((y == 0.0) | (x == 1.0) | ((a == 1.0) & (b == INF)), 1.0, found)


# The rest that C defines, which is exact; torch's differs between processors.
_fmod = _function(lambda x, y: rest_of(x, y), "fmod")  # noqa: PLW0108 - its arguments are counted


def _has_sign_of(rest: Any, y: Any) -> Any:
    return copysign(rest, y) == rest


# The sum of two float32 numbers in float64, rounded to float32, is as if it were rounded once.
@_function
def _remainder(x: Any, y: Any) -> Any:
    rest = _fmod(x, y)
    return where(_has_sign_of(rest, y), rest, rest + y)


@_function
def _floor_divide(x: Any, y: Any) -> Any:
    """Torch's formula: the quotient of what the divisor divides, less 1 below 0."""
    rest = _fmod(x, y)
    q = (x - rest) / y
    q = where(_has_sign_of(rest, y), q, q - 1.0)
    q = where(abs(q) < 2.0**51, _round_whole(q), q)
    return where(y == 0.0, x / y, where(q == 0.0, copysign(0.0, x / y), q))


@_function
def _normal(u: Any, angle: Any) -> Any:
    """A normal number from two uniform ones, of which one is an angle (Box and Muller)."""
    rest, quadrant = _reduce_small(angle)
    return root(_log(u) * -2.0) * _turn(rest, quadrant + 1)


_gelu = _function(lambda x: x * (0.5 * _erfc(x * -_ROOT_HALF)), "gelu")


@_function
def _gelu_backward(g: Any, x: Any) -> Any:
    density = _exp(-0.5 * x * x) * float.fromhex("0x1.9884533d43651p-2")
    return g * (0.5 * _erfc(x * -_ROOT_HALF) + x * density)


_silu = _function(lambda x: x / (1.0 + _exp(-x)), "silu")


@_function
def _silu_backward(g: Any, x: Any) -> Any:
    s = _sigmoid(x)
    return g * (s * (1.0 + x * (1.0 - s)))


KERNELS: dict[str, RowKernel] = {}
"""Formulas of rows; those without optional inputs have the names of these at the end."""


def _kernel(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Register a kernel, with and without each input that may be None."""
    optional = [one.name for one in signature(formula).parameters.values() if one.default is None]
    for choice in product((True, False), repeat=len(optional)):
        absent = [name for name, given in zip(optional, choice, strict=True) if not given]
        name = "_without_".join((formula.__name__.removeprefix("_"), *absent))
        KERNELS[name] = RowKernel(formula, absent)
    return formula


def _multiply_add(value: Any, weight: Any, bias: Any) -> Any:
    value = value if weight is None else value * weight
    return value if bias is None else value + bias


@_kernel
def _softmax(x: Matrix) -> dict[str, Any]:
    terms = narrow(_exp(wide(x) - wide(greatest(x))))
    return {"out": terms / total(terms)}


@_kernel
def _log_softmax(x: Matrix) -> dict[str, Any]:
    gaps = wide(x) - wide(greatest(x))
    return {"out": narrow(gaps - _log(wide(total(narrow(_exp(gaps))))))}


@_kernel
def _softmax_backward_data(gradient: Matrix, y: Matrix) -> dict[str, Any]:
    return {"out": (gradient - total(gradient * y)) * y}


@_kernel
def _log_softmax_backward_data(gradient: Matrix, y: Matrix) -> dict[str, Any]:
    return {"out": gradient - narrow(_exp(wide(y))) * total(gradient)}


@_kernel
def _layer_norm(
    x: Matrix, numbers: Annotated[Any, 1], weight: Columns = None, bias: Columns = None
) -> dict[str, Any]:
    (eps,) = numbers
    means = total(x) / length(x)
    gaps = x - means
    scales = 1.0 / root(total(gaps * gaps) / length(x) + eps)
    return {"out": _multiply_add(gaps * scales, weight, bias), "means": means, "scales": scales}


@_kernel
def _layer_norm_backward(
    gradient: Matrix, x: Matrix, means: Rows, scales: Rows, weight: Columns = None
) -> dict[str, Any]:
    """Return the gradient for x, and the terms of that for the weight."""
    h, g = (x - means) * scales, _multiply_add(gradient, weight, None)
    first, second = total(g) / length(x), total(g * h) / length(x)
    return {"out": scales * ((g - first) - h * second), "terms": gradient * h}


@_kernel
def _deviations(x: Matrix, means: Rows) -> dict[str, Any]:
    """Return the terms of the variances."""
    return {"out": (x - means) * (x - means)}


@_kernel
def _normalized(gradient: Matrix, x: Matrix, means: Rows, scales: Rows) -> dict[str, Any]:
    """Return the terms of the gradient for the weight."""
    return {"out": gradient * ((x - means) * scales)}


@_kernel
def _batch_norm(
    x: Matrix, means: Rows, scales: Rows, weight: Rows = None, bias: Rows = None
) -> dict[str, Any]:
    return {"out": _multiply_add((x - means) * scales, weight, 0.0 if bias is None else bias)}


@_kernel
def _batch_norm_backward(
    gradient: Matrix, x: Matrix, means: Rows, scales: Rows, first: Rows, second: Rows, factor: Rows
) -> dict[str, Any]:
    return {"out": ((gradient - first) - ((x - means) * scales) * second) * factor}


@_kernel
def _adam(
    x: Matrix,
    gradient: Matrix,
    average: Matrix,
    squares: Matrix,
    numbers: Annotated[Any, 9],
    most: Matrix = None,
) -> dict[str, Any]:
    """A step of Adam or AdamW.

    The parameter is multiplied by ``shrink`` (1, or 1 - lr * weight_decay), and the gradient by
    ``sign``; ``decay`` times the parameter is added to it. The other numbers are 1 - beta1, beta2,
    1 - beta2, lr / (1 - beta1**t), sqrt(1 - beta2**t) and eps.
    """
    sign, shrink, decay, first, second, added, step, divisor, eps = numbers
    y, g = x * shrink, gradient * sign
    g = where(decay == 0.0, g, g + y * decay)
    average = average + (g - average) * first
    squares = squares * second + (g * g) * added
    found = {"average": average, "squares": squares}
    if most is not None:
        squares = found["most"] = where(squares > most, squares, most)
    return found | {"x": y - step * (average / (root(squares) / divisor + eps))}


@_kernel
def _sgd(
    x: Matrix,
    gradient: Matrix,
    numbers: Annotated[Any, 7],
    momenta: Matrix = None,
) -> dict[str, Any]:
    """A step of SGD; ``added`` is 1 - dampening. The first step ``starts`` the momenta."""
    sign, decay, step, momentum, added, starts, nesterov = numbers
    g = gradient * sign
    g = where(decay == 0.0, g, g + x * decay)
    if momenta is None:
        return {"x": x - step * g}
    momenta = where(starts == 1.0, g, momenta * momentum + g * added)
    g = where(nesterov == 1.0, g + momenta * momentum, momenta)
    return {"x": x - step * g, "momenta": momenta}


def _apply(function: Callable[..., Any], x: Matrix, y: Matrix = None) -> dict[str, Any]:
    return {"out": narrow(function(wide(x)) if y is None else function(wide(x), wide(y)))}


OF_TWO = {name for name, formula in FUNCTIONS.items() if len(signature(formula).parameters) == 2}
"""The functions of two numbers."""

for _name, _formula in FUNCTIONS.items():
    KERNELS[_name] = RowKernel(partial(_apply, _formula), () if _name in OF_TWO else ("y",))


def write_sources() -> dict[str, str]:
    """Return the C files of the formulas: a table, and the kernels of one type."""
    bits = ", ".join(f"{word}ull" for word in TWO_OVER_PI)
    table = f"static const uint64_t TWO_OVER_PI[] = {{{bits}}};\n"
    kernels = "".join(kernel.write(name) for name, kernel in KERNELS.items())
    return {"table.h": table, "formulas.h": kernels}
