"""Digests that one stream of a CUDA device computes, from the launches to the bytes on the host.

Everything happens on the stream on which the tensors were current: a stream does not wait for
another one, so nothing is enqueued elsewhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_d9m.hashing.xxh3.cpu import CHUNK_BYTES

# Receives the chunk digests of each span of memory.
Receive = Callable[[list[bytes]], None]
_ARENA = 4096  # chunk digests for which memory is allocated together
_Spans = Sequence[tuple[int, int]]


class StreamDigests:
    """Digests of tensors that a stream reads in order.

    Args:
        kernel: The module ``xxh3.cuda``.
        device: The device.
        stream: Its stream, which must be the current one when tensors are added.
    """

    def __init__(self, kernel: Any, device: torch.device, stream: Any) -> None:
        self._kernel = kernel
        self._device = device
        self._stream = stream
        self._arenas: list[tuple[torch.Tensor, int]] = []  # with the number of used places
        self._receivers: list[tuple[Sequence[tuple[int, int]], Receive]] = []
        self._bytes = 0  # of all chunk digests
        # Tensors of one launch, which follows.
        self._spans: list[tuple[int, int]] = []
        self._tensors: list[torch.Tensor] = []
        self._host_copies: list[torch.Tensor] | None = None
        self._copied: Any = None

    def add(self, tensors: Sequence[torch.Tensor], spans: _Spans, receive: Receive) -> None:
        """Note tensors for the next launch, and who receives their digests."""
        bounds = []
        for _, size in spans:
            chunks = -(-size // CHUNK_BYTES)
            bounds.append((self._bytes, self._bytes + 8 * chunks))
            self._bytes += 8 * chunks
        self._receivers.append((bounds, receive))
        self._spans += spans
        self._tensors += tensors

    def launch(self) -> None:
        """Start hashing the noted tensors, in one launch."""
        if not self._spans:
            return
        spans, tensors = self._spans, self._tensors
        self._spans, self._tensors = [], []
        leaves, first = self._reserve(self._kernel.count_chunks(spans))
        self._kernel.hash_into(leaves, first, spans, self._device)
        for tensor in tensors:
            # The memory may belong to another stream's pool and be reused before it is read.
            tensor.record_stream(self._stream)

    def add_table(self, table: Any, receive: Receive) -> None:
        """Start hashing the memory of a table. Its tensors must live until the digests are read."""
        self.launch()
        begin = self._bytes
        self._bytes += table.chunks * 8
        bounds = table.bounds if not begin else [(begin + a, begin + b) for a, b in table.bounds]
        self._receivers.append((bounds, receive))
        table.start(*self._reserve(table.chunks))

    def start_copy(self) -> None:
        """Copy the results to the host, without waiting."""
        with torch.cuda.stream(self._stream):
            self._host_copies = [
                self._kernel.start_copy(arena[:used]) for arena, used in self._arenas
            ]
            self._copied = self._stream.record_event()

    def fetch(self) -> None:
        """Wait for the results, and pass them to their receivers."""
        if self._host_copies is None:
            with torch.cuda.stream(self._stream):
                found = [arena[:used].cpu() for arena, used in self._arenas]
        else:
            self._copied.synchronize()
            found = self._host_copies
        data = b"".join(part.numpy().tobytes() for part in found)
        for bounds, receive in self._receivers:
            receive([data[begin:end] for begin, end in bounds])

    def _reserve(self, places: int) -> tuple[torch.Tensor, int]:
        """Return memory on the device and the first free place in it."""
        arena, used = self._arenas[-1] if self._arenas else (None, 0)
        if arena is None or used + places > len(arena):
            arena, used = self._kernel.allocate(max(places, _ARENA), self._device), 0
            self._arenas.append((arena, 0))
        self._arenas[-1] = (arena, used + places)
        return arena, used
