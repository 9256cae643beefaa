"""Leaves of the digest on the CPU: XXH3-64 of each chunk, read in place."""

import ctypes
from array import array

from xxhash import xxh3_64_intdigest

# The digest's two constants; docs/digest.md is the definition. A chunk of 64 KiB is also the
# largest for which the xxhash package keeps the interpreter lock: with larger ones, each chunk
# would wait up to 5 ms for the lock whenever another Python thread is busy.
CHUNK_BYTES = 65536
# XXH3's block for the default secret. Chunks are padded to whole blocks, so that a kernel needs
# only one of XXH3's five paths.
BLOCK_BYTES = 1024

_ZEROS = bytes(BLOCK_BYTES)
_READ_ONLY = 0x100  # PyBUF_READ

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object


def hash_chunks(address: int, size: int) -> bytes:
    """Hashes memory of this process, without copying more than the last partial chunk.

    Args:
        address: Where the bytes begin; whoever owns them keeps them alive during the call.
        size: How many bytes.

    Returns:
        8 bytes for each chunk, in order: its XXH3-64, little-endian.
    """
    if size == 0:
        return b""
    view = _view_memory(address, size, _READ_ONLY)
    whole = size - size % CHUNK_BYTES
    # A generator, so that other Python threads get their turn between chunks.
    leaves = array(
        "Q", (xxh3_64_intdigest(view[i : i + CHUNK_BYTES]) for i in range(0, whole, CHUNK_BYTES))
    )
    if whole < size:
        padding = _ZEROS[: -size % BLOCK_BYTES]
        leaves.append(xxh3_64_intdigest(b"".join((view[whole:], padding))))
    return leaves.tobytes()
