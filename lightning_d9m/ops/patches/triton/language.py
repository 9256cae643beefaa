"""The words of ``triton.language`` that kernels use, for tensors of torch.

A kernel is one text. Triton compiles it for a CUDA device; elsewhere Python runs it with these
words, so that torch ops compute the same bits. Then a program has the elements of a slice, one
program runs after the other, and a pointer is a tensor of all that follows it in memory.
"""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

abs, floor, zeros_like = torch.abs, torch.floor, torch.zeros_like  # noqa: A001 - Triton's name
expand_dims, reshape = torch.unsqueeze, torch.reshape
float32, float64, int32, int64 = torch.float32, torch.float64, torch.int32, torch.int64
_current = threading.local()  # the program of this thread, and the device
static_range = range


if TYPE_CHECKING:
    constexpr = Any
else:

    class constexpr:  # noqa: N801 - Triton's name
        """The annotation of a constant."""


class Pointer:
    """Places in memory: ``offset`` counts elements from the first one."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, count: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + count)

    def __sub__(self, count: Any) -> "Pointer":
        return Pointer(self.memory, self.offset - count)


def point_to(tensor: Tensor) -> Pointer:
    """Return a pointer to the first element of a tensor."""
    first = tensor.storage_offset()
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - first
    if size < 0:  # an empty view may begin behind the end
        return Pointer(tensor.flatten())
    return Pointer(tensor.as_strided((size,), (1,), first))


def run(kernel: Callable[..., None], programs: int, device: torch.device, *given: Any) -> None:
    """Run all programs of a kernel."""
    for number in range(programs):
        _current.place = number, device
        kernel(*given)


def pointer_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of what is pointed to."""
    return dtype


def program_id(_axis: int) -> Any:
    """Return the number of this program."""
    return _current.place[0]


def arange(_start: int, end: int) -> Tensor:
    """Return whole numbers from 0."""
    return torch.arange(end, device=_current.place[1])


def full(shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
    """Return a tensor of one number."""
    return torch.full(shape, value, dtype=dtype, device=_current.place[1])


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros."""
    return full(shape, 0, dtype)


def cast(values: Any, dtype: torch.dtype, *, bitcast: bool) -> Any:
    """Read bits as those of another type."""
    assert bitcast
    if isinstance(values, Pointer):
        # A kernel keeps numbers of two types in one tensor, which one launch fills.
        bytes_before = values.offset * values.memory.element_size()
        return Pointer(values.memory.view(dtype), bytes_before // dtype.itemsize)
    return values.view(dtype)


def _as_tensor(number: Any) -> Tensor:
    """Return a number as a tensor that is taken together with those of any device."""
    # Without a device it would be on torch's default one, and a tensor of two devices is an error.
    return number if isinstance(number, Tensor) else torch.tensor(number, device="cpu")


def where(mask: Any, chosen: Any, other: Any) -> Tensor:
    """Return one number where a mask says, and another one elsewhere."""
    return torch.where(_as_tensor(mask), chosen, other)


def maximum(left: Any, right: Any) -> Tensor:
    """Return the greater one of two numbers."""
    return torch.maximum(_as_tensor(left), _as_tensor(right))


def minimum(left: Any, right: Any) -> Tensor:
    """Return the smaller one of two numbers."""
    return torch.minimum(_as_tensor(left), _as_tensor(right))


def max(values: Tensor, axis: int | None = None) -> Tensor:  # noqa: A001 - Triton's name
    """Return the greatest number of all, or along a dimension."""
    return values.max() if axis is None else values.amax(axis)


def sum(pairs: Tensor, axis: int) -> Tensor:  # noqa: A001 - Triton's name
    """Add the two numbers of each pair along a dimension."""
    left, right = pairs.unbind(axis)  # a sum of torch begins with 0.0, and loses a sign
    return left + right


def cdiv(count: Any, size: int) -> Any:
    """Return a quotient of whole numbers, rounded up."""
    return (count + size - 1) // size


def fma(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """Return ``left * right + total`` of float32 numbers, rounded once."""
    # The product is exact. A last bit of 1 of an inexact sum lets it be rounded again.
    product, wide = left.double() * right.double(), total.double()
    result = product + wide
    given = result - product
    error = (product - (result - given)) + (wide - given)
    bits = result.view(int64)
    nearer = torch.where((error > 0) == (bits >= 0), bits + 1, bits - 1)
    odd = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    return torch.where(odd, nearer, bits).view(float64).float()


def sqrt(values: Tensor) -> Tensor:
    """Return roots, rounded to nearest."""
    if values.device.type != "cpu":
        return values.sqrt()
    # NumPy's are the processor's; those of torch come from MKL, which may be off by one unit.
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))


div_rn, sqrt_rn = torch.div, sqrt


def load(
    pointer: Pointer, mask: Tensor | None = None, other: float = 0, cache_modifier: str = ""
) -> Tensor:
    """Return what is in memory where a mask says, and another number elsewhere."""
    del cache_modifier
    if mask is None:
        return pointer.memory[pointer.offset]
    # A place outside is not read. Of masked ones place 0 is, which a tensor of nothing lacks.
    memory = pointer.memory if len(pointer.memory) else pointer.memory.new_zeros(1)
    return where(mask, memory[where(mask, pointer.offset, 0)], other)


def store(pointer: Pointer, values: Tensor, mask: Tensor) -> None:
    """Write numbers where a mask says."""
    pointer.memory[pointer.offset[mask]] = values[mask]


def atomic_max(pointer: Pointer, values: Tensor, mask: Tensor, sem: str) -> None:
    """Raise numbers where a mask says."""
    del sem
    pointer.memory.scatter_reduce_(0, pointer.offset[mask], values[mask], "amax")


def atomic_add(pointer: Pointer, values: Tensor, mask: Tensor, sem: str) -> None:
    """Add to numbers where a mask says."""
    del sem
    # The order of the additions, which a device chooses, has no effect: none of them rounds.
    pointer.memory.index_add_(0, pointer.offset[mask], values[mask])
