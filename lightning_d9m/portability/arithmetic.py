"""Rules for arithmetic, comparisons that choose, elementary functions, and sums."""

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.exact_sums import (
    cut_terms,
    find_cuts,
    plan_pieces,
    read_exponents,
)
from lightning_d9m.portability import functions
from lightning_d9m.portability.functions import evaluate
from lightning_d9m.portability.products import matmul
from lightning_d9m.portability.registry import RULES, Rule, along_dim, as_tensor, composed, rule
from lightning_d9m.portability.sums import add_terms

_FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf", "erfc"),
    *(
        "erfinv",
        "exp",
        "exp2",
        "expm1",
        "hypot",
        "log",
        "log10",
        "log1p",
        "log2",
        "sigmoid",
        "sin",
        "sinh",
    ),
    *("silu", "tan", "tanh"),
)
RULES.update({name: partial(evaluate, getattr(functions, name)) for name in _FUNCTIONS})


# These round once, or not at all; complex numbers are refused.
RULES |= {
    name: getattr(torch.ops.aten, name) for name in ("mul", "abs", "sgn", "_amp_update_scale_")
}
RULES["mul_"] = Tensor.mul_


# Processors make NaNs of different signs, and convert numbers out of range differently.
@rule("signbit")
def signbit(values: Tensor) -> Tensor:
    """Whether a number is below 0, or -0.0; False for NaN."""
    return torch.signbit(values) & ~values.isnan()


@rule("copysign")
def copysign(values: Tensor, signs: Any) -> Tensor:
    """The values with other signs."""
    if isinstance(signs, Tensor):
        signs = torch.where(signs.isnan(), 0.0, signs)
    return torch.copysign(values, signs)


def view_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Show the bits of numbers; NaN gets one pattern first."""
    if values.is_floating_point() and not dtype.is_floating_point:
        values.masked_fill_(values.isnan(), math.nan)
    return torch.ops.aten.view.dtype(values, dtype)  # type: ignore[no-any-return]


def _bound_to(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Bring numbers that are converted to integers into their range; NaN becomes 0."""
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return values
    if not values.is_floating_point():
        return values
    limits = torch.iinfo(dtype)
    wide = torch.where(values.isnan(), 0.0, values.double())
    highest = float(limits.max) if limits.bits < 64 else 2.0**63 - 1024
    return wide.clamp_(float(limits.min), highest)


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


@rule("rsub")
def subtract_from(left: Tensor, right: Any, alpha: float = 1) -> Tensor:
    """``right - alpha * left``."""
    return torch.sub(as_tensor(right, left), left if alpha == 1 else left * alpha)


@rule("div")
def divide(left: Any, right: Any, rounding_mode: str | None = None) -> Tensor:
    """The quotient; CUDA multiplies by the reciprocal of a number, so it gets a tensor."""
    if rounding_mode is None:
        if isinstance(right, Tensor) or not left.is_floating_point():
            return torch.div(left, right)
        return torch.div(left, torch.full((1,) * left.dim(), right).to(left))
    dtype = torch.result_type(left, right)
    if not dtype.is_floating_point:
        return torch.div(left, right, rounding_mode=rounding_mode)
    # A quotient of float32 numbers is never rounded to a whole number in float64.
    wide = (as_tensor(one, right if one is left else left).double() for one in (left, right))
    quotient = torch.div(*wide)
    return (quotient.floor_() if rounding_mode == "floor" else quotient.trunc_()).to(dtype)


@rule("floor_divide")
def floor_divide(left: Any, right: Any) -> Tensor:
    """The quotient, rounded down."""
    return divide(left, right, rounding_mode="floor")


def _remainder(mode: str, left: Any, right: Any) -> Tensor:
    dtype = torch.result_type(left, right)
    if not dtype.is_floating_point:
        return (torch.remainder if mode == "floor" else torch.fmod)(left, right)
    wide, other = (as_tensor(one, right if one is left else left).double() for one in (left, right))
    result = wide - divide(wide, other, mode) * other
    return torch.where(other.isinf() & wide.isfinite(), wide, result).to(dtype)


RULES |= {"remainder": partial(_remainder, "floor"), "fmod": partial(_remainder, "trunc")}


def _add_scaled(
    add: Rule, combine: Rule, start: Tensor, left: Tensor, right: Tensor, value: float = 1
) -> Tensor:
    term = combine(left, right)
    return add(start, term if value == 1 else term * value)  # type: ignore[no-any-return]


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
    """The square root."""
    if values.dtype in (torch.float32, torch.float64):
        return functions.sqrt(values)
    return evaluate(functions.sqrt, values)


@rule("rsqrt")
def rsqrt(values: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return reciprocal(sqrt(values))


@rule("pow")
def power(base: Any, exponent: Any) -> Tensor:
    """The power; whole exponents up to 3 are products."""
    if not isinstance(base, Tensor):
        base = torch.full((), base, dtype=torch.result_type(exponent, base)).to(exponent.device)
    dtype = torch.result_type(base, exponent)
    if not dtype.is_floating_point:
        return torch.pow(base, exponent)
    if not isinstance(exponent, Tensor):
        simple: dict[float, Callable[[], Tensor]] = {
            1.0: base.clone,
            2.0: lambda: base * base,
            3.0: lambda: base * base * base,
            0.5: lambda: sqrt(base),
            -0.5: lambda: rsqrt(base),
            -1.0: lambda: reciprocal(base),
            -2.0: lambda: reciprocal(base * base),
        }
        if base.is_floating_point() and float(exponent) in simple:
            return simple[float(exponent)]()
        exponent = torch.full((), exponent, dtype=torch.float64, device=base.device)
    return evaluate(functions.pow, base.double(), exponent.double()).to(dtype)


# Processors disagree on the greater one of 0.0 and -0.0.
@rule("relu")
def relu(values: Tensor) -> Tensor:
    """The values that are positive, else 0."""
    return torch.threshold(values, 0, 0)


def _choose(better: Callable[..., Tensor], skips_nan: bool, left: Tensor, right: Tensor) -> Tensor:
    """Return the better one of two numbers; of equal ones the left one."""
    right_wins = better(right, left) | (left if skips_nan else right).isnan()
    return torch.where(right_wins, right, left)


RULES |= {"maximum": partial(_choose, torch.gt, False), "fmax": partial(_choose, torch.gt, True)}
RULES |= {"minimum": partial(_choose, torch.lt, False), "fmin": partial(_choose, torch.lt, True)}


def _find_extreme(name: str, values: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """Return the greatest or least values; zero has one sign."""
    found: Tensor = getattr(torch, name)(values, list(dim), keepdim=keepdim)
    return found + 0


RULES |= {name: partial(_find_extreme, name) for name in ("amax", "amin")}


def _choose_at(values: Tensor, index: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Return the values at positions, which have the size 1 along a dimension, and these."""
    found = (values.gather(dim, index), index)
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def _find_first(name: str, values: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    find = getattr(torch, name)
    if dim is None:
        return find(values) + 0
    return along_dim(_choose_at)(values, find(values, dim, keepdim=True)[1], dim, keepdim)


RULES |= {name: partial(_find_first, name) for name in ("max", "min")}


@rule("sort")
@along_dim
def sort(
    values: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The stable order: an unstable one is not the same everywhere."""
    del stable
    return torch.sort(values, stable=True, dim=dim, descending=descending)


@rule("topk")
@along_dim
def topk(
    values: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any
) -> tuple[Tensor, ...]:
    """The first k of the stable order."""
    return tuple(one.narrow(dim, 0, k).contiguous() for one in sort(values, dim, largest))


@rule("kthvalue")
@along_dim
def kthvalue(values: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th of the stable order."""
    return _choose_at(values, sort(values, dim)[1].narrow(dim, k - 1, 1), dim, keepdim)


@rule("median")
@along_dim
def median(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower median, or NaN."""
    if dim is None:
        return median(values.reshape(-1), 0)[0]
    index = sort(values, dim)[1].narrow(dim, (values.shape[dim] - 1) // 2, 1)
    missing = values.isnan()
    first = missing.int().argmax(dim, keepdim=True)
    return _choose_at(values, torch.where(missing.any(dim, True), first, index), dim, keepdim)


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
def sum_values(values: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The exact sum, rounded once."""
    return add_terms(values, dim, keepdim=keepdim, dtype=values.dtype)


@rule("mean")
def mean(
    values: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The exact sum, divided by the number of terms."""
    dtype = dtype or values.dtype
    total = sum_values(values, dim, keepdim, dtype=at_least_32(dtype))
    return _divide_by(total, _count(values, dim)).to(dtype)


def _divide_by(total: Tensor, number: float) -> Tensor:
    return total / torch.full((1,) * total.dim(), number).to(total)


def spread(
    values: Tensor, dim: Sequence[int] | None, correction: float = 1
) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean, with the dimensions kept, in float32 or float64."""
    dtype = at_least_32(values.dtype)
    center = mean(values, dim, keepdim=True, dtype=dtype)
    gaps = values.double() - center
    total = add_terms(gaps.mul_(gaps), dim, keepdim=True, dtype=dtype)
    return _divide_by(total, max(_count(values, dim) - correction, 0)), center


def _variance(
    root: bool,
    with_mean: bool,
    values: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    result, center = spread(values, dim, 1 if correction is None else correction)
    shown = [one.to(values.dtype) for one in (sqrt(result) if root else result, center)]
    if not keepdim and values.dim():
        shown = [one.squeeze(tuple(dim or range(values.dim()))) for one in shown]
    return tuple(shown) if with_mean else shown[0]


RULES |= {
    "var": partial(_variance, False, False),
    "std": partial(_variance, True, False),
    "var_mean": partial(_variance, False, True),
    "std_mean": partial(_variance, True, True),
}


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
    values = values if dtype is None else values.to(dtype)
    wide = values.double()
    dims = [dim] if isinstance(dim, int) else dim
    total = add_terms(wide * wide, dims, keepdim=keepdim, dtype=at_least_32(values.dtype))
    return sqrt(total).to(values.dtype)


@rule("cumsum")
@along_dim
@_converting(torch.cumsum)
def cumsum(values: Tensor, dim: int) -> Tensor:
    """The exact sum of the values up to each one, rounded once (twice to 16 bits)."""
    terms = values.double()
    finite = terms.isfinite()
    sums = [torch.where(finite, 0.0, terms).cumsum(dim)]
    rest = torch.where(finite, terms, 0.0)
    pieces = plan_pieces(values.dtype, values.shape[dim])._replace(number=1)
    while rest.any():  # the sums of pieces are exact
        cuts = find_cuts(read_exponents(rest).amax(dim, keepdim=True), pieces, values.dtype)
        piece = cut_terms(rest, cuts)[0]
        piece = piece if cuts.scale is None else piece / cuts.scale
        sums.append(piece.cumsum(dim))
        rest = rest - piece
    return add_terms(torch.stack(sums), [0], keepdim=False, dtype=values.dtype)


@rule("prod")
@_converting(torch.prod)
def product(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The product of neighbors, of these products, and so on."""
    rest = values.reshape(-1) if dim is None or not values.dim() else values.movedim(dim, -1)
    if not rest.shape[-1]:
        rest = torch.ones((*rest.shape[:-1], 1)).to(values)
    while rest.shape[-1] > 1:
        odd = rest[..., -1:] if rest.shape[-1] % 2 else rest[..., :0]
        even = rest[..., : rest.shape[-1] // 2 * 2]
        rest = torch.cat([even[..., 0::2] * even[..., 1::2], odd], -1)
    keepdim = keepdim and dim is not None and values.dim() > 0
    return rest.movedim(-1, dim).clone() if keepdim else rest[..., 0].clone()  # type: ignore[arg-type]


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


RULES |= {"mm": matmul, "bmm": matmul}


@rule("dot")
def dot(left: Tensor, right: Tensor) -> Tensor:
    """The exact sum of products, rounded once."""
    return matmul(left.unsqueeze(0), right.unsqueeze(1)).view(())


@rule("mv")
def multiply_vector(matrix: Tensor, vector: Tensor) -> Tensor:
    """The product of a matrix and a vector."""
    return matmul(matrix, vector.unsqueeze(1)).squeeze(1)


@rule("arange")
def arange(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """Equal steps; multiplied and added, each rounded."""
    fractions = (
        any(isinstance(one, float) for one in args) if dtype is None else dtype.is_floating_point
    )
    if not fractions:
        return torch.arange(*args, dtype=dtype, **kwargs)
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    places = torch.arange(max(0, math.ceil((end - start) / step)), dtype=torch.float64)
    result = torch.add(places * float(step), float(start))
    return result.to(dtype=dtype or torch.get_default_dtype(), device=kwargs.get("device"))


@composed("addbmm")
def add_products(
    start: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """The sum of a batch of products, which is one product, that is added to ``start``."""
    rows, columns = left.transpose(0, 1).flatten(1), right.flatten(0, 1)
    return torch.ops.aten.addmm(start, rows, columns, beta=beta, alpha=alpha)  # type: ignore[no-any-return]


def _count(values: Tensor, dim: Sequence[int] | None) -> int:
    return math.prod(values.shape[one] for one in dim or range(values.dim())) if values.dim() else 1


def at_least_32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
