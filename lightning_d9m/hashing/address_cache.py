"""A cache of the addresses of tensors.

Finding the bytes of a small tensor takes longer than hashing them, and most tensors are digested
repeatedly.
"""

from collections.abc import Sequence
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from lightning_d9m.hashing.digest import _load_kernel, digest_many
from lightning_d9m.hashing.tensor_bytes import (
    DenseTensor,
    flatten_tensor,
    locate,
    locate_quickly,
    locate_together,
)
from lightning_d9m.hashing.xxh3 import cpu as xxh3_cpu


class LocatedMemory(NamedTuple):
    """The memory of the tensors of one device.

    Attributes:
        device: The device.
        indices: The numbers of its tensors.
        memory: The chunks of the CPU, or the table of a CUDA device.
        kernel: The module of the CUDA kernel; None for the CPU.
    """

    device: torch.device
    indices: Sequence[int]
    memory: Any
    kernel: Any


class TensorAddresses(NamedTuple):
    """The header of each tensor's digest, and the memory that is hashed for it."""

    headers: Sequence[bytes]
    parts: list[LocatedMemory]


class AddressCache:
    """The addresses of the tensors of the last call."""

    def __init__(self) -> None:
        self._located: TensorAddresses | None = None
        self._pointers: list[int] = []
        self._guards: Any = None
        self._streams: list[Any] = []

    def find(self, tensors: Sequence[Tensor]) -> TensorAddresses | None:
        """Return the addresses of tensors; None unless all are dense, real and contiguous.

        They are on the CPU, or on a CUDA device whose kernel works. A cached address is valid
        while its tensor has the same address, dtype, sizes and strides: freeing or resizing a
        storage, a cast and ``tensor.data = other`` change one of these. Complex tensors are not
        cached, because they can be conjugated in place.

        Raises:
            DigestError: As ``digest``, for the first tensor that has none.
        """
        if not tensors:
            return None
        # Without gradients, because the guards compare requires_grad where gradients are on.
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001 - as in digest_many
            try:
                # This runs in every batch, so it creates integers only: thousands of new tuples
                # would start a garbage collection. Addresses come first: a tensor without one
                # raises, and has perhaps no strides either.
                pointers = list(map(Tensor.data_ptr, tensors))
                guards, self._guards = self._guards, None
                if (
                    guards is None
                    or len(pointers) != len(self._pointers)
                    or not guards.check(*tensors)
                    or self._streams != self._find_streams()
                    or not (pointers == self._pointers or self._move(tensors, pointers))
                ):
                    self._located = _locate(tensors)
                    self._streams = self._find_streams()
                    guards = None if self._located is None else _guard(tensors)
                self._guards, self._pointers = guards, pointers
            except RuntimeError:  # sparse, fake or not initialized: without memory
                self._guards, self._located = None, None
            return self._located

    def digest(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the digests of tensors, as ``digest_many`` does."""
        unique = dict(zip(map(id, tensors), tensors, strict=True))
        if len(unique) < len(tensors):  # the guards refuse a tensor that is given twice
            digests = dict(zip(unique, self.digest(list(unique.values())), strict=True))
            return [digests[id(tensor)] for tensor in tensors]
        located = self.find(tensors)
        return digest_many(tensors) if located is None else digest_located(located)

    def _move(self, tensors: Sequence[Tensor], pointers: Sequence[int]) -> bool:
        """Replace the addresses of tensors whose form has not changed, such as new copies.

        Returns:
            False if most have other addresses, or one on a CUDA device: locate them all again.
        """
        assert self._located is not None, "there are guards"
        moved = [index for index, old in enumerate(self._pointers) if pointers[index] != old]
        (_, _, memory, kernel), *others = self._located.parts
        if others or kernel is not None or 2 * len(moved) > len(pointers):
            return False
        for index in moved:
            memory.move(index, *locate(tensors[index]))
        return True

    def _find_streams(self) -> list[Any]:
        """Return the streams on which the tables were copied to their devices."""
        parts = [] if self._located is None else self._located.parts
        return [torch.cuda.current_stream(part.device) for part in parts if part.kernel]


def _guard(tensors: Sequence[Tensor]) -> Any:
    """Return a check in C++ of the class, dtype, device, sizes and strides of dense tensors.

    It is that of ``torch.compile``, and takes a third of the time of reading ``shape``, ``dtype``
    and ``is_contiguous`` in Python. None if this torch has another one: nothing is cached then.
    """
    try:
        make = torch._C._dynamo.guards.TensorGuards  # noqa: SLF001 - torch has no public check
        return make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (AttributeError, TypeError):
        return None


def digest_located(located: TensorAddresses) -> list[str]:
    """Return the digests of tensors whose addresses are known, as ``digest_many`` does."""
    if len(located.parts) == 1 and located.parts[0].kernel is None:
        found = located.parts[0].memory.hash()
        return list(map(xxh3_128_hexdigest, map(add, located.headers, found)))
    found = [b""] * len(located.headers)
    started = []
    for part in located.parts:
        if part.kernel is not None:
            chunk_digests = part.kernel.allocate(part.memory.chunks, part.device)
            part.memory.start(chunk_digests, 0)
            started.append((part, chunk_digests))
    for part in located.parts:
        if part.kernel is None:  # the other devices work meanwhile
            _place(found, part, part.memory.hash())
    for part, chunk_digests in started:
        data = chunk_digests.cpu().numpy().tobytes()
        _place(found, part, [data[begin:end] for begin, end in part.memory.bounds])
    return list(map(xxh3_128_hexdigest, map(add, located.headers, found)))


def _place(found: list[bytes], part: LocatedMemory, own: list[bytes]) -> None:
    for index, digests in zip(part.indices, own, strict=True):
        found[index] = digests


def _locate(tensors: Sequence[Tensor]) -> TensorAddresses | None:
    together = locate_together(tensors)
    if together is not None:
        chunks: Any = xxh3_cpu.Chunks(together[1])
        part = LocatedMemory(torch.device("cpu"), range(len(tensors)), chunks, None)
        return TensorAddresses(together[0], [part])
    headers: list[bytes] = []
    memory: dict[torch.device, list[tuple[int, int]]] = {}
    indices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if (place := locate_quickly(tensor)) is not None:
            header, span = place[0], place[1:]
        else:
            flat = flatten_tensor(tensor)
            # A contiguous copy would be outdated in the next call.
            if not isinstance(flat, DenseTensor) or flat.data is not tensor or tensor.is_complex():
                return None
            header, span = flat.header, locate(tensor)
        headers.append(header)
        memory.setdefault(tensor.device, []).append(span)
        indices.setdefault(tensor.device, []).append(index)
    parts = []
    for device, spans in memory.items():
        kernel: Any = None
        if device.type == "cpu":
            chunks = xxh3_cpu.Chunks(spans)
        else:
            kernel = _load_kernel(device)
            if kernel is None:
                return None
            chunks = kernel.AddressTable(spans, device)
        parts.append(LocatedMemory(device, indices[device], chunks, kernel))
    return TensorAddresses(headers, parts)
