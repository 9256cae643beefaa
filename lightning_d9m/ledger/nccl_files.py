"""Files from which NCCL takes variables, rings and its choice of algorithms.

Which ranks are neighbors in a ring decides the order of a sum. NCCL finds the rings itself, from
the devices and their links; a file can name them. Of a file its hash is recorded, because its
content and its path may identify the machine.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

# The links of the devices, the rings and trees between them, and the limits of each algorithm.
_NAMED = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_TUNER_CONFIG_FILE")
_USER, _SYSTEM = "NCCL_CONF_FILE", "/etc/nccl.conf"  # lines of VARIABLE=VALUE


def capture_nccl_files() -> dict[str, str]:
    """Return the hash of each file that NCCL reads, by dotted name.

    A file that does not exist, or cannot be read, has no entry: NCCL continues without it.
    """
    hashes = {}
    for name, path in _list_files():
        with suppress(OSError, RuntimeError):  # there may be no home
            content = Path(path).expanduser().read_bytes()
            hashes[f"file.{name}"] = blake2b(content, digest_size=8).hexdigest()
    return hashes


def _list_files() -> Iterator[tuple[str, str]]:
    for name in _NAMED:
        if path := os.environ.get(name):
            yield name, path
    yield _USER, os.environ.get(_USER) or "~/.nccl.conf"
    yield "nccl.conf", _SYSTEM
