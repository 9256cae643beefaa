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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from hashlib import shake_256
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_d9m.hashing.shards import is_sharded_dtensor
from lightning_d9m.hashing.tensor_bytes import DenseTensor, flatten_tensor
from lightning_d9m.ledger.format.records import SKETCH_BUCKETS, SKETCH_DIGITS

# Places of a row; a prime, so that the elements of a matrix's column lie in different ones.
_WIDTH = 1021
_ROWS = 16
# Elements with signs of their own. Further blocks have the signs of the first, times one for each
# place of a row.
_BLOCK = _WIDTH * _ROWS
# Bytes of other devices that are copied to the host at once.
_PIECE_BYTES = 2**24
# Most weights of a model that is sketched: 10 million take about 10 ms on one core.
MOST_ELEMENTS = 2**28

_ORDINARY = frozenset({Tensor, torch.nn.Parameter})

_Key = TypeVar("_Key")
_Floats: TypeAlias = NDArray[np.float64]


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
        dense: dict[str, Tensor] = {}
        short: dict[str, int] = {}
        long: dict[str, int] = {}
        for name, given in tensors.items():
            tensor = given if type(given) in _ORDINARY else _take_whole(given)
            if tensor is None or not (size := _count_elements(tensor)):
                continue
            dense[name] = tensor
            (short if size <= _WIDTH else long)[name] = size
        if sum(short.values()) + sum(long.values()) > MOST_ELEMENTS:
            return {}
        with np.errstate(all="ignore"):  # weights may be NaN, or overflow
            found = dict(zip(short, _sketch_short([dense[name] for name in short]), strict=True))
            found |= zip(long, _sketch_long([dense[name] for name in long]), strict=True)
        return {name: found[name] for name in dense}


def _take_whole(tensor: Tensor) -> Tensor | None:
    """Return the whole tensor that this rank has of a DTensor; None if it has a part; others."""
    if is_sharded_dtensor(tensor):
        return None
    dtensor: Any = tensor
    local: Tensor = dtensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _count_elements(tensor: Tensor) -> int:
    """Return the number of elements; 0 if the tensor is not one that has a sketch."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return 0
    is_dense = type(tensor) in _ORDINARY or isinstance(flatten_tensor(tensor), DenseTensor)
    return tensor.numel() if is_dense else 0


def _sketch_short(tensors: Sequence[Tensor]) -> list[str]:
    """Return the sketches of tensors of one row each, together: calls take most of their time."""
    if not tensors:
        return []
    signs, buckets = _draw_rows(tuple(map(Tensor.numel, tensors)))
    flat = _join(list(map(Tensor.flatten, tensors)))
    return _write(np.bincount(buckets, flat.numpy() * signs, SKETCH_BUCKETS * len(tensors)))


def _join(tensors: list[Tensor]) -> Tensor:
    """Return the elements of flat tensors as float64 on the CPU."""
    if len(set(map(attrgetter("device", "dtype"), tensors))) > 1:
        return torch.cat([tensor.double() for _, tensor in _fetch(enumerate(tensors))])
    # A cast in the same call as the copy would be done on the device.
    return torch.cat(tensors).cpu().double()


def _fetch(parts: Iterable[tuple[_Key, Tensor]]) -> Iterator[tuple[_Key, Tensor]]:
    """Yield flat tensors on the CPU, in their dtypes and order.

    Those of other devices are copied together, up to ``_PIECE_BYTES``; each copy waits.
    """
    keys: list[_Key] = []
    held: list[Tensor] = []
    size = 0
    for key, part in parts:
        is_like = held and (part.device, part.dtype) == (held[0].device, held[0].dtype)
        if held and (not is_like or size + part.nbytes > _PIECE_BYTES):
            yield from zip(keys, _copy_together(held), strict=True)
            keys, held, size = [], [], 0
        if part.is_cpu:
            yield key, part
            continue
        keys.append(key)
        held.append(part)
        size += part.nbytes
    yield from zip(keys, _copy_together(held), strict=True)


def _copy_together(parts: list[Tensor]) -> Sequence[Tensor]:
    if len(parts) < 2:  # noqa: PLR2004 - no copy on the device
        return [part.cpu() for part in parts]
    return torch.split(torch.cat(parts).cpu(), list(map(Tensor.numel, parts)))


@lru_cache(maxsize=4)
def _draw_rows(sizes: tuple[int, ...]) -> tuple[_Floats, NDArray[np.intp]]:
    """Return the sign and the bucket of each element of tensors of these sizes, row after row."""
    ends = np.cumsum(sizes)
    places = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    buckets = np.repeat(np.arange(0, SKETCH_BUCKETS * len(sizes), SKETCH_BUCKETS), sizes)
    return _draw_block()[0, places], _draw_buckets()[places] + buckets


def _sketch_long(tensors: Sequence[Tensor]) -> list[str]:
    """Return the sketches of tensors of more than one row, on any device."""
    if not tensors:
        return []
    sums = np.zeros((len(tensors), _WIDTH))  # of each place of a row, over all rows
    buffer = torch.from_numpy(np.empty(_BLOCK))
    for (number, block), part in _fetch(_split(tensors)):
        _add_rows(part, buffer, sums[number], block)
    buckets = _draw_buckets() + SKETCH_BUCKETS * np.arange(len(tensors))[:, None]
    return _write(np.bincount(buckets.reshape(-1), sums.reshape(-1)))


def _split(tensors: Iterable[Tensor]) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield pieces of whole blocks, each with the numbers of its tensor and its first block."""
    for number, tensor in enumerate(tensors):
        flat = tensor.reshape(-1)
        blocks = max(1, _PIECE_BYTES // (flat.itemsize * _BLOCK))
        for start in range(0, flat.numel(), blocks * _BLOCK):
            yield (number, start // _BLOCK), flat[start : start + blocks * _BLOCK]


def _add_rows(flat: Tensor, buffer: Tensor, sums: _Floats, first: int) -> None:
    """Add elements of a tensor with their signs.

    Args:
        flat: A dense tensor of one dimension on the CPU.
        buffer: ``_BLOCK`` elements on the CPU, which are overwritten.
        sums: Those of each place of a row.
        first: The number of the block in the tensor with which the elements begin.
    """
    signs, values = _draw_block(), buffer.numpy()
    for block, start in enumerate(range(0, flat.numel(), _BLOCK), start=first):
        part = flat[start : start + _BLOCK]
        size = part.numel()
        buffer[:size].copy_(part)
        rows, rest = divmod(size, _WIDTH)
        whole = size - rest
        if not block:  # the rest as another row
            rows = -(-size // _WIDTH)
            values[size : rows * _WIDTH] = 0.0
            sums += np.einsum(
                "ij,ij->j", values[: rows * _WIDTH].reshape(rows, _WIDTH), signs[:rows]
            )
            continue
        turned = _draw_turn(block)
        if rows:
            shaped = values[:whole].reshape(rows, _WIDTH)
            sums += np.einsum("ij,ij->j", shaped, signs[:rows]) * turned
        if rest:
            sums[:rest] += values[whole:size] * signs[rows, :rest] * turned[:rest]


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
