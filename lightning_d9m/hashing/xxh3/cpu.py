"""The chunk digests on the CPU: XXH3-64 of each chunk, read in place."""

import ctypes
import functools
import sys
import threading
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import torch
from xxhash import xxh3_64_intdigest

# The digest's two constants; docs/digest.md is the definition and gives the reasons.
CHUNK_BYTES = 131072
BLOCK_BYTES = 1024

# Chunks per thread; with fewer, several threads are slower than one.
_SHARE = 512
# More threads wait for each other: each needs the interpreter lock between two chunks.
_MAX_THREADS = 8
_ZEROS = bytes(BLOCK_BYTES)
# Bytes of the largest span that is copied even if it needs no padding; less than a chunk.
_SMALL = 4096
# Bytes of the largest span whose chunks are cached: 12 kB for 64 chunks.
_MAX_CACHED_BYTES = 64 * CHUNK_BYTES
_READ_ONLY = 0x100  # PyBUF_READ

_make_view = ctypes.pythonapi.PyMemoryView_FromMemory
_make_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_make_view.restype = ctypes.py_object
# All memory from address 1 on. A slice of it takes a fifth of the time of another view.
_MEMORY: memoryview = _make_view(1, sys.maxsize, _READ_ONLY)

_interval_changed = threading.Lock()
_Divided = tuple[list[memoryview], list[tuple[memoryview, bytes]]]


class Chunks:
    """Memory of this process, divided into chunks.

    Dividing small memory takes longer than hashing it. Keep this object for memory that is hashed
    repeatedly.

    Args:
        memory: Addresses and sizes in bytes. Their owners must be alive at each call of ``hash``.
    """

    def __init__(self, memory: Iterable[tuple[int, int]]) -> None:
        self._ready: list[memoryview] = []
        self._padded: list[tuple[memoryview, bytes]] = []
        # The places of each span's chunk digests among those of the lists, in bytes. Most spans
        # have none in the first list.
        self._in_ready: dict[int, slice] = {}
        self._in_padded: list[slice] = []
        place = 0
        for index, (address, size) in enumerate(memory):
            ready, padded = _divide(address, size)
            self._padded += padded
            start, place = place, place + 8 * len(padded)
            self._in_padded.append(slice(start, place))
            if ready:
                begin = 8 * len(self._ready)
                self._ready += ready
                self._in_ready[index] = slice(begin, begin + 8 * len(ready))

    def move(self, index: int, address: int, size: int) -> None:
        """Replace the address of a span; it must keep its size."""
        ready, padded = _divide(address, size)
        begin = self._in_padded[index].start // 8
        self._padded[begin : begin + len(padded)] = padded
        if ready:
            begin = self._in_ready[index].start // 8
            self._ready[begin : begin + len(ready)] = ready

    def hash(self) -> list[bytes]:
        """Hash the memory, on as many threads as torch uses within an operation.

        Returns:
            For each span, the XXH3-64 of its chunks in order: 8 bytes each, little-endian.
        """
        ready = _hash_ready(self._ready) if self._ready else b""
        padded = _hash(map(b"".join, self._padded))
        found = list(map(padded.__getitem__, self._in_padded))
        for index, place in self._in_ready.items():
            found[index] = ready[place] + found[index]
        return found


def hash_chunks(memory: Iterable[tuple[int, int]]) -> list[bytes]:
    """Hash memory of this process.

    Args:
        memory: Addresses and sizes in bytes. Their owners must be alive during the call.

    Returns:
        For each span, the XXH3-64 of its chunks in order: 8 bytes each, little-endian.
    """
    return Chunks(memory).hash()


def hash_span(address: int, size: int) -> bytes:
    """Hash one span of memory; its division into chunks is cached for the next step.

    Returns:
        8 bytes for each chunk, as ``hash_chunks`` does.
    """
    ready, padded = (_divide_cached if size <= _MAX_CACHED_BYTES else _divide)(address, size)
    found = _hash_ready(ready) if ready else b""
    for parts in padded:
        found += xxh3_64_intdigest(b"".join(parts)).to_bytes(8, "little")
    return found


def copy_span(address: int, size: int) -> bytes:
    """Copy one span of at most one chunk, padded for ``hash_copy``."""
    ready, padded = _divide_cached(address, size)
    return b"".join(padded[0] if padded else ready)


def hash_copy(copy: bytes) -> bytes:
    """Hash a copy; return the bytes that ``hash_span`` returns for its original."""
    return xxh3_64_intdigest(copy).to_bytes(8, "little") if copy else b""


def hash_chunk(data: bytes) -> bytes:
    """Hash the bytes of one chunk, or of the last one of a tensor, which may be incomplete."""
    return hash_copy(data.ljust(len(data) + -len(data) % BLOCK_BYTES, b"\0"))


def split_chunk_digests(chunk_digests: bytes, memory: Sequence[tuple[int, int]]) -> list[bytes]:
    """Divide the digests of all chunks of ``memory`` among its spans."""
    ends = accumulate(-(-size // CHUNK_BYTES) * 8 for _, size in memory)
    return [chunk_digests[begin:end] for begin, end in pairwise([0, *ends])]


def _divide(address: int, size: int) -> _Divided:
    """Return the chunks that are hashed in place, and the last chunk if it needs padding."""
    if not size:
        return [], []
    view = _MEMORY[address - 1 : address - 1 + size]
    if size <= _SMALL:
        return [], [(view, _ZEROS[: -size % BLOCK_BYTES])]
    end = size - size % CHUNK_BYTES
    ready = [view[begin : begin + CHUNK_BYTES] for begin in range(0, end, CHUNK_BYTES)]
    rest, padding = view[end:], _ZEROS[: -size % BLOCK_BYTES]
    if padding:
        return ready, [(rest, padding)]
    return ([*ready, rest] if rest else ready), []


_divide_cached = functools.lru_cache(maxsize=4096)(_divide)


def _hash_ready(chunks: Sequence[memoryview]) -> bytes:
    # The xxhash package releases the interpreter lock for each chunk. While another Python thread
    # is busy, taking it back takes up to the switch interval (5 ms by default), hundreds of times
    # as long as hashing a chunk. Measured for 256 chunks (32 MiB) beside one busy thread, on two
    # cores: 28 ms with the default interval, 4 ms with 10 us.
    with _interval_changed:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, 1e-5))
        try:
            shares = len(chunks) // _SHARE
            return _hash_in_threads(chunks, shares) if shares > 1 else _hash(chunks)
        finally:
            # Python truncates the interval to whole microseconds; half of one compensates.
            sys.setswitchinterval(before + 5e-7)


def _hash(chunks: Iterable[bytes | memoryview]) -> bytes:
    return array("Q", map(xxh3_64_intdigest, chunks)).tobytes()


def _hash_in_threads(chunks: Sequence[memoryview], shares: int) -> bytes:
    """Hash chunks on as many threads as torch uses, at least ``_SHARE`` chunks on each."""
    threads = min(torch.get_num_threads(), _MAX_THREADS, shares)
    share = -(-len(chunks) // threads)
    own, *others = (chunks[start : start + share] for start in range(0, len(chunks), share))
    if not others:
        return _hash(own)
    with ThreadPoolExecutor(len(others)) as pool:
        others_found = pool.map(_hash, others)
        return b"".join((_hash(own), *others_found))
