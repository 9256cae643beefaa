"""Elementary functions with the same bits on every machine.

Each function is a fixed sequence of single IEEE operations in float64, so no machine can contract,
reorder or replace any of them. The result is rounded once to the dtype of the input: for float32
its error is below 0.501 units in the last place. Coefficients without a source are minimax fits
that mpmath made (``chebyfit``, 60 digits); those of the logarithm, sine and cosine are fdlibm's.
"""

import math
from collections.abc import Callable, Sequence

import mpmath
import numpy as np
import torch
from torch import Tensor

# Elements that are computed at a time: their float64 numbers stay in a core's cache.
_CHUNK = 2**14
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOG = (
    *(1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01),
    *(2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01),
    6.666666666666735130e-01,
)
_SIN = (
    *(1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06),
    *(-1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01),
)
_COS = (
    *(-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07),
    *(2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02),
)
_PI_HALF = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_FAR_ANGLE = 2.0**20  # from here on the multiples of pi / 2 need more bits than float64 has
# (exp(x) - 1 - x) / x**2 for |x| below log(2) / 2
_EXP = (
    *(2.0914717341716378e-09, 2.5105259538448494e-08, 2.755727357010214e-07),
    *(2.7557255297969643e-06, 2.4801587325605324e-05, 0.0001984126987490126),
    *(0.001388888888888373, 0.008333333333326112, 0.04166666666666667),
    *(0.1666666666666667, 0.5),
)
# erf(x) / x for x**2 below 1
_ERF = (
    *(5.957176147748911e-11, -1.1372848856791674e-09, 1.4659775274047436e-08),
    *(-1.6350312701054695e-07, 1.6461000484121368e-06, -1.4925595266831182e-05),
    *(0.0001205533111164271, -0.000854832698083379, 0.0052239776248180145),
    *(-0.026866170645076792, 0.11283791670954879, -0.3761263890318375, 1.1283791670955126),
)
# erfc(x) * exp(x**2) * (1 + 2 * x) in t = (x - 3.75) / (x + 3.75), for x from 1
_ERFC = (
    *(-4.744881953144682e-10, 3.5308442915454638e-09, -7.250949245277826e-09),
    *(-8.666614144140009e-09, 4.476178519132122e-08, 2.630085091028049e-08),
    *(-2.6475582557822375e-07, -5.829321819571647e-08, 1.7551799919826665e-06),
    *(-9.73185460609377e-07, -1.1445553671393812e-05, 2.238406143165972e-05),
    *(5.164950312710203e-05, -0.0002901540118010693, 0.0002937135825556797),
    *(0.0017556258364664996, -0.009746579546525578, 0.028362277421227624),
    *(-0.05869339859061346, 0.09230432116020917, -0.10880393014170513),
    *(0.08227673849015085, 0.003585415485463655, -0.14024059858554702, 1.2375126308378275),
)
# (atan(x) / x - 1) / x**2 for x up to tan(pi / 8)
_ATAN = (
    *(-0.019147248964611764, 0.03920743321261196, -0.05084610357631765),
    *(0.05857988350245762, -0.06664492945806264, 0.07692181876036845),
    *(-0.0909090452147169, 0.11111111013860688, -0.14285714284649173),
    *(0.19999999999995438, -0.3333333333333333),
)


def evaluate(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Apply a function of float64 numbers element by element, and round the result once.

    Args:
        function: Takes and returns float64 tensors; it may overwrite none of its inputs.
        inputs: Of one dtype, or float64 scalars; broadcast against each other.
    """
    dtype = inputs[0].dtype
    if len(inputs) > 1:
        dtype = torch.result_type(inputs[0], inputs[1])
        inputs = torch.broadcast_tensors(*inputs)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    out = torch.empty_like(inputs[0], dtype=dtype)
    if out.numel() <= _CHUNK or not out.is_contiguous():
        return out.copy_(function(*(one.to(torch.float64) for one in inputs)))
    parts = zip(*(one.reshape(-1).split(_CHUNK) for one in inputs), strict=True)
    for target, chunk in zip(out.view(-1).split(_CHUNK), parts, strict=True):
        target.copy_(function(*(one.to(torch.float64) for one in chunk)))
    return out


def polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the polynomial with these coefficients, the highest power first (Horner)."""
    result = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        result.add_(coefficient).mul_(x)
    return result.add_(coefficients[-1])


def power_of_two(exponent: Tensor) -> Tensor:
    """Return two to integers in float64, from -1022 to 1023."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _reduce_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return n and exp(r) - 1, where x = n * log(2) + r."""
    n = (x * 1.4426950408889634).round_()
    r = x - n * _LN2_HIGH
    r.sub_(n * _LN2_LOW)
    square = r * r
    return n, square.mul_(polynomial(r, _EXP)).add_(r)


def exp(x: Tensor) -> Tensor:
    """The exponential function."""
    n, part = _reduce_exp(x.clamp(-746.0, 710.0))
    half = (n * 0.5).floor_()
    result = part.add_(1.0).mul_(power_of_two(half)).mul_(power_of_two(n - half))
    return torch.where(x == -math.inf, 0.0, result)


def expm1(x: Tensor) -> Tensor:
    """The exponential function, less 1."""
    n, part = _reduce_exp(x.clamp(-50.0, 709.0))
    scale = power_of_two(n)
    result = part.mul_(scale).add_(scale - 1.0)
    result = torch.where(x > 709.0, exp(x), result)
    return torch.where(x == 0, x, result)


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    small = x < 2.2250738585072014e-308
    bits = torch.where(small, x * 2.0**54, x).view(torch.int64)
    # The significand is between sqrt(1/2) and sqrt(2).
    shifted = bits + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
    exponent = ((shifted >> 52) - 1023).to(torch.float64)
    exponent = torch.where(small, exponent - 54.0, exponent)
    significand = (shifted & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD
    f = significand.view(torch.float64) - 1.0
    s = f / (f + 2.0)
    square = s * s
    rest = polynomial(square, _LOG).mul_(square)
    half = (f * 0.5).mul_(f)
    result = (rest.add_(half)).mul_(s).add_(exponent * _LN2_LOW)
    result = (exponent * _LN2_HIGH).sub_((half.sub_(result)).sub_(f))
    result = torch.where(x == math.inf, x, torch.where(x == 0, -math.inf, result))
    return torch.where((x < 0) | x.isnan(), math.nan, result)


def log1p(x: Tensor) -> Tensor:
    """The logarithm of 1 + x."""
    total = x + 1.0
    lost = (x - (total - 1.0)) / total
    result = log(total) + lost
    result = torch.where((x == math.inf) | (x == 0), x, result)
    return torch.where(x == -1, -math.inf, result)


def log2(x: Tensor) -> Tensor:
    """The logarithm to the base 2."""
    return log(x) * 1.4426950408889634


def log10(x: Tensor) -> Tensor:
    """The logarithm to the base 10."""
    return log(x) * 0.4342944819032518


def exp2(x: Tensor) -> Tensor:
    """Two to the x."""
    x = x.clamp(-1080.0, 1025.0)
    n = x.round()
    _, part = _reduce_exp((x - n) * 0.6931471805599453)
    half = (n * 0.5).floor_()
    return part.add_(1.0).mul_(power_of_two(half)).mul_(power_of_two(n - half))


def sqrt(x: Tensor) -> Tensor:
    """The square root, correctly rounded.

    Torch's root on x86, from MKL, may be off by one unit in the last place; NumPy's is that of the
    processor.
    """
    if x.device.type != "cpu":
        return x.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(x.detach().numpy())))


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """The length of a vector of two numbers."""
    return sqrt(x * x + y * y)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _reciprocal(exp(-x).add_(1.0))


def _reciprocal(x: Tensor) -> Tensor:
    return torch.ones_like(x).div_(x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    grown = expm1((x.abs() * 2.0).clamp_(max=45.0))
    result = torch.copysign(grown / (grown + 2.0), x)
    return torch.where(x.isnan(), x, result)


def erf(x: Tensor) -> Tensor:
    """The error function."""
    size = x.abs()
    near = size.clamp(max=1.0)
    result = polynomial(near * near, _ERF).mul_(near)
    far = size >= 1.0
    result[far] = 1.0 - _erfc_tail(size[far].clamp_(max=6.5))
    return torch.where(x.isnan(), x, torch.copysign(result, x))


def erfc(x: Tensor) -> Tensor:
    """One less the error function."""
    result = 1.0 - erf(x)
    far = x.abs() >= 1.0
    tail = _erfc_tail(x[far].abs().clamp_(max=28.0))
    result[far] = torch.where(x[far] < 0.0, 2.0 - tail, tail)
    return torch.where(x.isnan(), x, result)


def _erfc_tail(x: Tensor) -> Tensor:
    series = polynomial((x - 3.75).div_(x + 3.75), _ERFC)
    return series.mul_(exp(-(x * x))).div_(x * 2.0 + 1.0)


def erfinv(x: Tensor) -> Tensor:
    """The inverse of the error function, from Winitzki's estimate by Halley's steps."""
    rest = 1.0 - x.abs()
    lost = log((rest * (2.0 - rest)).clamp_(min=1e-300))
    half = lost * 0.5 + 4.330746750799873  # 2 / (pi * a), with a = 0.147
    y = sqrt(sqrt(half * half - lost / 0.147) - half)
    for _ in range(3):
        # Both sides lose no digits: the function is near x or its complement near 1 - x.
        error = torch.where(rest < 0.5, rest - erfc(y), erf(y) - x.abs())
        step = error / (exp(-(y * y)) * 1.1283791670955126)
        y = y - step / (step * y + 1.0)
    result = torch.copysign(y, x)
    result = torch.where(x.abs() == 1, x * math.inf, torch.where(x == 0, x, result))
    return torch.where((x.abs() > 1) | x.isnan(), math.nan, result)


def _reduce_angle(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return r in [-pi/4, pi/4] and n modulo 4, where x = n * pi / 2 + r."""
    far = (x.abs() > _FAR_ANGLE) & x.isfinite()
    near = torch.where(far, 0.0, x)
    n = (near * 0.6366197723675814).round_()
    r = near - n * _PI_HALF[0]
    r.sub_(n * _PI_HALF[1]).sub_(n * _PI_HALF[2])
    n = torch.where(n.isfinite(), n, 0.0).to(torch.int64)
    if bool(far.any()):
        found = [_reduce_exactly(one) for one in x[far].tolist()]
        r[far] = torch.tensor([rest for rest, _ in found], dtype=torch.float64, device=x.device)
        n[far] = torch.tensor([turns for _, turns in found], device=x.device)
    return r, n & 3


def _reduce_exactly(x: float) -> tuple[float, int]:
    with mpmath.workprec(1200):
        turns = mpmath.nint(2 * x / mpmath.pi)
        return float(x - turns * mpmath.pi / 2), int(turns) % 4


def _sin_and_cos(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r, n = _reduce_angle(x)
    square = r * r
    sine = polynomial(square, _SIN).mul_(square).mul_(r).add_(r)
    cosine = polynomial(square, _COS).mul_(square).sub_(0.5).mul_(square).add_(1.0)
    return sine, cosine, n


def sin(x: Tensor) -> Tensor:
    """The sine."""
    sine, cosine, n = _sin_and_cos(x)
    result = torch.where(n & 1 == 0, sine, cosine)
    result = torch.where(n & 2 == 0, result, -result)
    return torch.where(x == 0, x, torch.where(x.isfinite(), result, math.nan))


def cos(x: Tensor) -> Tensor:
    """The cosine."""
    sine, cosine, n = _sin_and_cos(x)
    result = torch.where(n & 1 == 0, cosine, sine)
    result = torch.where((n + 1) & 2 == 0, result, -result)
    return torch.where(x.isfinite(), result, math.nan)


def tan(x: Tensor) -> Tensor:
    """The tangent."""
    sine, cosine, n = _sin_and_cos(x)
    even = n & 1 == 0
    result = torch.where(even, sine, -cosine) / torch.where(even, cosine, sine)
    return torch.where(x == 0, x, torch.where(x.isfinite(), result, math.nan))


def atan(x: Tensor) -> Tensor:
    """The inverse tangent."""
    return atan2(x, torch.ones_like(x))


def _atan_of_ratio(y: Tensor, x: Tensor) -> Tensor:
    """Return the angle of (x, y), both at least 0, one of them above 0."""
    low, high = torch.where(y > x, x, y), torch.where(y > x, y, x)
    ratio = low / high
    turned = ratio > 0.41421356237309503  # tan(pi / 8)
    t = torch.where(turned, (low - high) / (low + high), ratio)
    square = t * t
    angle = polynomial(square, _ATAN).mul_(square).mul_(t).add_(t)
    angle = torch.where(turned, angle + 0.7853981633974483, angle)
    return torch.where(y > x, 1.5707963267948966 - angle, angle)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle of the point (x, y)."""
    both = y.isinf() & x.isinf()
    height = torch.where(both, 1.0, y.abs())
    width = torch.where(both, 1.0, x.abs())
    largest = torch.where(height > width, height, width)
    width, height = (
        torch.where(largest.isinf() & (one < largest), 0.0, one) for one in (width, height)
    )
    height, width = (torch.where(one.isinf(), 1.0, one) for one in (height, width))
    origin = (height == 0) & (width == 0)
    angle = _atan_of_ratio(height, torch.where(origin, 1.0, width))
    angle = torch.where(torch.signbit(x), 3.141592653589793 - angle, angle)
    return torch.where(x.isnan() | y.isnan(), math.nan, torch.copysign(angle, y))


def asin(x: Tensor) -> Tensor:
    """The inverse sine."""
    return atan2(x, sqrt((1.0 - x) * (x + 1.0)))


def acos(x: Tensor) -> Tensor:
    """The inverse cosine."""
    return atan2(sqrt((1.0 - x) * (x + 1.0)), x)


def sinh(x: Tensor) -> Tensor:
    """The hyperbolic sine."""
    grown = expm1(x.abs().clamp(max=700.0))
    result = (grown + grown / (grown + 1.0)) * 0.5
    result = torch.where(x.abs() > 700.0, exp(x.abs() - 0.6931471805599453), result)
    return torch.where(x.isnan(), x, torch.copysign(result, x))


def cosh(x: Tensor) -> Tensor:
    """The hyperbolic cosine."""
    half = exp(x.abs() - 0.6931471805599453)
    return half + _reciprocal(half * 4.0)


def asinh(x: Tensor) -> Tensor:
    """The inverse hyperbolic sine."""
    size = x.abs().clamp(max=1e150)
    square = size * size
    result = log1p(size + square / (sqrt(square + 1.0) + 1.0))
    result = torch.where(x.abs() > 1e150, log(x.abs()) + 0.6931471805599453, result)
    return torch.where(x.isnan() | (x == 0), x, torch.copysign(result, x))


def acosh(x: Tensor) -> Tensor:
    """The inverse hyperbolic cosine."""
    over = x.clamp(1.0, 1e150) - 1.0
    result = log1p(over + sqrt(over * (over + 2.0)))
    result = torch.where(x > 1e150, log(x) + 0.6931471805599453, result)
    return torch.where(x >= 1.0, result, math.nan)


def atanh(x: Tensor) -> Tensor:
    """The inverse hyperbolic tangent."""
    size = x.abs()
    result = log1p(size * 2.0 / (1.0 - size)) * 0.5
    result = torch.where(size == 1.0, math.inf, torch.copysign(result, x).abs())
    return torch.where(size > 1.0, math.nan, torch.copysign(result, x))


def pow(x: Tensor, y: Tensor) -> Tensor:  # noqa: A001 - the name that torch gives it
    """The power, for exponents of any size."""
    size = x.abs()
    result = exp(y * log(size))
    whole = y == y.floor()
    odd = whole & (y.abs() < 2.0**53) & (y * 0.5 != (y * 0.5).floor())
    result = torch.where(odd & torch.signbit(x), -result, result)
    result = torch.where((x < 0) & x.isfinite() & ~whole, math.nan, result)
    result = torch.where((size == 1.0) & y.isinf(), 1.0, result)
    return torch.where((x == 1.0) | (y == 0.0), 1.0, result)
