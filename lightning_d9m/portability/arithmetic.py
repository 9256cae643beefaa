"""Rules for arithmetic, choices, elementary functions, sums, sums at places, and random numbers.

torch's functions of float64 numbers differ between machines in the last places, by at most two
units in the last place (``benchmarks/portable_functions.py`` measures it). If all numbers within a
bound round to one number, that is the exact value rounded, whatever torch's error was; otherwise
mpmath computes the value. For float32, rounded to 24 bits, the bound is 256 units, which mpmath
must decide for about two elements in a million. Results for float64 keep 41 bits with a bound of 8
units: mpmath decides for about one element in 130.

Random numbers are integers of torch's generator on the CPU, and exact arithmetic. Operations that
make a tensor fill it in place, so rules that fill one serve them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import mpmath
import numpy as np
import torch
from torch import Tensor

from lightning_d9m.errors import SettingError
from lightning_d9m.patches.exact_sums import round_sums
from lightning_d9m.patches.kernels.updates import add_rows
from lightning_d9m.patches.registration import accumulation_dtype
from lightning_d9m.portability.registry import RULES, Rule, along_dim, composed, rule
from lightning_d9m.portability.sums import add_terms, cut_exactly, matmul

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


RULES |= {name: partial(evaluate, name) for name in FUNCTIONS if name not in ("normal", "pow")}


# These round once, or not at all; complex numbers are refused.
_ONE_ROUNDING = "mul abs sgn _amp_update_scale_ _amp_foreach_non_finite_check_and_unscale_"
RULES |= {name: getattr(torch.ops.aten, name) for name in _ONE_ROUNDING.split()}
RULES |= {
    "mul_": Tensor.mul_,
    "rsqrt": lambda values: RULES["reciprocal"](RULES["sqrt"](values)),
    "relu": lambda values: torch.threshold(values, 0, 0),
    "floor_divide": lambda left, right: RULES["div"](left, right, rounding_mode="floor"),
    # Processors make NaNs of different signs.
    "signbit": lambda values: torch.signbit(values) & ~values.isnan(),
    "copysign": lambda values, signs: torch.copysign(
        values, torch.where(torch.as_tensor(signs).isnan(), 0.0, signs)
    ),
    # Of matrices and vectors.
    "mm": matmul,
    "bmm": matmul,
    "mv": lambda matrix, vector: matmul(matrix, vector.unsqueeze(1)).squeeze(1),
    "dot": lambda left, right: matmul(left.unsqueeze(0), right.unsqueeze(1)).view(()),
}


def view_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Show the bits of numbers; NaN gets one pattern first."""
    if values.is_floating_point() and not dtype.is_floating_point:
        values.masked_fill_(values.isnan(), math.nan)
    return torch.ops.aten.view.dtype(values, dtype)  # type: ignore[no-any-return]


def _bound_to(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Bring numbers that are converted to integers into their range, as processors do not."""
    if dtype in (None, torch.bool) or not values.is_floating_point():
        return values
    if dtype.is_floating_point or dtype.is_complex:
        return values
    limits = torch.iinfo(dtype)
    wide = torch.where(values.isnan(), 0.0, values.double())
    return wide.clamp_(float(limits.min), min(float(limits.max), 2.0**63 - 1024))


@rule("_to_copy")
def to_copy(values: Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """Convert numbers."""
    bounded = _bound_to(values, dtype)
    return torch.ops.aten._to_copy(bounded, dtype=dtype, **kwargs)  # type: ignore[no-any-return]  # noqa: SLF001


@rule("copy_")
def copy_in_place(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy numbers into a tensor."""
    return target.copy_(_bound_to(source, target.dtype), non_blocking=non_blocking)


# One rounding for each operation: a machine with fused operations rounds `a + alpha * b` once.
def _add(function: Callable[..., Tensor], left: Any, right: Any, alpha: float = 1) -> Tensor:
    return function(left, right if alpha == 1 else right * alpha)


RULES |= {"add": partial(_add, torch.add), "add_": partial(_add, Tensor.add_)}
RULES |= {"sub": partial(_add, torch.sub), "sub_": partial(_add, Tensor.sub_)}


@rule("div")
def divide(left: Any, right: Any, rounding_mode: str | None = None) -> Tensor:
    """The quotient; CUDA multiplies by the reciprocal of a number, so it gets a tensor."""
    if rounding_mode is None:
        if isinstance(right, Tensor) or not left.is_floating_point():
            return torch.div(left, right)
        return _divide_by(left.to(accumulation_dtype(left.dtype)), right).to(left.dtype)
    dtype = torch.result_type(left, right)
    # A quotient of float32 numbers is never rounded to a whole number in float64.
    quotient = torch.div(*_widen(left, right))
    return (quotient.floor_() if rounding_mode == "floor" else quotient.trunc_()).to(dtype)


def _divide_by(total: Tensor, number: float) -> Tensor:
    return total / torch.full((1,) * total.dim(), number, dtype=total.dtype, device=total.device)


def _widen(*values: Any) -> list[Tensor]:
    """Return numbers and tensors as float64 tensors."""
    (like,) = [one for one in values if isinstance(one, Tensor)][:1]
    tensors = (one if isinstance(one, Tensor) else like.new_full((), one) for one in values)
    return [one.double() for one in tensors]


def _remainder(mode: str, left: Any, right: Any) -> Tensor:
    wide, other = _widen(left, right)
    result = wide - divide(wide, other, mode) * other
    result = torch.where(other.isinf() & wide.isfinite(), wide, result)
    return result.to(torch.result_type(left, right))


RULES |= {"remainder": partial(_remainder, "floor"), "fmod": partial(_remainder, "trunc")}


def _add_scaled(
    add: Rule, combine: Rule, start: Tensor, left: Tensor, right: Tensor, value: float = 1
) -> Tensor:
    term = combine(left, right)
    if value != 1:
        term = term.mul_(value) if term.is_floating_point() else term * value
    return add(start, term)  # type: ignore[no-any-return]


for _name, _combine in (("addcmul", torch.mul), ("addcdiv", torch.div)):
    RULES[_name] = partial(_add_scaled, torch.add, _combine)
    RULES[f"{_name}_"] = partial(_add_scaled, Tensor.add_, _combine)


@rule("lerp")
def lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Linear interpolation, from the nearer end."""
    gap = end - start
    if isinstance(weight, Tensor):
        near = start + gap * weight
        return torch.where(weight.abs() < 0.5, near, end - gap * (1 - weight))
    if abs(weight) < 0.5:
        return gap.mul_(weight).add_(start)
    return end - gap.mul_(1 - weight)


@rule("reciprocal")
def reciprocal(values: Tensor) -> Tensor:
    """1 / x."""
    return torch.div(torch.ones((), device=values.device), values)


@rule("sqrt")
def sqrt(values: Tensor) -> Tensor:
    """The square root: NumPy's is the processor's; MKL's may be off by one unit."""
    dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    wide = values.detach().to(accumulation_dtype(dtype))
    if wide.device.type != "cpu":
        return wide.sqrt().to(dtype)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(wide.numpy()))).to(dtype)


@rule("pow")
def power(base: Any, exponent: Any) -> Tensor:
    """The power; whole exponents up to 3 are products."""
    if not isinstance(base, Tensor):
        base = torch.full((), base, dtype=torch.result_type(exponent, base), device="cpu").to(
            exponent.device
        )
    dtype = torch.result_type(base, exponent)
    if not isinstance(exponent, Tensor):
        simple: dict[float, Rule] = {0.5: sqrt, 1.0: torch.clone, 2.0: lambda x: x * x}
        simple[3.0] = lambda x: x * x * x
        if base.is_floating_point() and abs(float(exponent)) in simple and exponent != -3:
            found: Tensor = simple[abs(float(exponent))](base)
            return found if exponent > 0 else reciprocal(found)
        exponent = torch.full((), exponent, dtype=torch.float64, device=base.device)
    return evaluate("pow", base.double(), exponent.double(), dtype=dtype)


def _choose(function: Rule, *given: Any, **more: Any) -> Any:
    """Let torch choose among numbers; processors disagree on the greater one of 0.0 and -0.0."""
    return function(*(one + 0 if isinstance(one, Tensor) else one for one in given), **more)


for _name in ("amax", "amin", "fmax", "fmin", "max", "maximum", "min", "minimum"):
    RULES[_name] = partial(_choose, getattr(torch.ops.aten, _name))


# Our patches find the medians along a dimension.
RULES |= {
    name: lambda values, *along, find=find: NotImplemented if along else find(values + 0)
    for name, find in (("median", torch.median), ("nanmedian", torch.nanmedian))
}


# An unstable order of equal numbers is not the same everywhere.
@rule("sort")
@along_dim
def sort(
    values: Tensor, dim: int = -1, descending: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """The stable order."""
    return torch.sort(values, stable=True, dim=dim, descending=descending)


@rule("topk")
@along_dim
def topk(
    values: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any, first: int = 0
) -> tuple[Tensor, ...]:
    """Return k elements of the stable order."""
    return tuple(one.narrow(dim, first, k).contiguous() for one in sort(values, dim, largest))


@rule("kthvalue")
@along_dim
def kthvalue(values: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, ...]:
    """The k-th of the stable order."""
    found: tuple[Tensor, ...] = topk(values, 1, dim, largest=False, first=k - 1)
    return found if keepdim else tuple(one.squeeze(dim) for one in found)


def _converting(torchs: Callable[..., Tensor]) -> Callable[[Rule], Rule]:
    """Convert numbers to the dtype of the result first; leave whole numbers to torch."""

    def wrap(function: Rule) -> Rule:
        @wraps(function)
        def call(values: Tensor, *args: Any, dtype: torch.dtype | None = None, **more: Any) -> Any:
            if dtype is not None and dtype != values.dtype:
                values = to_copy(values, dtype=dtype)
            if values.is_floating_point():
                return function(values, *args, **more)
            return torchs(values, *args, dtype=dtype, **more)

        return call

    return wrap


@rule("sum")
@_converting(torch.sum)
def sum_values(values: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The exact sum, rounded once."""
    return add_terms(values, dim, keepdim=keepdim, dtype=values.dtype)


@rule("var")
def variance(
    values: Tensor,
    dim: Sequence[int] | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    """The variance; torch takes standard deviations and means apart."""
    if isinstance(dim, bool):  # the overload without dimensions
        dim, unbiased = None, dim
    dtype = accumulation_dtype(values.dtype)
    count = math.prod(values.shape[one] for one in dim or range(values.dim()))
    center = _divide_by(add_terms(values, dim, keepdim=True, dtype=dtype), count)
    gaps = values.double() - center
    total = add_terms(gaps.mul_(gaps), dim, keepdim=keepdim, dtype=dtype)
    freedom = count - (unbiased if correction is None else correction)
    return _divide_by(total, max(freedom, 0)).to(values.dtype)


@rule("linalg_vector_norm")
def vector_norm(
    values: Tensor,
    ord: float = 2,  # noqa: A002 - torch's
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The root of the exact sum of squares; torch takes other norms apart."""
    if ord != 2:
        return NotImplemented
    dtype = dtype or values.dtype
    wide, dims = values.to(dtype).double(), [dim] if isinstance(dim, int) else dim
    total = add_terms(wide * wide, dims, keepdim=keepdim, dtype=accumulation_dtype(dtype))
    return sqrt(total).to(dtype)


@rule("cumsum")
@along_dim
@_converting(torch.cumsum)
def cumsum(values: Tensor, dim: int) -> Tensor:
    """The sum of the values up to each one, rounded once."""
    finite = values.isfinite()
    pieces, tops = cut_exactly(torch.where(finite, values.double(), 0.0), dim)
    sums = round_sums([piece.cumsum(dim) for piece in pieces], tops, values.dtype)
    return sums + torch.where(finite, 0.0, values).cumsum(dim)


@rule("cumprod")
@along_dim
@_converting(torch.cumprod)
def cumprod(values: Tensor, dim: int) -> Tensor:
    """The product of the values up to each one, by doubling."""
    result, step, length = values.clone(), 1, values.shape[dim]
    while step < length:
        later = result.narrow(dim, step, length - step)
        later.copy_(later * result.narrow(dim, 0, length - step))
        step *= 2
    return result


@rule("prod")
@along_dim
@_converting(torch.prod)
def product(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The last one of the products of the values up to each one."""
    rows, axis = (values.reshape(-1), 0) if dim is None else (values, dim)
    last: Tensor = cumprod(rows, axis).select(axis, -1).clone()
    return last.unsqueeze(axis) if keepdim else last


@rule("arange")
def arange(*given: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Whole numbers; torch makes others from these."""
    if any(isinstance(one, float) for one in given) if dtype is None else dtype.is_floating_point:
        return NotImplemented
    return torch.arange(*given, dtype=dtype, **kwargs)


composed("addbmm")(
    lambda start, left, right, **factors: torch.addmm(
        start, left.transpose(0, 1).flatten(1), right.flatten(0, 1), **factors
    )
)


def _add_at(out: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Add values to places of a flattened tensor."""
    out = out.clone(memory_format=torch.contiguous_format)
    terms = values.expand(places.shape).reshape(-1).to(out.dtype)
    add_rows(out.view(-1), places.reshape(-1), terms, include=True)
    return out.add_(0.0)


def _number(values: Tensor) -> Tensor:
    """Return the place of each element: what torch selects from them are the selected places."""
    return torch.arange(values.numel(), device=values.device).view(values.shape)


@rule("scatter_add")
def scatter_add(values: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Add to chosen places."""
    used = source[tuple(slice(size) for size in index.shape)]
    return _add_at(values, _number(values).gather(dim, index), used)


@rule("scatter_reduce")
def scatter_reduce(
    values: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Reduce the terms of each place."""
    if reduce == "prod":
        return NotImplemented
    if reduce in ("amax", "amin"):
        given = (values, dim, index, src, reduce)
        return torch.scatter_reduce(*given, include_self=include_self) + 0
    start = values if include_self else values.scatter(dim, index, 0)
    total = scatter_add(start, dim, index, src)
    if reduce == "sum":
        return total
    ones = (torch.ones_like(values), dim, index, torch.ones_like(src), "sum")
    counts = torch.scatter_reduce(*ones, include_self=include_self).clamp(min=1)
    return torch.div(total, counts)


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(
    values: Tensor, indices: Sequence[Any], source: Tensor, accumulate: bool = False, *_: Any
) -> Tensor:
    """Write to, or add to, indexed places."""
    if not accumulate:
        return torch.index_put(values, list(indices), source)
    return _add_at(values, torch.ops.aten.index(_number(values), list(indices)), source)


def _pool_backward(
    dims: int, gradient: Tensor, values: Tensor, kernel: Sequence[int], *given: Any
) -> Tensor:
    """Add the gradients of windows to their places."""
    stride, _, dilation, _, indices = given
    flat = values.new_zeros(values.shape).flatten(-dims)
    given = (flat, -1, indices.flatten(-dims), gradient.flatten(-dims))
    apart = max(dilation) == 1 and min(stride or kernel) >= max(kernel)
    found = torch.scatter(*given) if apart else scatter_add(*given)
    return found.view(values.shape)


for _dims in (2, 3):
    RULES[f"max_pool{_dims}d_with_indices_backward"] = partial(_pool_backward, _dims)


def draw(size: Any, generator: torch.Generator | None, bits: int = 53) -> Tensor:
    """Return float64 numbers in [0, 1) that have so many bits, drawn on the CPU."""
    if generator is not None and generator.device.type != "cpu":
        raise SettingError(
            f"A generator is on {generator.device}; with portable bits, numbers are drawn on the "
            "CPU. Make it with torch.Generator()."
        )
    # The same on every machine: one draw of the Mersenne Twister for each number, in order.
    drawn = torch.empty(size, dtype=torch.int64, device="cpu").random_(
        0, 2**bits, generator=generator
    )
    return drawn.double() * 2.0**-bits


@rule("uniform")
def uniform(values: Tensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Tensor:
    """Numbers between two bounds, of as many bits as the dtype has."""
    bits = {torch.float64: 53, torch.bfloat16: 8, torch.float16: 11}.get(values.dtype, 24)
    return (draw(values.shape, generator, bits) * (high - low) + low).to(values)


@rule("normal_")
def normal_in_place(
    values: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None
) -> Tensor:
    """Fill a tensor with normal numbers."""
    radius, angle = 1.0 - draw((2, *values.shape), generator)
    angle *= 6.283185307179586
    drawn = evaluate("normal", radius, angle, dtype=accumulation_dtype(values.dtype))
    return values.copy_(drawn.double() * std + mean)


@rule("bernoulli_")
def bernoulli_in_place(values: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    """Fill a tensor with ones with a probability, and else with zeros."""
    chance = p.to("cpu", torch.float64) if isinstance(p, Tensor) else p
    return values.copy_(draw(values.shape, generator) < chance)


@rule("exponential")
def exponential(values: Tensor, lambd: float = 1, *, generator: Any = None) -> Tensor:
    """Exponential numbers."""
    drawn = -draw(values.shape, generator)
    return (evaluate("log1p", drawn, dtype=accumulation_dtype(values.dtype)) / -lambd).to(values)


@rule("multinomial")
def multinomial(
    weights: Tensor, count: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """Draw indices by weight: with replacement by the sums, else by exponential races."""
    rows = torch.atleast_2d(weights).to("cpu", torch.float64)
    if replacement:
        sums = cumsum(rows, 1)
        places = draw((len(rows), count), generator) * sums[:, -1:]
        result = torch.searchsorted(sums, places, right=True).clamp_(max=rows.shape[1] - 1)
    else:
        times = exponential(rows, generator=generator) / rows
        result = torch.sort(times, stable=True, dim=1)[1][:, :count].contiguous()
    return result.to(weights.device).view(*weights.shape[:-1], count)


@rule("randperm")
def permute(
    n: int, *, generator: Any = None, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    """A permutation, drawn on the CPU and moved."""
    return torch.randperm(n, generator=generator, dtype=dtype or torch.int64, device="cpu").to(
        device or "cpu"
    )


@rule("random_")
def random_in_place(values: Tensor, *args: Any, generator: Any = None) -> Tensor:
    """Fill a tensor with whole numbers, drawn on the CPU."""
    drawn = torch.empty(values.shape, dtype=values.dtype, device="cpu")
    return values.copy_(drawn.random_(*args, generator=generator))


@composed("native_dropout")
def native_dropout(values: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout, and its mask."""
    if not train or p == 0:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    kept = torch.empty_like(values).bernoulli_(1 - p)
    # As dropout on a CPU does it; `+ (p == 1)` keeps 0 / 0 away.
    return values * kept.div(1 - p + (p == 1)), kept.bool()
