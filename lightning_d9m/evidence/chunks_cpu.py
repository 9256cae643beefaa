"""Leaves of the digest on the CPU: XXH3-64 of each chunk, read in place."""

import ctypes
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from xxhash import xxh3_64_intdigest

# The digest's two constants; docs/digest.md is the definition and gives the reasons.
CHUNK_BYTES = 131072
BLOCK_BYTES = 1024

# Less for each thread was slower than one thread alone.
_SHARE_BYTES = 512 * CHUNK_BYTES
# More threads would wait for each other: each needs the interpreter lock between two chunks.
_MOST_THREADS = 8
_ZEROS = bytes(BLOCK_BYTES)
_READ_ONLY = 0x100  # PyBUF_READ

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object

_interval_changed = threading.Lock()


def hash_chunks(memory: Sequence[tuple[int, int]]) -> list[bytes]:
    """Hashes memory of this process, on as many threads as torch uses within an operation.

    Args:
        memory: Addresses and sizes in bytes. Their owners keep them alive during the call.

    Returns:
        For each, 8 bytes a chunk, in order: its XXH3-64, little-endian.
    """
    total = sum(size for _, size in memory)
    if total < CHUNK_BYTES:
        return [_hash_span(address, size) for address, size in memory]
    threads = min(torch.get_num_threads(), _MOST_THREADS, total // _SHARE_BYTES)
    with _interpreter_switching_fast():
        if threads < 2:  # noqa: PLR2004 - one more than one
            return [_hash_span(address, size) for address, size in memory]
        own, *others = _divide(memory, total // threads)
        with ThreadPoolExecutor(threads - 1) as pool:
            others_leaves = pool.map(_hash_share, others)
            leaves = b"".join((_hash_share(own), *others_leaves))
    return split_leaves(leaves, memory)


def split_leaves(leaves: bytes, memory: Sequence[tuple[int, int]]) -> list[bytes]:
    """Divides the leaves of all chunks of ``memory`` among its parts."""
    ends = accumulate(-(-size // CHUNK_BYTES) * 8 for _, size in memory)
    return [leaves[begin:end] for begin, end in pairwise([0, *ends])]


def _hash_span(address: int, size: int) -> bytes:
    """Hashes one piece of memory; copies no more of it than the last partial chunk."""
    if size == 0:
        return b""
    view = _view_memory(address, size, _READ_ONLY)
    whole = size - size % CHUNK_BYTES
    leaves = b""
    if whole:
        chunks = (view[begin : begin + CHUNK_BYTES] for begin in range(0, whole, CHUNK_BYTES))
        leaves = array("Q", map(xxh3_64_intdigest, chunks)).tobytes()
    if whole < size:
        padded = b"".join((view[whole:], _ZEROS[: -size % BLOCK_BYTES]))
        leaves += xxh3_64_intdigest(padded).to_bytes(8, "little")
    return leaves


def _hash_share(share: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(_hash_span(address, size) for address, size in share)


def _divide(memory: Sequence[tuple[int, int]], fair: int) -> list[list[tuple[int, int]]]:
    """Divides memory, at ends of chunks, into shares of about ``fair`` bytes."""
    shares: list[list[tuple[int, int]]] = [[]]
    room = fair
    for address, size in memory:
        begin = 0
        while begin < size:
            if room <= 0:
                shares.append([])
                room = fair
            length = min(size - begin, -(-room // CHUNK_BYTES) * CHUNK_BYTES)
            shares[-1].append((address + begin, length))
            begin += length
            room -= length
    return shares


@contextmanager
def _interpreter_switching_fast() -> Iterator[None]:
    """Lets a thread that waits for the interpreter lock have it after 10 us, not 5 ms.

    The xxhash package gives the lock away for each chunk. Beside one busy Python thread, getting
    it back would take the switch interval, hundreds of times as long as the hashing.
    """
    with _interval_changed:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, 1e-5))
        try:
            yield
        finally:
            # Half a microsecond more, because whole ones are kept and fractions cut off.
            sys.setswitchinterval(before + 5e-7)
