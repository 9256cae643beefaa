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
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_d9m.hashing.shards import is_sharded_dtensor
from lightning_d9m.hashing.tensor_bytes import DenseTensor, flatten_tensor
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
        local = {name: _take_whole(tensor) for name, tensor in tensors.items()}
        dense = {name: t for name, t in local.items() if t is not None and _is_dense(t)}
        if sum(map(Tensor.numel, dense.values())) > MOST_ELEMENTS:
            return {}
        short = {name: tensor for name, tensor in dense.items() if tensor.numel() <= _WIDTH}
        buffer = torch.from_numpy(np.zeros(_BLOCK))
        with np.errstate(all="ignore"):  # weights may be NaN, or overflow
            found = dict(zip(short, _sketch_short(list(short.values())), strict=True))
            return {name: found.get(name) or _sketch(own, buffer) for name, own in dense.items()}


def _take_whole(tensor: Tensor) -> Tensor | None:
    """Return the whole tensor that this rank has of a DTensor; None if it has a part; others."""
    if type(tensor) in _ORDINARY:
        return tensor
    if is_sharded_dtensor(tensor):
        return None
    dtensor: Any = tensor
    local: Tensor = dtensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _is_dense(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel() or tensor.layout is not torch.strided:
        return False
    return type(tensor) in _ORDINARY or isinstance(flatten_tensor(tensor), DenseTensor)


def _sketch_short(tensors: Sequence[Tensor]) -> list[str]:
    """Return the sketches of tensors of one row each, together: calls take most of their time."""
    if not tensors:
        return []
    signs, buckets = _draw_rows(tuple(map(Tensor.numel, tensors)))
    flat = _join([tensor.reshape(-1) for tensor in tensors])
    sums = np.bincount(buckets, flat.numpy() * signs, SKETCH_BUCKETS * len(tensors))
    digits = sums.astype("<f8", copy=False).tobytes().hex()
    return [digits[at : at + SKETCH_DIGITS] for at in range(0, len(digits), SKETCH_DIGITS)]


def _join(tensors: list[Tensor]) -> Tensor:
    """Return the elements of flat tensors as float64 on the CPU."""
    if len({(tensor.device, tensor.dtype) for tensor in tensors}) > 1:
        tensors = [tensor.to("cpu", torch.float64) for tensor in tensors]
    return torch.cat(tensors).to("cpu", torch.float64)


@lru_cache(maxsize=4)
def _draw_rows(sizes: tuple[int, ...]) -> tuple[_Floats, NDArray[np.intp]]:
    """Return the sign and the bucket of each element of tensors of these sizes, row after row."""
    buckets = [_draw_buckets()[:size] + SKETCH_BUCKETS * n for n, size in enumerate(sizes)]
    return np.concatenate([_draw_block()[0, :size] for size in sizes]), np.concatenate(buckets)


def _sketch(tensor: Tensor, buffer: Tensor) -> str:
    """Return the sketch of a tensor.

    Args:
        tensor: A dense tensor on any device.
        buffer: ``_BLOCK`` elements on the CPU, which are overwritten.
    """
    flat = tensor.detach().reshape(-1)
    sums = np.zeros(min(flat.numel(), _WIDTH))  # of each place of a row, over all rows
    signs, values = _draw_block(), buffer.numpy()
    for block, start in enumerate(range(0, flat.numel(), _BLOCK)):
        part = flat[start : start + _BLOCK]
        buffer[: part.numel()].copy_(part)
        rows, rest = divmod(part.numel(), _WIDTH)
        whole = rows * _WIDTH
        turned = _draw_turn(block) if block else 1.0
        if rows:
            shaped = values[:whole].reshape(rows, _WIDTH)
            sums += np.einsum("ij,ij->j", shaped, signs[:rows]) * turned
        if rest:
            found = values[whole : whole + rest] * signs[rows, :rest]
            sums[:rest] += found if isinstance(turned, float) else found * turned[:rest]
    buckets = np.bincount(_draw_buckets()[: len(sums)], sums, SKETCH_BUCKETS)
    return buckets.astype("<f8", copy=False).tobytes().hex()


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
