"""The manifest of a checkpoint: one digest for each tensor, to find and name damage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_d9m.errors import CheckpointError, DigestError
from lightning_d9m.hashing.digest import digest_many, digest_pieces
from lightning_d9m.hashing.nested_values import PLAIN_TYPES, Layout, list_sections
from lightning_d9m.hashing.value_bytes import Piece, encode, encode_exact
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


class ManifestMaker:
    """Makes the manifests of a fit's checkpoints, most of which have the same keys and types."""

    def __init__(self, version: int = _VERSION) -> None:
        self._version = version
        self._known: dict[tuple[str, object], _Leaves] = {}

    def make(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest of a checkpoint's content: plain values, 16 bytes for each tensor.

        Args:
            content: Nested dicts, lists and tuples. For any other object only its type is hashed.

        Returns:
            ``"version"``: that of this format; ``"tensors"``: uint8 of shape (n, 16), the digests
            of key and bytes of each tensor, in ascending order; ``"values"``: the digest of all
            other values (32 hex digits).
        """
        tensors, values = self.digest(content)
        rows = sorted(name + half for name, (_, half) in tensors.items())
        table = np.frombuffer(b"".join(rows), dtype=np.uint8).copy().reshape(-1, 2 * _HALF)
        return {"version": self._version, "tensors": torch.from_numpy(table), "values": values}

    def digest(self, content: Mapping[str, Any]) -> tuple[dict[bytes, tuple[str, bytes]], str]:
        """Return path and half the digest of each tensor by that of its name; that of the values.

        Of tensors with the same name the last one counts.
        """
        known: dict[tuple[str, object], _Leaves] = {}
        tensors: list[Tensor] = []
        pieces: list[Piece] = []
        names: list[tuple[bytes, str]] = []
        count = 0
        for section, path, key, above in list_sections(content):
            place = (key, next(iter(section)))
            found = self._known.get(place)
            leaves = None if found is None else found.layout.read(section)
            if found is None or leaves is None:
                layout, leaves = Layout.of(section, path, key, above)
                found = _Leaves(layout, leaves, self._version)
            known[place] = found
            names += found.names
            tensors += found.select_tensors(leaves)
            count += found.encode_values(leaves, pieces)
        self._known = known
        halves = (bytes.fromhex(digest[: 2 * _HALF]) for digest in digest_many(tensors))
        found_tensors = {
            name: (path, half) for (name, path), half in zip(names, halves, strict=True)
        }
        return found_tensors, digest_pieces([b"L%x:" % count, *pieces])


def make_manifest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of one checkpoint; see :class:`ManifestMaker`."""
    return ManifestMaker().make(content)


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
    tensors, values = ManifestMaker(version).digest(content)
    changed, added = [], []
    for name, (path, found) in tensors.items():
        expected = expected_rows.pop(name, None)
        if expected is None:
            added.append(path)
        elif expected != found:
            changed.append(path)
    return Damage(tuple(changed), tuple(added), len(expected_rows), values != manifest["values"])


class _Leaves:
    """The tensors and the other values among the leaves of a layout.

    Args:
        layout: The layout.
        leaves: Its leaves in one checkpoint.
        version: That of the manifest; in the first one, the path of a leaf is its name.

    Attributes:
        layout: The layout.
        names: The digest of the name, and the path, of each tensor.
    """

    def __init__(self, layout: Layout, leaves: Sequence[Any], version: int) -> None:
        self.layout = layout
        texts = layout.paths if version == 1 else layout.keys
        self._tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.names = [
            (blake2b(texts[place].encode(), digest_size=_HALF).digest(), layout.paths[place])
            for place in self._tensors
        ]
        among = set(self._tensors)
        # The other leaves, and what `encode([name, leaf])` begins with.
        self._values = [
            (place, b"L2:%b" % encode_exact(text))
            for place, text in enumerate(texts)
            if place not in among
        ]

    def select_tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the tensors among the leaves."""
        return [leaves[place] for place in self._tensors]

    def encode_values(self, leaves: Sequence[Any], pieces: list[Piece]) -> int:
        """Append the encoded names and values of the other leaves; return their number."""
        for place, start in self._values:
            leaf = leaves[place]
            pieces.append(start)
            if type(leaf) in PLAIN_TYPES:
                pieces.append(encode_exact(leaf))
            else:
                pieces += _encode_other(leaf)
        return len(self._values)


def _encode_other(leaf: object) -> list[Piece]:
    try:
        return encode(leaf)
    except DigestError:
        return [encode_exact(f"{type(leaf).__module__}.{type(leaf).__qualname__}")]
