"""Random numbers: of Philox, by a key that torch's generator draws on the CPU.

Each operation draws one number of 63 bits, and computes its own from it, so that a generator need
not draw for each element, and so that they are the same on every device.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_d9m.errors import SettingError
from lightning_d9m.ops.patches.registration import accumulation_dtype
from lightning_d9m.ops.portability import kernels
from lightning_d9m.ops.portability.arithmetic import cumsum, evaluate
from lightning_d9m.ops.portability.registry import composed, rule


def draw(
    size: Any, generator: torch.Generator | None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return uniform numbers in [0, 1), float64 ones of 53 bits or float32 ones of 24 bits."""
    if generator is not None and generator.device.type != "cpu":
        raise SettingError(
            f"A generator is on {generator.device}; with portable bits, numbers are drawn on the "
            "CPU. Make it with torch.Generator()."
        )
    # Whole numbers of torch's generator are the same on every machine; its fractions are not.
    key = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item()
    return kernels.draw(int(key), (size,) if isinstance(size, int) else tuple(size), dtype)


# Torch's own kernels check arguments; what they draw for that is thrown away.
_UNUSED = torch.Generator("cpu")


def _check(values: Tensor, name: str, *given: Any) -> None:
    """Let torch check the arguments of an operation that fills tensors of a dtype."""
    getattr(torch.empty(0, dtype=values.dtype, device="cpu"), name)(*given, generator=_UNUSED)


@rule("uniform")
def uniform(values: Tensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Tensor:
    """Numbers between two bounds, of as many bits as the dtype has."""
    _check(values, "uniform_", low, high)
    drawn = draw(values.shape, generator, accumulation_dtype(values.dtype))
    if values.element_size() == 2:  # a number of more bits may round to 1
        bits = 8 if values.dtype == torch.bfloat16 else 11
        drawn = (drawn * 2.0**bits).floor_().mul_(2.0**-bits)
    return (drawn * (high - low) + low).to(values)


@rule("normal_")
def normal_in_place(
    values: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None
) -> Tensor:
    """Fill a tensor with normal numbers."""
    _check(values, "normal_", mean, std)
    # Not 0, of which the logarithm is infinite.
    radius, angle = 1.0 - draw((2, *values.shape), generator)
    angle *= 6.283185307179586
    drawn = evaluate("normal", radius, angle, dtype=accumulation_dtype(values.dtype))
    return values.copy_(drawn.double() * std + mean)


@rule("bernoulli_")
def bernoulli_in_place(values: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    """Fill a tensor with ones with a probability, and else with zeros."""
    if isinstance(p, Tensor):
        p = p.to("cpu", torch.float64)
        torch.bernoulli(p, generator=_UNUSED)  # checks
        return values.copy_(draw(values.shape, generator) < p)
    _check(values, "bernoulli_", p)
    return values.copy_(draw(values.shape, generator, torch.float32) < p)


@rule("exponential")
def exponential(values: Tensor, lambd: float = 1, *, generator: Any = None) -> Tensor:
    """Exponential numbers."""
    _check(values, "exponential_", lambd)
    dtype = accumulation_dtype(values.dtype)
    # Rounded to float32, a number may be -1, of which the logarithm is infinite.
    drawn = (-draw(values.shape, generator)).to(dtype).clamp_(min=torch.finfo(dtype).eps / 2 - 1)
    return (evaluate("log1p", drawn) / -lambd).to(values)


@rule("multinomial")
def multinomial(
    weights: Tensor, count: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """Draw indices by weight: with replacement by the sums, else by exponential races."""
    # On the CPU, as the keys of all draws, whatever the device of the weights.
    rows = torch.atleast_2d(weights).to("cpu", torch.float64)
    torch.multinomial(rows, count, replacement, generator=_UNUSED)  # checks
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
