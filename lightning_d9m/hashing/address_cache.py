"""A cache of the addresses of tensors.

Finding the bytes of a small tensor takes longer than hashing them, and most tensors are digested
repeatedly.
"""

from collections.abc import Sequence
from operator import add, attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from lightning_d9m.hashing import xxh3_cpu
from lightning_d9m.hashing.tensor_bytes import DenseTensor, flatten_tensor, locate

_data_ptr, _stride = Tensor.data_ptr, Tensor.stride
_shape_and_dtype = attrgetter("shape", "dtype")


class TensorAddresses(NamedTuple):
    """The header of each tensor's digest, and the memory that is hashed for it."""

    headers: list[bytes]
    chunks: xxh3_cpu.Chunks


class AddressCache:
    """The addresses of the tensors of the last call."""

    def __init__(self) -> None:
        self._located: TensorAddresses | None = None
        self._form: tuple[list[Any], ...] | None = None

    def find(self, tensors: Sequence[Tensor]) -> TensorAddresses | None:
        """Return the addresses of tensors; None unless all are on the CPU, real and contiguous.

        The cached addresses are valid while each tensor has the same address, shape, strides and
        dtype: freeing or resizing a storage, a cast and ``tensor.data = other`` change these.
        Complex tensors are not cached, because they can be conjugated in place.

        Raises:
            DigestError: As ``digest``, for the first tensor that has none.
        """
        if not tensors or tensors[0].device.type != "cpu":
            return None
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
            try:  # these change when a tensor moves
                form = (
                    list(map(_data_ptr, tensors)),
                    list(map(_stride, tensors)),
                    list(map(_shape_and_dtype, tensors)),
                )
            except RuntimeError:  # sparse, fake or not initialized: without memory
                self._form = self._located = None
            else:
                if form != self._form:
                    self._form = form
                    self._located = _locate(tensors)
            return self._located


def digest_located(located: TensorAddresses) -> list[str]:
    """Return the digests of tensors whose addresses are known, as ``digest_many`` does."""
    return list(map(xxh3_128_hexdigest, map(add, located.headers, located.chunks.hash())))


def _locate(tensors: Sequence[Tensor]) -> TensorAddresses | None:
    headers: list[bytes] = []
    memory: list[tuple[int, int]] = []
    for tensor in tensors:
        part = flatten_tensor(tensor)
        # A contiguous copy would be outdated in the next call.
        in_place = isinstance(part, DenseTensor) and part.data is tensor
        if not in_place or tensor.device.type != "cpu" or tensor.is_complex():
            return None
        headers.append(part.header)
        memory.append(locate(tensor))
    return TensorAddresses(headers, xxh3_cpu.Chunks(memory))
