"""Sketches of weights: some numbers of which two tell how far the weights of two runs are apart.

Digests tell whether tensors are equal, sketches how large their difference is. A sketch is a linear
map of the elements to ``BUCKETS`` numbers with fixed random signs, so the sketch of a difference is
the difference of the sketches, and the sum of its squares is an unbiased estimate of the squared
Euclidean norm. Each element goes into one bucket: the count sketch (Charikar, Chen, Farach-Colton
2002), whose estimate of the norm has the error of that of Alon, Matias and Szegedy (1996) with one
pass instead of one for each bucket. Projections that keep distances: Johnson and Lindenstrauss
1984; with random signs: Achlioptas 2003. ``comparison.timeline`` has the estimate.

Nothing here draws from a generator of the process: the signs come from SHAKE-256.
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from hashlib import shake_256
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_d9m.hashing.digest import ORDINARY, DenseTensor, flatten_tensor
from lightning_d9m.hashing.shards import is_sharded_dtensor
from lightning_d9m.ledger.format.records import SKETCH_BUCKETS

# Places of a row; a prime, so that the elements of a matrix's column lie in different ones.
_WIDTH = 1021
_ROWS = 16
# Elements with signs of their own. Further blocks have the signs of the first, times one for each
# place of a row.
_BLOCK = _WIDTH * _ROWS
# Bytes of a tensor that are copied to the host at once.
_PIECE_BYTES = 2**24
# Most weights of a model that is sketched: 10 million take about 10 ms on one core.
MOST_ELEMENTS = 2**28

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
        found = {name: _find_dense(tensor) for name, tensor in tensors.items()}
        dense = {name: own for name, own in found.items() if own is not None}
        if sum(map(Tensor.numel, dense.values())) > MOST_ELEMENTS:
            return {}
        with np.errstate(all="ignore"):  # weights may be NaN, or overflow
            return {name: _sketch(tensor) for name, tensor in dense.items()}


def _find_dense(tensor: Tensor) -> Tensor | None:
    """Return the tensor, or the whole one that this rank has of a DTensor, if it has a sketch."""
    ordinary = type(tensor) in ORDINARY
    if not ordinary:
        if is_sharded_dtensor(tensor):
            return None
        wrapper: Any = tensor
        tensor = wrapper.to_local() if hasattr(tensor, "to_local") else tensor
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor if ordinary or isinstance(flatten_tensor(tensor), DenseTensor) else None


def _sketch(tensor: Tensor) -> str:
    """Return the sketch of a tensor, which is copied to the host in pieces."""
    sums = np.zeros(_WIDTH)  # of each place of a row, over all rows
    flat = tensor.reshape(-1)
    size = max(1, _PIECE_BYTES // (flat.itemsize * _BLOCK)) * _BLOCK
    for start in range(0, flat.numel(), size):
        # A cast in the same call as the copy would be done on the device.
        piece = flat[start : start + size].cpu()
        for number, block in enumerate(piece.split(_BLOCK), start // _BLOCK):
            values = np.zeros((-(-len(block) // _WIDTH), _WIDTH))  # with zeros at the end
            torch.from_numpy(values).view(-1)[: len(block)].copy_(block)
            signs = _draw_signs("signs", _BLOCK).reshape(_ROWS, _WIDTH)[: len(values)]
            signed = np.einsum("ij,ij->j", values, signs)
            sums += signed * _draw_signs(f"block {number}", _WIDTH) if number else signed
    found = np.bincount(_draw_buckets(), sums, SKETCH_BUCKETS)
    return found.astype("<f8", copy=False).tobytes().hex()


@cache
def _draw_buckets() -> NDArray[np.intp]:
    """Return the bucket of each place of a row.

    Any ``SKETCH_BUCKETS`` places from a multiple of that on are in different buckets.
    """
    groups = -(-_WIDTH // SKETCH_BUCKETS)
    turns = np.frombuffer(_draw_bytes("buckets", groups), np.uint8)
    places = (np.arange(SKETCH_BUCKETS) + turns[:, None]) % SKETCH_BUCKETS
    return places.reshape(-1)[:_WIDTH].astype(np.intp)


@lru_cache(maxsize=128)
def _draw_signs(name: str, count: int) -> _Floats:
    """Return random signs, 1.0 and -1.0, that follow from a name."""
    data = np.frombuffer(_draw_bytes(name, -(-count // 8)), np.uint8)
    return 1.0 - 2.0 * np.unpackbits(data, count=count).astype(np.float64)


def _draw_bytes(name: str, count: int) -> bytes:
    return shake_256(f"lightning_d9m sketch: {name}".encode()).digest(count)
