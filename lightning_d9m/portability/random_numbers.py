"""Rules for random numbers: integers of torch's generator on the CPU, and exact arithmetic."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.errors import SettingError
from lightning_d9m.portability import functions
from lightning_d9m.portability.registry import RULES, composed, rule


def draw(size: Any, generator: torch.Generator | None, bits: int = 53) -> Tensor:
    """Return whole numbers below ``2**bits``, drawn on the CPU."""
    if generator is not None and generator.device.type != "cpu":
        raise SettingError(
            f"A generator is on {generator.device}; with portable bits, numbers are drawn on the "
            "CPU. Make it with torch.Generator()."
        )
    # The same on every machine: one draw of the Mersenne Twister for each number, in order.
    return torch.empty(size, dtype=torch.int64).random_(0, 2**bits, generator=generator)


def _draw_uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return float64 numbers in [0, 1) that the dtype of a tensor holds."""
    bits = {torch.float64: 53, torch.bfloat16: 8, torch.float16: 11}.get(like.dtype, 24)
    return draw(like.shape, generator, bits).double() * 2.0**-bits


def _draw_normal(size: Any, generator: torch.Generator | None) -> Tensor:
    """Return float64 numbers from the standard normal distribution (Box and Muller)."""
    size = torch.Size(size)
    pairs = (size.numel() + 1) // 2
    first = 1.0 - draw((2, pairs), generator).double() * 2.0**-53
    radius = functions.sqrt(functions.log(first[0]) * -2.0)
    angle = first[1] * 6.283185307179586
    both = torch.cat([radius * functions.cos(angle), radius * functions.sin(angle)])
    return both[: size.numel()].reshape(size)


@rule("uniform")
def uniform(
    values: Tensor, low: float = 0, high: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Numbers between two bounds."""
    return (_draw_uniform(values, generator) * (high - low) + low).to(values)


@rule("normal")
def normal(
    mean: Any = 0,
    std: Any = 1,
    size: Any = None,
    *,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> Tensor:
    """Normal numbers; the means or the deviations may be tensors."""
    if size is not None:
        numbers = _draw_normal(size, generator) * std + mean
        return _place(numbers, **kwargs)
    like = mean if isinstance(mean, Tensor) else std
    shape = torch.broadcast_shapes(*(one.shape for one in (mean, std) if isinstance(one, Tensor)))
    numbers = _draw_normal(shape, generator).to(like)
    result: Tensor = numbers * std + mean
    return result


@rule("normal_")
def normal_in_place(
    values: Tensor, mean: float = 0, std: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Fill a tensor with normal numbers."""
    return values.copy_(_draw_normal(values.shape, generator) * std + mean)


@rule("bernoulli")
def bernoulli(values: Tensor, p: Any = None, *, generator: torch.Generator | None = None) -> Tensor:
    """One with a probability, else zero."""
    chance = values if p is None else p
    chance = chance.double() if isinstance(chance, Tensor) else chance
    return (draw(values.shape, generator).double() * 2.0**-53 < chance).to(values)


@rule("bernoulli_")
def bernoulli_in_place(
    values: Tensor, p: Any = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    """Fill a tensor with ones with a probability."""
    if isinstance(p, Tensor):
        p = p.to("cpu")
    return values.copy_(bernoulli(values, p, generator=generator))


@rule("exponential")
def exponential(
    values: Tensor, lambd: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Exponential numbers."""
    uniform_numbers = draw(values.shape, generator).double() * 2.0**-53
    return (functions.log1p(-uniform_numbers) / -lambd).to(values)


@rule("multinomial")
def multinomial(
    weights: Tensor, count: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """Draw indices by weight: with replacement by the sums, else by exponential races."""
    wide = weights.double()
    rows = wide if wide.dim() > 1 else wide.unsqueeze(0)
    if replacement:
        numbers = draw((len(rows), count), generator).double() * 2.0**-53
        sums = RULES["cumsum"](rows, 1)
        result = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
        result.clamp_(max=rows.shape[1] - 1)
    else:
        times = exponential(rows, generator=generator) / rows
        result = torch.sort(times, stable=True, dim=1)[1][:, :count].contiguous()
    return result if wide.dim() > 1 else result[0]


def _place(numbers: Tensor, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    device = kwargs.get("device")
    return numbers.to(dtype=dtype, **({} if device is None else {"device": device}))


@rule("rand", "rand_like")
def rand(size: Any, *, generator: Any = None, memory_format: Any = None, **kwargs: Any) -> Tensor:
    """Numbers between 0 and 1."""
    del memory_format
    like = _template(size, kwargs)
    return _place(_draw_uniform(like, generator), **(kwargs | {"dtype": like.dtype}))


@rule("randn", "randn_like")
def randn(size: Any, *, generator: Any = None, memory_format: Any = None, **kwargs: Any) -> Tensor:
    """Normal numbers."""
    del memory_format
    like = _template(size, kwargs)
    return _place(_draw_normal(like.shape, generator), **(kwargs | {"dtype": like.dtype}))


def _template(size: Any, kwargs: dict[str, Any]) -> Tensor:
    if isinstance(size, Tensor):
        if kwargs.get("device") is None:
            kwargs["device"] = size.device
        return size.to(kwargs.get("dtype") or size.dtype)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return torch.empty((), dtype=dtype).expand(torch.Size(size))


def _draw_on_cpu(name: str, *args: Any, **kwargs: Any) -> Tensor:
    """Draw whole numbers on the CPU, and move them."""
    device = kwargs.pop("device", None)
    for unused in ("pin_memory", "layout"):
        kwargs.pop(unused, None)
    result: Tensor = getattr(torch.ops.aten, name)(*args, **kwargs)
    return result if device is None else result.to(device)


RULES |= {name: partial(_draw_on_cpu, name) for name in ("randint", "randperm")}


@rule("randint_like")
def randint_like(values: Tensor, *args: int, **kwargs: Any) -> Tensor:
    """Whole numbers of a tensor's shape."""
    low, high = (0, *args)[-2:]
    dtype = kwargs.get("dtype") or values.dtype
    numbers = torch.empty(values.shape, dtype=torch.int64).random_(low, high)
    return numbers.to(dtype=dtype, device=values.device)


@rule("random_")
def random_in_place(values: Tensor, *args: Any, generator: Any = None) -> Tensor:
    """Fill a tensor with whole numbers."""
    if values.device.type == "cpu":
        return values.random_(*args, generator=generator)
    numbers = torch.empty(values.shape, dtype=values.dtype)
    return values.copy_(numbers.random_(*args, generator=generator))


@composed("native_dropout")
def native_dropout(values: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout, and its mask."""
    if not train or p == 0:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    kept = torch.empty_like(values).bernoulli_(1 - p)
    # As dropout on a CPU does it; `+ (p == 1)` keeps 0 / 0 away.
    return values * kept.div(1 - p + (p == 1)), kept.bool()
