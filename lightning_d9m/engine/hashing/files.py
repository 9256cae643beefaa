"""Digests and signs of files, which tell whether they are as they were, without torch."""

import os
from hashlib import sha256
from pathlib import Path

_BLOCK = 2**20  # bytes in memory at once: a file of weights may be larger than that


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits."""
    hasher = sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def read_sign(status: os.stat_result) -> tuple[int, ...]:
    """Return what differs after a file has been written, replaced or renamed since.

    It also tells of a file that has its former content again.
    """
    # A program can set the time of modification back, as `cp -p` and `tar` do, and replace a file
    # by one of the same size; it cannot set ctime.
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
