"""SHA-256 of files, without torch."""

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
