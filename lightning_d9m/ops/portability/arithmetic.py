"""Rules for arithmetic, choices, elementary functions, sums, and sums at places."""

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.ops.patches.kernels.updates import update_rows
from lightning_d9m.ops.patches.registration import accumulation_dtype, require
from lightning_d9m.ops.portability import kernels
from lightning_d9m.ops.portability.formulas import FUNCTIONS
from lightning_d9m.ops.portability.kernels import add, widen
from lightning_d9m.ops.portability.registry import RULES, Rule, along_dim, composed, rule


def evaluate(name: str, *inputs: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Apply a function element by element.

    Args:
        name: One of ``FUNCTIONS``.
        inputs: Tensors and numbers, broadcast against each other.
        dtype: The result's, by default the inputs' or else torch's default.
    """
    if dtype is None:
        dtype = inputs[0].dtype if len(inputs) == 1 else torch.result_type(*inputs)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    # A function of 16 bits is that of float32, rounded once more.
    # A function of float32 still computes in float64 inside, see `formulas.py`.
    working = torch.float64 if dtype == torch.float64 else torch.float32
    devices = [one.device for one in inputs if isinstance(one, Tensor)]
    device = next((one for one in devices if one.type != "cpu"), devices[0])
    # Torch rounds a divisor to 16 bits before it takes a rest, and keeps the digits of others.
    first = dtype if name in {"fmod", "remainder"} else working
    given = [torch.as_tensor(one, dtype=first, device=device).to(working) for one in inputs]
    if len(given) > 1:
        given = [*torch.broadcast_tensors(*given)]
    return kernels.compute(name, **dict(zip("xy", given, strict=False)))[0].to(dtype)


RULES |= {name: partial(evaluate, name) for name in FUNCTIONS.keys() - {"normal", "pow", "gelu"}}


def _evaluate_gelu(name: str, *given: Tensor, approximate: str = "none") -> Any:
    """Torch takes the approximation apart."""
    return NotImplemented if approximate != "none" else evaluate(name, *given)


RULES |= {name: partial(_evaluate_gelu, name) for name in ("gelu", "gelu_backward")}

_read_places: Callable[..., Tensor] = torch.ops.aten.index

# These round once, or not at all; complex numbers are refused.
_ONE_ROUNDING = "mul abs sgn _amp_update_scale_ _amp_foreach_non_finite_check_and_unscale_"
RULES |= {name: getattr(torch.ops.aten, name) for name in _ONE_ROUNDING.split()}
RULES |= {
    "mul_": Tensor.mul_,
    "rsqrt": lambda values: RULES["reciprocal"](RULES["sqrt"](values)),
    "relu": lambda values: torch.threshold(values, 0, 0),
    # Processors make NaNs of different signs.
    "signbit": lambda values: torch.signbit(values) & ~values.isnan(),
    "copysign": lambda values, signs: torch.copysign(
        values, signs.masked_fill(signs.isnan(), 0) if isinstance(signs, Tensor) else signs
    ),
}


def _bound_to(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Bring numbers that are converted to integers into their range, as processors do not."""
    if dtype in (None, torch.bool) or not values.is_floating_point():
        return values
    if dtype.is_floating_point or dtype.is_complex:
        return values
    # C leaves such a conversion undefined: x86 gives the least integer, ARM and CUDA the nearest
    # one.
    limits = torch.iinfo(dtype)
    wide = torch.where(values.isnan(), 0.0, values.double())
    # The greatest float64 below 2**63, to which the limit of int64 would be rounded.
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
    """The quotient; CUDA multiplies by the reciprocal of a number on the CPU."""
    if rounding_mode == "floor":
        return evaluate("floor_divide", left, right)
    if rounding_mode is None:
        if isinstance(right, Tensor):
            return torch.div(left, right if left.device.type == "cpu" else right.to(left.device))
        if not left.is_floating_point():
            left = left.to(torch.get_default_dtype())
        wide = left.to(accumulation_dtype(left.dtype))
        return torch.div(wide, wide.new_full((), right)).to(left.dtype)
    return divide(left, right).trunc_()


def _add_scaled(
    combine: Rule, start: Tensor, left: Tensor, right: Tensor, value: float = 1
) -> Tensor:
    term: Tensor = combine(left, right)
    return start + (term if value == 1 else term * value)


RULES |= {"addcmul": partial(_add_scaled, torch.mul), "addcdiv": partial(_add_scaled, divide)}


@rule("reciprocal")
def reciprocal(values: Tensor) -> Tensor:
    """1 / x."""
    kind = values.dtype if values.is_floating_point() else None  # a number keeps its type, too
    return torch.div(torch.ones((), dtype=kind, device=values.device), values)


@rule("pow")
def power(base: Any, exponent: Any) -> Tensor:
    """The power; whole exponents up to 3 are products."""
    dtype, is_number = torch.result_type(base, exponent), not isinstance(exponent, Tensor)
    if is_number:
        simple: dict[float, Rule] = {0.5: RULES["sqrt"], 1.0: torch.clone, 2.0: lambda x: x * x}
        simple[3.0] = lambda x: x * x * x
        # Torch's own cases. It has none for -3: 1 / x**3 would be rounded three times.
        if base.is_floating_point() and abs(float(exponent)) in simple and exponent != -3:
            found: Tensor = simple[abs(float(exponent))](base)
            return found if exponent > 0 else reciprocal(found)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    # An exponent keeps all of its digits.
    wide = is_number or exponent.dtype == torch.float64
    return evaluate("pow", base, exponent, dtype=torch.float64 if wide else dtype).to(dtype)


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


def _list_dims(values: Tensor, dim: Any) -> list[int]:
    """Return the dimensions that an argument names, from 0; None and [] name all."""
    count = values.dim()
    given = [dim] if isinstance(dim, int) else dim or range(count)
    return sorted({one % count for one in given}) if count else []


@rule("sum")
@_converting(torch.sum)
def sum_values(values: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The sum over dimensions."""
    return add(widen(values), _list_dims(values, dim), keepdim=keepdim).to(values.dtype)


@rule("cumsum")
@along_dim
@_converting(torch.cumsum)
def cumsum(values: Tensor, dim: int) -> Tensor:
    """The sum of the values up to each one, in float64 and in order, as torch adds on the CPU."""
    # CUDA's scan adds in another order.
    scan = torch.cumsum if values.device.type == "cpu" else add_running
    return scan(values.double(), dim).to(values.dtype)


def add_running(x: Tensor, dim: int) -> Tensor:
    """Return the sum up to each element, in order, from 0: the sum of -0.0 is 0.0."""
    first = torch.zeros_like(x.select(dim, 0))
    return torch.stack([*accumulate(x.unbind(dim), initial=first)][1:], dim)


@rule("cumprod")
@along_dim
@_converting(torch.cumprod)
def cumprod(values: Tensor, dim: int) -> Tensor:
    """The product of the values up to each one, by doubling."""
    # By doubling: passes over all, and as few as the length has digits.
    result, step, length = values.clone(), 1, values.shape[dim]
    while step < length:
        later = result.narrow(dim, step, length - step)
        later.copy_(later * result.narrow(dim, 0, length - step))
        step *= 2
    return result


@rule("prod")
@along_dim
@_converting(torch.prod)
def multiply_all(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The last one of the products of the values up to each one."""
    # By `cumprod`, since it has a fixed order already, and its last element is the product.
    rows, axis = (values.reshape(-1), 0) if dim is None else (values, dim)
    last: Tensor = cumprod(rows, axis).select(axis, -1).clone()
    return last.unsqueeze(axis) if keepdim else last


@rule("arange")
def arange(*given: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Whole numbers; torch makes others from these."""
    if any(isinstance(one, float) for one in given) if dtype is None else dtype.is_floating_point:
        return NotImplemented
    return torch.arange(*given, dtype=dtype, **kwargs)


@composed("var")
def variance(
    values: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    """The variance; torch takes standard deviations and means apart."""
    if isinstance(dim, bool):  # the overload without dimensions
        dim, unbiased = None, dim
    wide = widen(values)
    gaps = wide - wide.mean(dim, keepdim=True)
    freedom: float = math.prod(values.shape[one] for one in _list_dims(values, dim))
    freedom -= unbiased if correction is None else correction
    return ((gaps * gaps).sum(dim, keepdim=keepdim) / max(freedom, 0)).to(values.dtype)


composed("addbmm")(
    lambda start, left, right, **factors: torch.addmm(
        start, left.transpose(0, 1).flatten(1), right.flatten(0, 1), **factors
    )
)


@rule("scatter_reduce")
def scatter_reduce(values: Tensor, dim: int, index: Tensor, *given: Any, **more: Any) -> Any:
    """Choose a term for each place; our patches add and multiply."""
    if given[1] not in ("amax", "amin"):
        return NotImplemented
    # A maximum of 0.0 and -0.0 may be either one; adding 0 makes it 0.0.
    return torch.scatter_reduce(values, dim, index, *given, **more) + 0


@rule("index", "_unsafe_index")
def index(values: Tensor, indices: Sequence[Any]) -> Tensor:
    """Read indexed places: those of whole numbers in all dimensions at one place in memory each.

    Torch reads all indices again for each element, which takes up to 20 times as long. Torch's
    decompositions of paddings and samples of images read so, all samples and channels.
    """
    given = [one for one in indices if one is not None and one.dtype in (torch.int32, torch.int64)]
    # On a device the checks below would wait for it.
    if not (values.is_cpu and 1 < len(given) == len(indices) == values.dim()):
        return _read_places(values, list(indices))
    shape, kept = torch.broadcast_shapes(*(one.shape for one in given)), 0
    # Dimensions of which each element is read in its place, as samples and channels are.
    while len(shape) == len(given) > kept + 1 and _is_range(given[kept], values.shape[kept], kept):
        kept += 1
    place = torch.zeros((), dtype=torch.int64, device="cpu")  # whatever the default device is
    for size, one in zip(values.shape[kept:], given[kept:], strict=True):
        if not bool(((one >= -size) & (one < size)).all()):
            return _read_places(values, given)  # which raises its error
        place = place * size + torch.where(one < 0, one + size, one)
    places = place.expand(shape).flatten(kept)
    return values.flatten(kept).gather(kept, places).view(shape)


def _is_range(places: Tensor, size: int, dim: int) -> bool:
    """Return whether an index has the numbers of a dimension in this dimension."""
    shape = [size if one == dim else 1 for one in range(places.dim())]
    return [*places.shape] == shape and bool(
        (places.flatten() == torch.arange(size, device="cpu")).all()
    )


@rule("index_put_", "_index_put_impl_")
def index_put_in_place(
    values: Tensor, indices: Sequence[Any], source: Tensor, accumulate: bool = False, *_: Any
) -> Tensor:
    """Write to indexed places, or add to them, by exact sums."""
    if not accumulate:
        return torch.ops.aten.index_put_(values, list(indices), source)  # type: ignore[no-any-return]
    require(source.dtype == values.dtype)
    # A mask stands for as many dimensions as it has.
    masks = [one for one in indices if one is not None and one.dtype in (torch.bool, torch.uint8)]
    dims = len(indices) - len(masks) + sum(one.dim() for one in masks)
    sizes, rest = values.shape[:dims], values.shape[dims:]
    rows = torch.zeros((), dtype=torch.int64, device="cpu")
    for place, size in enumerate(sizes, 1 - dims):
        # The same indices, whatever mixture of slices, masks and negative numbers they are, find
        # the place of each term along a dimension among the numbers of this dimension, which
        # repeat along the others without memory.
        numbers = torch.arange(size, device=values.device).view(-1, *[1] * -place).expand(sizes)
        rows = rows * size + _read_places(numbers, list(indices))
    out, width = values.contiguous(), math.prod(rest)
    terms = source.expand((*rows.shape, *rest)).reshape(rows.numel(), width)
    update_rows(out.view(math.prod(sizes), width), rows.flatten(), terms, "sum")
    return values if out is values else values.copy_(out)


@rule("index_put", "_unsafe_index_put")
def index_put(values: Tensor, *given: Any, **named: Any) -> Tensor:
    """Return a copy with what is written or added."""
    return index_put_in_place(values.clone(), *given, **named)
