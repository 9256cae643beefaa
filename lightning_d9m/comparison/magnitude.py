"""How far two tensors of one shape and dtype are apart: units in the last place, and where."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 5


@dataclass(frozen=True)
class Magnitude:
    """How far two tensors are apart.

    Attributes:
        count: Number of elements whose bytes differ.
        total: Number of elements.
        ulps: The largest distance in units in the last place; None for other than real floats, or
            where one of two elements is no number.
        absolute: The largest absolute difference of finite elements.
        relative: The largest difference of finite elements, relative to the larger of the two.
        examples: (index, expected, actual) of the first elements that differ.
    """

    count: int
    total: int
    ulps: int | None
    absolute: float
    relative: float
    examples: tuple[tuple[tuple[int, ...], float, float], ...]

    def as_record(self) -> Mapping[str, object]:
        """Return it in the types that JSON knows; floats as ``float.hex()`` gives them."""
        return {
            "count": self.count,
            "total": self.total,
            "ulps": self.ulps,
            "absolute": self.absolute.hex(),
            "relative": self.relative.hex(),
            "examples": [[list(at), a.hex(), b.hex()] for at, a, b in self.examples],
        }


def measure(expected: Tensor, actual: Tensor) -> Magnitude | None:
    """Measure a difference, bytes not values; None when shape, dtype or layout do not match.

    >>> one = torch.ones(3)
    >>> other = one.clone()
    >>> other[1] += 2**-23
    >>> found = measure(one, other)
    >>> found.count, found.ulps, found.examples[0][0]
    (1, 1, (1,))
    """
    one, other = expected.detach().cpu(), actual.detach().cpu()
    same = one.shape == other.shape and one.dtype == other.dtype
    if not same or one.layout is not torch.strided or other.layout is not torch.strided:
        return None
    if one.is_complex():
        one, other = (
            torch.view_as_real(one.resolve_conj()),
            torch.view_as_real(other.resolve_conj()),
        )
    one, other = one.contiguous(), other.contiguous()
    integer = _INTEGERS[one.element_size()]
    bits, other_bits = one.view(integer), other.view(integer)
    differing = bits != other_bits
    places = differing.nonzero()[:_SHOWN].tolist()
    examples = tuple((tuple(at), float(one[tuple(at)]), float(other[tuple(at)])) for at in places)
    x, y = one[differing].double(), other[differing].double()
    finite = x.isfinite() & y.isfinite()
    gap = (x - y)[finite].abs()
    scale = torch.maximum(x.abs(), y.abs())[finite]
    relative = torch.where(scale > 0, gap / scale, gap)
    ulps = None
    if one.is_floating_point() and bool(finite.all()):
        ulps = _largest_distance(bits[differing], other_bits[differing])
    return Magnitude(
        count=int(differing.sum()),
        total=one.numel(),
        ulps=ulps,
        absolute=float(gap.max()) if gap.numel() else 0.0,
        relative=float(relative.max()) if gap.numel() else 0.0,
        examples=examples,
    )


def _largest_distance(bits: Tensor, other: Tensor) -> int:
    """Count the floats between two, which are the integers between their bits in order."""
    lowest = torch.iinfo(bits.dtype).min
    ordered = [[n if n >= 0 else lowest - n for n in t.tolist()] for t in (bits, other)]
    return max((abs(a - b) for a, b in zip(*ordered, strict=True)), default=0)
