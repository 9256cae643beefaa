"""The chunk digests on the CPU: XXH3-64 of each chunk, read in place."""

import ctypes
import os
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from xxhash import xxh3_64_intdigest

from lightning_d9m.engine.hashing.threads import map_on_threads

# The digest's two constants. A chunk is what one program of the CUDA kernel hashes, and a block is
# XXH3's own: chunks of whole blocks need no special case for the end of the input in the kernel.
CHUNK_BYTES = 131072
BLOCK_BYTES = 1024

# Chunks per thread; with fewer, several threads are slower than one.
_SHARE = 512
# More threads wait for each other: each needs the interpreter lock between two chunks.
_MAX_THREADS = 8
_ZEROS = bytes(BLOCK_BYTES)
_READ_ONLY = 0x100  # PyBUF_READ

# By address, because NumPy has no view of bfloat16, float8 and other dtypes of torch.
_make_view = ctypes.pythonapi.PyMemoryView_FromMemory
_make_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_make_view.restype = ctypes.py_object
# All memory from address 1 on. A slice of it takes a fifth of the time of another view.
_MEMORY: memoryview = _make_view(1, sys.maxsize, _READ_ONLY)

# The switch interval belongs to the process. A thread that restored it while another hashes would
# make the other slow, or leave the interval short for good. A lock that its thread can take again,
# because a signal handler may save a checkpoint while its thread hashes, as Lightning's for SLURM.
_interval_changed = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows
    # A child must find neither a lock that no thread of it will release nor a short interval.
    os.register_at_fork(
        before=_interval_changed.acquire,
        after_in_parent=_interval_changed.release,
        after_in_child=_interval_changed.release,
    )
_Chunk = tuple[memoryview, bytes]  # with its padding


def hash_chunks(memory: Sequence[tuple[int, int]]) -> list[bytes]:
    """Hash memory of this process, on as many threads as torch uses within an operation.

    Args:
        memory: Addresses and sizes in bytes. Their owners must be alive during the call.

    Returns:
        For each span, the XXH3-64 of its chunks in order: 8 bytes each, little-endian.
    """
    chunks = [chunk for address, size in memory for chunk in _divide(address, size)]
    # The xxhash package releases the interpreter lock for each chunk. While another Python thread
    # is busy, taking it back takes up to the switch interval (5 ms by default), hundreds of times
    # as long as hashing a chunk. Measured for 256 chunks (32 MiB) beside one busy thread, on two
    # cores: 28 ms with the default interval, 4 ms with 10 us.
    with _interval_changed:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, 1e-5))
        try:
            shares = len(chunks) // _SHARE
            found = _hash_in_threads(chunks, shares) if shares > 1 else _hash(chunks)
        finally:
            # Python truncates the interval to whole microseconds; half of one compensates.
            sys.setswitchinterval(before + 5e-7)
    return split_chunk_digests(found, memory)


def hash_chunk(data: bytes) -> bytes:
    """Hash the bytes of one chunk, or of the last one of a tensor, which may be incomplete."""
    return _hash([(memoryview(data), _ZEROS[: -len(data) % BLOCK_BYTES])] if data else [])


def count_chunks(size: int) -> int:
    """Return the number of chunks of a span."""
    return -(-size // CHUNK_BYTES)


def split_chunk_digests(chunk_digests: bytes, memory: Iterable[tuple[int, int]]) -> list[bytes]:
    """Divide the digests of all chunks of ``memory`` among its spans."""
    ends = accumulate((8 * count_chunks(size) for _, size in memory), initial=0)
    return [chunk_digests[begin:end] for begin, end in pairwise(ends)]


def _divide(address: int, size: int) -> Iterator[_Chunk]:
    """Yield the chunks of a span; the last one may need padding."""
    for begin in range(address - 1, address - 1 + size, CHUNK_BYTES):
        chunk = _MEMORY[begin : min(begin + CHUNK_BYTES, address - 1 + size)]
        yield chunk, _ZEROS[: -len(chunk) % BLOCK_BYTES]


def _hash(chunks: Iterable[_Chunk]) -> bytes:
    whole = (b"".join(chunk) if chunk[1] else chunk[0] for chunk in chunks)
    return array("Q", map(xxh3_64_intdigest, whole)).tobytes()


def _hash_in_threads(chunks: Sequence[_Chunk], shares: int) -> bytes:
    """Hash chunks on as many threads as torch uses, at least ``_SHARE`` chunks on each."""
    threads = min(torch.get_num_threads(), _MAX_THREADS, shares)
    share = -(-len(chunks) // threads)
    parts = [chunks[start : start + share] for start in range(0, len(chunks), share)]
    return b"".join(map_on_threads(_hash, parts, threads))
