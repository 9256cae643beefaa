"""The manifest of a checkpoint: one digest for each tensor, to find and name damage."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from lightning_d9m.engine.hashing.digest import DigestQueue
from lightning_d9m.errors import CheckpointError
from lightning_d9m.text import quote

_HALF = 8  # bytes of each entry: 64 bits find accidents
_VERSION = 3
# Keys whose repr names them; that of another object may hold its address.
_PLAIN_KEYS = (str, int, float, bytes, tuple, type(None))
_CONTAINERS = (Mapping, list, tuple)


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
        ``"version"``: that of this format; ``"tensors"``: uint8 of shape (n, 16), the digests
        of key and bytes of each tensor, in ascending order; ``"values"``: the XXH3-128 of the JSON
        list of [key, digest] of all others (32 hex digits).
    """
    tensors, values = _digest_content(content)
    rows = sorted(name + half for name, (_, half) in tensors.items())
    table = np.frombuffer(b"".join(rows), dtype=np.uint8).copy().reshape(-1, 2 * _HALF)
    return {"version": _VERSION, "tensors": torch.from_numpy(table), "values": values}


def digest_manifest(manifest: Mapping[str, Any] | None) -> str:
    """Return the digest of a manifest, 32 hex digits: one for all that the checkpoint holds.

    Empty without a manifest.
    """
    if manifest is None:
        return ""
    content = manifest["tensors"].numpy().tobytes() + str(manifest["values"]).encode()
    return blake2b(content, digest_size=16).hexdigest()


def check_manifest(content: Mapping[str, Any], manifest: Mapping[str, Any]) -> Damage:
    """Compare a checkpoint's content with its manifest.

    Raises:
        CheckpointError: If the manifest has another version.
    """
    version = manifest.get("version", 1)
    if version != _VERSION:
        raise CheckpointError(
            f"The checkpoint's manifest has version {quote(version)}; this version of "
            f"lightning_d9m reads version {_VERSION}. Use the version that saved it."
        )
    data = manifest["tensors"].cpu().numpy().tobytes()
    rows = [data[at : at + 2 * _HALF] for at in range(0, len(data), 2 * _HALF)]
    expected_rows = {row[:_HALF]: row[_HALF:] for row in rows}
    tensors, values = _digest_content(content)
    changed, added = [], []
    for name, (path, found) in tensors.items():
        expected = expected_rows.pop(name, None)
        if expected is None:
            added.append(path)
        elif expected != found:
            changed.append(path)
    return Damage(tuple(changed), tuple(added), len(expected_rows), values != manifest["values"])


def _digest_content(content: Mapping[str, Any]) -> tuple[dict[bytes, tuple[str, bytes]], str]:
    """Return path and half the digest of each tensor by that of its key; that of the values."""
    leaves: list[tuple[str, str, object]] = []
    _collect_leaves(content, "", "", (id(content),), leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf[2], Tensor)]
    values = [leaf for leaf in leaves if not isinstance(leaf[2], Tensor)]
    queue = DigestQueue()
    queue.add(cast(Tensor, own) for *_, own in tensors)
    queue.add_leaves(own for *_, own in values)
    digests = queue.fetch()
    found = {
        blake2b(key.encode(), digest_size=_HALF).digest(): (path, bytes.fromhex(own)[:_HALF])
        for (path, key, _), own in zip(tensors, digests, strict=False)
    }
    named = [(key, own) for (_, key, _), own in zip(values, digests[len(tensors) :], strict=True)]
    return found, xxh3_128_hexdigest(json.dumps(named).encode())


def _collect_leaves(
    value: Any, path: str, key: str, above: tuple[int, ...], out: list[tuple[str, str, object]]
) -> None:
    """Append the dotted path, the key and the leaf of each leaf of a container, depth first.

    Several leaves may have the same path, as below a dict with the key ``a.b``, and none the same
    key. An empty container is not a leaf; one that holds itself is, where it occurs again.
    """
    is_mapping = isinstance(value, Mapping)
    for name, entry in value.items() if is_mapping else enumerate(value):
        below = f"{path}.{name}" if path else f"{name}"
        shown = repr(name) if isinstance(name, _PLAIN_KEYS) else f"<{name}>"
        inner = f"{key}{{{shown}}}" if is_mapping else f"{key}[{name}]"
        if not isinstance(entry, _CONTAINERS) or id(entry) in above:
            out.append((below, inner, entry))
        else:
            _collect_leaves(entry, below, inner, (*above, id(entry)), out)
