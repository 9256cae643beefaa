"""Where tensors lie: found once, and remembered as long as they stay there.

To find out takes longer than to hash small tensors, and most are digested again and again.
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
    """Where tensors lie: what precedes each in its digest, and what is hashed for it."""

    headers: list[bytes]
    chunks: xxh3_cpu.Chunks


class AddressCache:
    """Where the tensors lay that were last asked for."""

    def __init__(self) -> None:
        self._located: TensorAddresses | None = None
        self._form: tuple[list[Any], ...] | None = None

    def find(self, tensors: Sequence[Tensor]) -> TensorAddresses | None:
        """Return where tensors lie; None unless all lie on the CPU, real and in order.

        What was found before counts as long as each has the address, shape, strides and dtype that
        it had: a storage that is freed or resized, a cast and ``tensor.data = other`` change these.
        Complex ones are not remembered, because they can be conjugated where they are.

        Raises:
            DigestError: As ``digest``, for the first tensor that has none.
        """
        if not tensors or tensors[0].device.type != "cpu":
            return None
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
            try:  # what changes when a tensor moves
                form = (
                    list(map(_data_ptr, tensors)),
                    list(map(_stride, tensors)),
                    list(map(_shape_and_dtype, tensors)),
                )
            except RuntimeError:  # sparse, fake, not initialized yet: no memory to ask for
                self._form = self._located = None
            else:
                if form != self._form:
                    self._form = form
                    self._located = _locate(tensors)
            return self._located


def digest_located(located: TensorAddresses) -> list[str]:
    """Return the digests of what lies in memory of this process, as ``digest_many`` does."""
    return list(map(xxh3_128_hexdigest, map(add, located.headers, located.chunks.hash())))


def _locate(tensors: Sequence[Tensor]) -> TensorAddresses | None:
    headers: list[bytes] = []
    memory: list[tuple[int, int]] = []
    for tensor in tensors:
        part = flatten_tensor(tensor)
        # A copy in order would be of this moment only.
        there = isinstance(part, DenseTensor) and part.data is tensor
        if not there or tensor.device.type != "cpu" or tensor.is_complex():
            return None
        headers.append(part.header)
        memory.append(locate(tensor))
    return TensorAddresses(headers, xxh3_cpu.Chunks(memory))
