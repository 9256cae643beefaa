"""The manifest of a checkpoint: one digest for each tensor, to find and name damage."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_d9m.errors import CheckpointError, DigestError
from lightning_d9m.hashing.digest import digest_many, digest_value
from lightning_d9m.hashing.nested_values import PLAIN_TYPES, list_keyed_leaves
from lightning_d9m.hashing.value_bytes import encode
from lightning_d9m.text import quote

_HALF = 8  # bytes of each entry: 64 bits find accidents
# In version 1 the key of a leaf was its dotted path, which several leaves may share.
_VERSION = 2


@dataclass(frozen=True)
class Damage:
    """The difference between a checkpoint and its manifest.

    Attributes:
        changed: Paths of tensors whose bytes, shape or dtype differ.
        added: Paths of tensors that are not in the manifest.
        missing: Number of tensors that are only in the manifest.
        values: Whether numbers and strings differ.
    """

    changed: tuple[str, ...]
    added: tuple[str, ...]
    missing: int
    values: bool

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.missing or self.values)


def make_manifest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a checkpoint's content: plain values, 16 bytes for each tensor.

    Args:
        content: Nested dicts, lists and tuples. For any other object only its type is hashed.

    Returns:
        ``"version"``: that of this format; ``"tensors"``: uint8 of shape (n, 16), the digests of
        key and bytes of each tensor, in ascending order; ``"values"``: the digest of all other
        values (32 hex digits).
    """
    digests, values = _digest(content, _VERSION)
    rows = sorted(_row(key, value) for key, (_, value) in digests.items())
    table = np.frombuffer(b"".join(rows), dtype=np.uint8).copy().reshape(-1, 2 * _HALF)
    return {"version": _VERSION, "tensors": torch.from_numpy(table), "values": values}


def check_manifest(content: Mapping[str, Any], manifest: Mapping[str, Any]) -> Damage:
    """Compare a checkpoint's content with its manifest, of this version or an earlier one.

    Raises:
        CheckpointError: If the manifest has a later version.
    """
    version = manifest.get("version", 1)
    if version not in range(1, _VERSION + 1):
        raise CheckpointError(
            f"The checkpoint's manifest has version {quote(version)}; this version of "
            f"lightning_d9m reads those up to {_VERSION}. Install a later one."
        )
    data = manifest["tensors"].cpu().numpy().tobytes()
    rows = [data[at : at + 2 * _HALF] for at in range(0, len(data), 2 * _HALF)]
    expected_rows = {row[:_HALF]: row[_HALF:] for row in rows}
    digests, values = _digest(content, version)
    changed, added = [], []
    for key, (path, value) in digests.items():
        row = _row(key, value)
        expected = expected_rows.pop(row[:_HALF], None)
        if expected is None:
            added.append(path)
        elif expected != row[_HALF:]:
            changed.append(path)
    return Damage(tuple(changed), tuple(added), len(expected_rows), values != manifest["values"])


def _digest(content: Mapping[str, Any], version: int) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the path and digest of each tensor by its key, and the digest of all other values."""
    paths: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    values: list[list[Any]] = []
    for path, keyed, leaf in list_keyed_leaves(content):
        key = path if version == 1 else keyed
        if type(leaf) in PLAIN_TYPES:
            values.append([key, leaf])
        elif isinstance(leaf, Tensor):
            paths[key], tensors[key] = path, leaf
        elif not isinstance(leaf, Mapping | list | tuple) or leaf:  # empty ones do not count
            values.append([key, _plain(leaf)])
    digests = digest_many([tensor.detach() for tensor in tensors.values()])
    named = zip(paths.items(), digests, strict=True)
    return {key: (path, value) for (key, path), value in named}, digest_value(values)


def _plain(leaf: Any) -> Any:
    try:
        encode(leaf)
    except DigestError:
        return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return leaf


def _row(key: str, digest: str) -> bytes:
    return blake2b(key.encode(), digest_size=_HALF).digest() + bytes.fromhex(digest)[:_HALF]
