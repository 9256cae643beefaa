"""Numeric differences between tensors: ulps, Vs, Vermv, Vc, distinct outputs.

Vs, Vermv and Vc are those of Shanmugavelu et al. 2024 (arXiv 2408.05148, section II). Where their
formulas leave a case open, the rule makes a metric zero exactly if all bits agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import fsum

import torch
from torch import Tensor

from lightning_d9m.engine.hashing.digest import digest_many

Output = Tensor | Sequence[Tensor]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_ULPS = 2**63 - 1
_EXAMPLES = 5


@dataclass(frozen=True)
class Magnitude:
    """The difference between two tensors.

    Attributes:
        count: Number of elements whose bytes differ.
        total: Number of elements.
        ulps: The largest distance in representable numbers, as in ``Variation``; None unless all
            elements are real, finite floating-point numbers.
        absolute: The largest absolute difference of finite elements.
        relative: The largest relative difference of finite elements, as in ``Variation.vermv``.
        examples: (index, expected, actual) of the first elements that differ.
    """

    count: int
    total: int
    ulps: int | None
    absolute: float
    relative: float
    examples: tuple[tuple[tuple[int, ...], float, float], ...]

    def as_record(self) -> Mapping[str, object]:
        """Return the figures for JSON; floats as ``float.hex()``."""
        examples = [[list(at), a.hex(), b.hex()] for at, a, b in self.examples]
        sizes = {"absolute": self.absolute.hex(), "relative": self.relative.hex()}
        return vars(self) | sizes | {"examples": examples}


def measure_difference(expected: Tensor, actual: Tensor) -> Magnitude | None:
    """Measure the difference of two tensors by their bytes.

    Returns:
        None if shapes or dtypes do not match, or elements are not numbers with bytes of their own.

    >>> one = torch.ones(3)
    >>> other = one.clone()
    >>> other[1] += 2**-23
    >>> found = measure_difference(one, other)
    >>> found.count, found.ulps, found.examples[0][0]
    (1, 1, (1,))
    """
    # A complex number has no order, so its parts are measured.
    if (pair := _prepare(expected, actual, by_parts=True)) is None:
        return None
    one, other, differing = pair
    places = [tuple(at) for at in differing.nonzero()[:_EXAMPLES].tolist()]
    old, new = one[differing], other[differing]
    finite = old.double().isfinite() & new.double().isfinite()
    gap, relative = (figure[finite] for figure in _measure_gaps(old, new))
    # An infinity is as far from a number as the format allows, which says nothing.
    ordered = one.is_floating_point() and bool(finite.all())
    return Magnitude(
        count=len(old),
        total=one.numel(),
        ulps=(_ulps(old, new) if places else 0) if ordered else None,
        absolute=float(gap.max()) if gap.numel() else 0.0,
        relative=float(relative.max()) if gap.numel() else 0.0,
        examples=tuple((at, float(one[at]), float(other[at])) for at in places),
    )


@dataclass(frozen=True)
class Variation:
    """The difference of an output from a reference.

    Attributes:
        vs: Vs = |A - B| / |A| of an output B that is one number, with the reference A. The paper
            writes 1 - |B / A|, which is the same up to its sign unless the signs of A and B differ,
            and which rounding can make zero. None for an output of several numbers.
        vermv: Vermv = (1 / D) * sum over the D elements of |A_i - B_i| / |A_i|, in float64. An
            element whose bits differ counts as 1 if its quotient is not positive and finite (A_i is
            zero, one of the two is NaN or infinite, -0.0 and 0.0).
        vc: Vc = (1 / D) * number of elements whose bits differ: -0.0 is not 0.0, and one NaN
            payload is not another.
        ulps: The greatest distance of two elements in representable numbers of their dtype, in the
            total order of IEEE 754 (-0.0 next below 0.0, NaNs beyond infinity); for integers their
            difference. At most 2**63 - 1.
    """

    vs: float | None
    vermv: float
    vc: float
    ulps: int


def measure_variation(reference: Output, output: Output) -> Variation:
    """Compare an output with a reference. Several tensors count as one long tensor.

    If shapes or dtypes differ, or elements are not numbers with bytes of their own, every element
    counts as changed entirely.
    """
    expected, actual = _as_list(reference), _as_list(output)
    elements = sum(tensor.numel() for tensor in expected)
    changed, relative, ulps = 0, 0.0, 0
    for parts in zip_longest(expected, actual):
        # Nothing can be compared element by element: the greatest values stand for that.
        if None in parts or (pair := _prepare(*parts)) is None:
            return Variation(1.0 if elements == 1 else None, 1.0, 1.0, _MOST_ULPS)
        left, right, differing = pair
        if bool(differing.any()):
            old, new = left[differing], right[differing]
            # Equal elements add nothing, and most elements are equal.
            changed += len(old)
            relative += float(_measure_gaps(old, new)[1].sum())
            ulps = max(ulps, _ulps(old, new))
    scale = max(elements, 1)
    vermv = relative / scale
    return Variation(vermv if elements == 1 else None, vermv, changed / scale, ulps)


@dataclass(frozen=True, kw_only=True)
class Spread(Variation):
    """The differences of several outputs from a reference: means over the runs, greatest ulps.

    Attributes:
        runs: Number of outputs.
        distinct: Number of distinct outputs by their digests.
    """

    runs: int
    distinct: int


class SpreadMeter:
    """Measures outputs one after the other; keeps only the first, with which it compares."""

    def __init__(self) -> None:
        self._reference: list[Tensor] | None = None
        self._digests: set[tuple[str, ...]] = set()
        self._found: list[Variation] = []

    def add(self, output: Output) -> None:
        """Add an output."""
        tensors = _as_list(output)
        if self._reference is None:
            # A copy: the next call may write into the same memory.
            self._reference = [tensor.clone() for tensor in tensors]
        self._digests.add(tuple(digest_many(tensors)))
        self._found.append(measure_variation(self._reference, tensors))

    def spread(self) -> Spread:
        """Return the figures of all outputs so far."""
        found = self._found or [Variation(None, 0.0, 0.0, 0)]

        def mean(figures: Iterable[float]) -> float:
            return fsum(figures) / len(found)  # such a sum does not depend on the order

        return Spread(
            runs=len(self._found),
            distinct=len(self._digests),
            vs=None if found[-1].vs is None else mean(run.vs or 0.0 for run in found),
            vermv=mean(run.vermv for run in found),
            vc=mean(run.vc for run in found),
            ulps=max(run.ulps for run in found),
        )


def _as_list(output: Output) -> list[Tensor]:
    return [output.detach()] if isinstance(output, Tensor) else [t.detach() for t in output]


def _prepare(
    expected: Tensor, actual: Tensor, *, by_parts: bool = False
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return two tensors on the CPU, and where their bits differ; None if these mean nothing.

    With ``by_parts``, a complex number is two real ones.
    """
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return None
    if any(value.layout is not torch.strided or value.is_meta for value in (expected, actual)):
        return None
    try:  # quantized numbers depend on a scale, and elements of 4 bits share their bytes
        torch.zeros(1, dtype=expected.dtype, device="cpu").to(torch.complex128)
    except RuntimeError:
        return None
    # Lazy conjugates and negations have the bits of the tensor that they view.
    one, other = (own.detach().resolve_conj().resolve_neg().cpu() for own in (expected, actual))
    if by_parts and one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return one, other, (_bits(one) != _bits(other)).any(-1)


def _bits(values: Tensor) -> Tensor:
    """Return the bits of elements as integers, in a last dimension: two of a complex number."""
    parts = torch.view_as_real(values) if values.is_complex() else values.unsqueeze(-1)
    return parts.contiguous().view(_INTEGERS[parts.element_size()])


def _measure_gaps(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return |A - B| and |A - B| / |A| of elements whose bits differ.

    The second is 1 unless it is positive and finite.
    """
    # All but integers of 64 bits fit exactly, and differences of float16 do not overflow.
    wide = torch.complex128 if old.is_complex() else torch.float64
    left = old.to(wide)
    gap = (left - new.to(wide)).abs()
    if old.dtype in (torch.int64, torch.uint64):
        # Neighbors above 2**53 are equal in float64; they are so close that this is exact.
        near = (old.view(torch.int64) - new.view(torch.int64)).to(wide).abs()
        gap = torch.where(gap == 0, near, gap)
    quotient = gap / left.abs()
    return gap, torch.where(quotient.isfinite() & (quotient > 0), quotient, 1.0)


def _ulps(old: Tensor, new: Tensor) -> int:
    """Return the greatest distance of two elements in representable numbers."""
    left, right = _order(old), _order(new)
    low, high = torch.minimum(left, right), torch.maximum(left, right)
    # The distance of two int64 may need 64 bits, and torch has no wider integer.
    overflows = (low < 0) & (high > _MOST_ULPS + low)
    return int(torch.where(overflows, _MOST_ULPS, high - low).max())


def _order(part: Tensor) -> Tensor:
    """Map elements to int64 so that neighbours differ by one."""
    if part.is_floating_point() or part.is_complex():
        bits = _bits(part)
        # Sign and magnitude become two's complement, with -0.0 at -1.
        return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).to(torch.int64)
    # Flipping the first bit maps 0 to the least int64; torch computes little with uint64.
    if part.dtype == torch.uint64:
        return part.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return part.to(torch.int64)
