"""A cache of the addresses of tensors.

Finding the bytes of a small tensor takes longer than hashing them, and most tensors are digested
repeatedly.
"""

from collections.abc import Callable, Sequence
from operator import add, attrgetter, eq
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from lightning_d9m.hashing import xxh3_cpu
from lightning_d9m.hashing.digest import _load_kernel
from lightning_d9m.hashing.tensor_bytes import DenseTensor, flatten_tensor, locate

# What changes when a tensor moves. Of a contiguous tensor the strides follow from the shape.
_FORM: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    attrgetter("shape"),
    attrgetter("dtype"),
    Tensor.is_contiguous,
)


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

    headers: list[bytes]
    parts: list[LocatedMemory]


class AddressCache:
    """The addresses of the tensors of the last call."""

    def __init__(self) -> None:
        self._located: TensorAddresses | None = None
        self._form: list[list[Any]] = []
        self._streams: list[Any] = []

    def find(self, tensors: Sequence[Tensor]) -> TensorAddresses | None:
        """Return the addresses of tensors; None unless all are dense, real and contiguous.

        They are on the CPU, or on a CUDA device whose kernel works. The cached addresses are valid
        while each tensor has the same address, shape and dtype and is contiguous: freeing or
        resizing a storage, a cast and ``tensor.data = other`` change these. Complex tensors are not
        cached, because they can be conjugated in place.

        Raises:
            DigestError: As ``digest``, for the first tensor that has none.
        """
        if not tensors:
            return None
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
            try:
                if not self._is_valid(tensors) or self._streams != self._find_streams():
                    self._form = [list(map(read, tensors)) for read in _FORM]
                    self._located = _locate(tensors)
                    self._streams = self._find_streams()
            except RuntimeError:  # sparse, fake or not initialized: without memory
                self._form, self._located = [], None
            return self._located

    def _is_valid(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors are where they were, without a list of new objects.

        This runs in every batch. Thousands of new tuples would start a garbage collection.
        """
        return (
            bool(self._form)
            and len(tensors) == len(self._form[0])
            and all(
                all(map(eq, map(read, tensors), known))
                for read, known in zip(_FORM, self._form, strict=True)
            )
        )

    def _find_streams(self) -> list[Any]:
        """Return the streams on which the tables were copied to their devices."""
        parts = [] if self._located is None else self._located.parts
        return [torch.cuda.current_stream(part.device) for part in parts if part.kernel]


def digest_located(located: TensorAddresses) -> list[str]:
    """Return the digests of tensors whose addresses are known, as ``digest_many`` does."""
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
    headers: list[bytes] = []
    memory: dict[torch.device, list[tuple[int, int]]] = {}
    indices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        part = flatten_tensor(tensor)
        # A contiguous copy would be outdated in the next call.
        if not isinstance(part, DenseTensor) or part.data is not tensor or tensor.is_complex():
            return None
        headers.append(part.header)
        memory.setdefault(tensor.device, []).append(locate(tensor))
        indices.setdefault(tensor.device, []).append(index)
    parts = []
    for device, spans in memory.items():
        kernel: Any = None
        chunks: Any
        if device.type == "cpu":
            chunks = xxh3_cpu.Chunks(spans)
        else:
            kernel = _load_kernel(device)
            if kernel is None:
                return None
            chunks = kernel.AddressTable(spans, device)
        parts.append(LocatedMemory(device, indices[device], chunks, kernel))
    return TensorAddresses(headers, parts)
