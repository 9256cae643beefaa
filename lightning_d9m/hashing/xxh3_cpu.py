"""Leaves of the digest on the CPU: XXH3-64 of each chunk, read in place."""

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

# Chunks; less for each thread was slower than one thread alone.
_SHARE = 512
# More threads would wait for each other: each needs the interpreter lock between two chunks.
_MOST_THREADS = 8
_ZEROS = bytes(BLOCK_BYTES)
# Bytes of one piece of memory whose chunks are remembered: 12 kB for 64 chunks.
_REMEMBERED = 64 * CHUNK_BYTES
_READ_ONLY = 0x100  # PyBUF_READ

_make_view = ctypes.pythonapi.PyMemoryView_FromMemory
_make_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_make_view.restype = ctypes.py_object

_interval_changed = threading.Lock()
_Divided = tuple[list[memoryview], list[tuple[memoryview, bytes]]]


class Chunks:
    """Memory of this process, divided into what is hashed.

    To divide it takes longer than to hash little of it, so this may be kept for memory that is
    hashed again and again.

    Args:
        memory: Addresses and sizes in bytes. Their owners keep them alive whenever it is hashed.
    """

    def __init__(self, memory: Iterable[tuple[int, int]]) -> None:
        self._ready: list[memoryview] = []
        self._padded: list[tuple[memoryview, bytes]] = []
        # For each piece of memory, which of the leaves of both are its own, in bytes.
        self._bounds: list[tuple[int, int, int, int]] = []
        for address, size in memory:
            ready, padded = _divide(address, size)
            begin, part = 8 * len(self._ready), 8 * len(self._padded)
            self._ready += ready
            self._padded += padded
            self._bounds.append((begin, 8 * len(self._ready), part, 8 * len(self._padded)))

    def hash(self) -> list[bytes]:
        """Hashes it, on as many threads as torch uses within an operation.

        Returns:
            For each piece of memory, 8 bytes a chunk, in order: its XXH3-64, little-endian.
        """
        ready = _hash_ready(self._ready) if self._ready else b""
        padded = _hash(map(b"".join, self._padded))
        return [ready[a:b] + padded[c:d] for a, b, c, d in self._bounds]


def hash_chunks(memory: Iterable[tuple[int, int]]) -> list[bytes]:
    """Hashes memory of this process.

    Args:
        memory: Addresses and sizes in bytes. Their owners keep them alive during the call.

    Returns:
        For each, 8 bytes a chunk, in order: its XXH3-64, little-endian.
    """
    return Chunks(memory).hash()


def hash_span(address: int, size: int) -> bytes:
    """Hashes one piece of memory; how it is divided is remembered, for there it lies in each step.

    Returns:
        8 bytes a chunk, as from ``hash_chunks``.
    """
    ready, padded = (_recall if size <= _REMEMBERED else _divide)(address, size)
    leaves = _hash_ready(ready) if ready else b""
    for parts in padded:
        leaves += xxh3_64_intdigest(b"".join(parts)).to_bytes(8, "little")
    return leaves


def copy_span(address: int, size: int) -> bytes:
    """Copies one piece of memory, padded for ``hash_copy``.

    Args:
        address: Where it lies.
        size: In bytes; one chunk at most.
    """
    ready, padded = _recall(address, size)
    return b"".join(padded[0] if padded else ready)


def hash_copy(copy: bytes) -> bytes:
    """Hashes what was copied; returns the bytes that ``hash_span`` would have returned."""
    return xxh3_64_intdigest(copy).to_bytes(8, "little") if copy else b""


def split_leaves(leaves: bytes, memory: Sequence[tuple[int, int]]) -> list[bytes]:
    """Divides the leaves of all chunks of ``memory`` among its parts."""
    ends = accumulate(-(-size // CHUNK_BYTES) * 8 for _, size in memory)
    return [leaves[begin:end] for begin, end in pairwise([0, *ends])]


def _divide(address: int, size: int) -> _Divided:
    """Returns the chunks that are hashed as they are, and the last one if it is padded before."""
    if not size:
        return [], []
    view: memoryview = _make_view(address, size, _READ_ONLY)
    end = size - size % CHUNK_BYTES
    ready = [view[begin : begin + CHUNK_BYTES] for begin in range(0, end, CHUNK_BYTES)]
    rest, padding = view[end:], _ZEROS[: -size % BLOCK_BYTES]
    if padding:
        return ready, [(rest, padding)]
    return ([*ready, rest] if rest else ready), []


_recall = functools.lru_cache(maxsize=4096)(_divide)


def _hash_ready(chunks: Sequence[memoryview]) -> bytes:
    # The xxhash package gives the interpreter lock away for each chunk. Beside one busy Python
    # thread, getting it back would take the switch interval of 5 ms, hundreds of times as long as
    # the hashing; so a thread that waits for it gets it after 10 us meanwhile.
    with _interval_changed:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, 1e-5))
        try:
            shares = len(chunks) // _SHARE
            return _hash_together(chunks, shares) if shares > 1 else _hash(chunks)
        finally:
            # Half a microsecond more, because whole ones are kept and fractions cut off.
            sys.setswitchinterval(before + 5e-7)


def _hash(chunks: Iterable[bytes | memoryview]) -> bytes:
    return array("Q", map(xxh3_64_intdigest, chunks)).tobytes()


def _hash_together(chunks: Sequence[memoryview], shares: int) -> bytes:
    """Hashes chunks on as many threads as torch has, each with a share or more."""
    threads = min(torch.get_num_threads(), _MOST_THREADS, shares)
    share = -(-len(chunks) // threads)
    own, *others = (chunks[start : start + share] for start in range(0, len(chunks), share))
    if not others:
        return _hash(own)
    with ThreadPoolExecutor(len(others)) as pool:
        others_leaves = pool.map(_hash, others)
        return b"".join((_hash(own), *others_leaves))
