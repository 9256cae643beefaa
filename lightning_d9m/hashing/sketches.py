"""Sketches of weights: some numbers of which two tell how far the weights of two runs are apart.

Digests tell whether tensors are equal, sketches how large their difference is. A sketch is a linear
map of the elements to ``BUCKETS`` numbers with fixed random signs, so the sketch of a difference is
the difference of the sketches, and the sum of its squares is an unbiased estimate of the squared
Euclidean norm. Each element goes into one bucket: the count sketch (Charikar, Chen, Farach-Colton
2002), whose estimate of the norm has the error of that of Alon, Matias and Szegedy (1996) with one
pass instead of one for each bucket. Projections that keep distances: Johnson and Lindenstrauss
1984; with random signs: Achlioptas 2003. ``comparison.weight_distance`` has the estimate.

Nothing here draws from a generator of the process: the signs come from SHAKE-256.
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from hashlib import shake_256
from itertools import compress
from operator import attrgetter, not_
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_d9m.hashing.address_cache import TensorAddresses
from lightning_d9m.hashing.shards import is_sharded_dtensor
from lightning_d9m.hashing.tensor_bytes import DenseTensor, flatten_tensor, locate
from lightning_d9m.hashing.xxh3.cpu import view_memory
from lightning_d9m.ledger.format.fields import SKETCH_BUCKETS, SKETCH_DIGITS

# Places of a row; a prime, so that the elements of a matrix's column lie in different ones.
_WIDTH = 1021
_ROWS = 16
# Elements with signs of their own. Further blocks have the signs of the first, times one for each
# place of a row.
_BLOCK = _WIDTH * _ROWS
# Most weights of a model that is sketched: 10 million take about 10 ms on one core.
MOST_ELEMENTS = 2**28

_ORDINARY = frozenset({Tensor, torch.nn.Parameter})

_Floats: TypeAlias = NDArray[np.float64]
# The elements of a tensor, in one dimension.
_Flat: TypeAlias = Tensor | NDArray[Any]
_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def sketch_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the sketch of each dense tensor of floating-point numbers, by name.

    A tensor of at most ``SKETCH_BUCKETS`` elements is in its sketch without loss.

    Args:
        tensors: Tensors by name. Complex, integer, sparse, quantized, empty and sharded ones have
            no sketch.
            None has one if they have more than ``MOST_ELEMENTS`` elements together.

    Returns:
        ``SKETCH_BUCKETS`` float64 numbers, little-endian, as hexadecimal digits.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001 - as in digest_many
        dense: dict[str, _Flat] = {}
        for name, given in tensors.items():
            tensor = given if type(given) in _ORDINARY else _take_whole(given)
            if tensor is not None and _is_dense(tensor):
                dense[name] = tensor.flatten()
        return _sketch_all(dense, [len(flat) for flat in dense.values()])


class Sketcher:
    """Makes the sketches of weights that stay where they are from moment to moment."""

    def __init__(self) -> None:
        self._located: object = None
        self._names: list[str] = []
        # The elements of each weight that has a sketch, and their number.
        self._dense: dict[str, _Flat] | None = None
        self._sizes: list[int] = []

    def sketch(
        self, tensors: Mapping[str, Tensor], located: TensorAddresses | None
    ) -> dict[str, str]:
        """Return the sketches of tensors, as ``sketch_tensors`` does.

        ``located`` is what ``AddressCache`` has found for them and others just now: while it is the
        same object, so are their addresses and forms.
        """
        if located is None or any(part.kernel for part in located.parts):
            return sketch_tensors(tensors)
        if located is not self._located or list(tensors) != self._names:
            self._located, self._names = located, list(tensors)
            self._dense = _view(tensors)
            self._sizes = list(map(len, (self._dense or {}).values()))
        return (
            sketch_tensors(tensors)
            if self._dense is None
            else _sketch_all(self._dense, self._sizes)
        )


def _view(tensors: Mapping[str, Tensor]) -> dict[str, _Flat] | None:
    """Return the elements of the tensors that have sketches; None if NumPy lacks the dtype of one.

    Args:
        tensors: Contiguous tensors on the CPU. The arrays do not keep their memory alive.
    """
    dense: dict[str, _Flat] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        dtype = _NUMPY.get(tensor.dtype)
        if dtype is None:
            return None
        dense[name] = np.frombuffer(view_memory(*locate(tensor)), dtype)
    return dense


def _sketch_all(dense: Mapping[str, _Flat], sizes: Sequence[int]) -> dict[str, str]:
    if sum(sizes) > MOST_ELEMENTS:
        return {}
    is_short = [size <= _WIDTH for size in sizes]
    with np.errstate(all="ignore"):  # weights may be NaN, or overflow
        short = iter(_sketch_short(list(compress(dense.values(), is_short))))
        long = iter(_sketch_long(list(compress(dense.values(), map(not_, is_short)))))
    return {name: next(short if own else long) for name, own in zip(dense, is_short, strict=True)}


def _take_whole(tensor: Tensor) -> Tensor | None:
    """Return the whole tensor that this rank has of a DTensor; None if it has a part; others."""
    if is_sharded_dtensor(tensor):
        return None
    dtensor: Any = tensor
    local: Tensor = dtensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _is_dense(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel() or tensor.layout is not torch.strided:
        return False
    return type(tensor) in _ORDINARY or isinstance(flatten_tensor(tensor), DenseTensor)


def _sketch_short(flats: Sequence[_Flat]) -> list[str]:
    """Return the sketches of tensors of one row each, together: calls take most of their time."""
    if not flats:
        return []
    signs, buckets = _draw_rows(tuple(map(len, flats)))
    return _write(np.bincount(buckets, _join(flats) * signs, SKETCH_BUCKETS * len(flats)))


def _join(flats: Sequence[Any]) -> _Floats:
    """Return all elements as float64."""
    if isinstance(flats[0], np.ndarray):
        return np.concatenate(flats, dtype=np.float64)
    if len(set(map(attrgetter("device", "dtype"), flats))) > 1:
        flats = [flat.to("cpu", torch.float64) for flat in flats]
    joined: _Floats = torch.cat(list(flats)).to("cpu", torch.float64).numpy()
    return joined


@lru_cache(maxsize=4)
def _draw_rows(sizes: tuple[int, ...]) -> tuple[_Floats, NDArray[np.intp]]:
    """Return the sign and the bucket of each element of tensors of these sizes, row after row."""
    ends = np.cumsum(sizes)
    places = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    buckets = np.repeat(np.arange(0, SKETCH_BUCKETS * len(sizes), SKETCH_BUCKETS), sizes)
    return _draw_block()[0, places], _draw_buckets()[places] + buckets


def _sketch_long(flats: Sequence[_Flat]) -> list[str]:
    """Return the sketches of tensors of more than one row."""
    if not flats:
        return []
    sums = np.zeros((len(flats), _WIDTH))  # of each place of a row, over all rows
    buffer = np.empty(_BLOCK)
    for own, flat in zip(sums, flats, strict=True):
        _add_rows(flat, buffer, own)
    buckets = _draw_buckets() + SKETCH_BUCKETS * np.arange(len(flats))[:, None]
    return _write(np.bincount(buckets.reshape(-1), sums.reshape(-1)))


def _add_rows(flat: _Flat, buffer: _Floats, sums: _Floats) -> None:
    """Add the elements of a tensor with their signs to those of each place of a row.

    ``_BLOCK`` elements of the buffer are overwritten.
    """
    signs = _draw_block()
    for block, start in enumerate(range(0, len(flat), _BLOCK)):
        part = flat[start : start + _BLOCK]
        size = len(part)
        values = buffer[:size]
        if isinstance(part, np.ndarray):
            values[:] = part
        else:
            torch.from_numpy(values).copy_(part)
        rows, rest = divmod(size, _WIDTH)
        turned: _Floats | float = _draw_turn(block) if block else 1.0
        if rest and not block:  # the rest as another row
            rows, rest = rows + 1, 0
            buffer[size : rows * _WIDTH] = 0.0
        if rows:
            shaped = buffer[: rows * _WIDTH].reshape(rows, _WIDTH)
            sums += np.einsum("ij,ij->j", shaped, signs[:rows]) * turned
        if rest:
            sums[:rest] += values[-rest:] * signs[rows, :rest] * _draw_turn(block)[:rest]


def _write(sums: NDArray[Any]) -> list[str]:
    digits = sums.astype("<f8", copy=False).tobytes().hex()
    return [digits[at : at + SKETCH_DIGITS] for at in range(0, len(digits), SKETCH_DIGITS)]


@cache
def _draw_block() -> _Floats:
    return _draw_signs("signs", _BLOCK).reshape(_ROWS, _WIDTH)


@lru_cache(maxsize=128)
def _draw_turn(block: int) -> _Floats:
    return _draw_signs(f"block {block}", _WIDTH)


@cache
def _draw_buckets() -> NDArray[np.intp]:
    """Return the bucket of each place of a row.

    Any ``SKETCH_BUCKETS`` places from a multiple of that on are in different buckets.
    """
    groups = -(-_WIDTH // SKETCH_BUCKETS)
    turns = np.frombuffer(_draw_bytes("buckets", groups), np.uint8)
    places = (np.arange(SKETCH_BUCKETS) + turns[:, None]) % SKETCH_BUCKETS
    return places.reshape(-1)[:_WIDTH].astype(np.intp)


def _draw_signs(name: str, count: int) -> _Floats:
    """Return random signs, 1.0 and -1.0, that follow from a name."""
    data = np.frombuffer(_draw_bytes(name, -(-count // 8)), np.uint8)
    return 1.0 - 2.0 * np.unpackbits(data, count=count).astype(np.float64)


def _draw_bytes(name: str, count: int) -> bytes:
    return shake_256(f"lightning_d9m sketch: {name}".encode()).digest(count)
