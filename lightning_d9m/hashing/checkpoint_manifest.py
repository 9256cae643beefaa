"""The manifest of a checkpoint: one digest for each tensor, to find and name damage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_d9m.errors import CheckpointError, DigestError
from lightning_d9m.hashing.digest import digest_many, digest_pieces
from lightning_d9m.hashing.nested_values import PLAIN_TYPES, Layout
from lightning_d9m.hashing.value_bytes import Piece, encode, encode_plain
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
    """Makes the manifests of a fit's checkpoints, whose keys and types seldom change."""

    def __init__(self) -> None:
        self._known: _Leaves | None = None

    def make(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest of a checkpoint's content: plain values, 16 bytes for each tensor.

        Args:
            content: Nested dicts, lists and tuples. For any other object only its type is hashed.

        Returns:
            ``"version"``: that of this format; ``"tensors"``: uint8 of shape (n, 16), the digests
            of key and bytes of each tensor, in ascending order; ``"values"``: the digest of all
            other values (32 hex digits).
        """
        leaves = None if self._known is None else self._known.layout.read(content)
        if self._known is None or leaves is None:
            layout, leaves = Layout.of(content)
            self._known = _Leaves(layout, leaves, layout.keys)
        digests = self._known.digest_tensors(leaves)
        rows = sorted(map(add, digests.keys(), digests.values()))
        table = np.frombuffer(b"".join(rows), dtype=np.uint8).copy().reshape(-1, 2 * _HALF)
        values = self._known.digest_values(leaves)
        return {"version": _VERSION, "tensors": torch.from_numpy(table), "values": values}


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
    layout, leaves = Layout.of(content)
    present = _Leaves(layout, leaves, layout.paths if version == 1 else layout.keys)
    changed, added = [], []
    for key, found in present.digest_tensors(leaves).items():
        expected = expected_rows.pop(key, None)
        if expected is None:
            added.append(present.paths[key])
        elif expected != found:
            changed.append(present.paths[key])
    values_differ = present.digest_values(leaves) != manifest["values"]
    return Damage(tuple(changed), tuple(added), len(expected_rows), values_differ)


class _Leaves:
    """The tensors and the other values among the leaves of a layout.

    Args:
        layout: The layout.
        leaves: Its leaves in one checkpoint.
        names: The name of each leaf in the manifest.

    Attributes:
        layout: The layout.
        paths: The path of each tensor, by the digest of its name.
    """

    def __init__(self, layout: Layout, leaves: Sequence[Any], names: Sequence[str]) -> None:
        self.layout = layout
        self._tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._keys = [
            blake2b(names[place].encode(), digest_size=_HALF).digest() for place in self._tensors
        ]
        tensors = [layout.paths[place] for place in self._tensors]
        self.paths = dict(zip(self._keys, tensors, strict=True))
        among = set(self._tensors)
        self._values = [place for place in range(len(leaves)) if place not in among]
        # What `encode([name, leaf])` begins with.
        self._starts = [b"L2:%b" % encode_plain(names[place]) for place in self._values]

    def digest_tensors(self, leaves: Sequence[Any]) -> dict[bytes, bytes]:
        """Return the first half of each tensor's digest, by the digest of its name.

        Of tensors with the same name it is that of the last one.
        """
        digests = digest_many([leaves[place] for place in self._tensors])
        halves = (bytes.fromhex(digest[: 2 * _HALF]) for digest in digests)
        return dict(zip(self._keys, halves, strict=True))

    def digest_values(self, leaves: Sequence[Any]) -> str:
        """Return the digest of the list of the name and the value of each other leaf."""
        pieces: list[Piece] = [b"L%x:" % len(self._values)]
        for start, place in zip(self._starts, self._values, strict=True):
            leaf = leaves[place]
            pieces.append(start)
            if type(leaf) in PLAIN_TYPES:
                pieces.append(encode_plain(leaf))
            else:
                pieces += _encode_other(leaf)
        return digest_pieces(pieces)


def _encode_other(leaf: object) -> list[Piece]:
    try:
        return encode(leaf)
    except DigestError:
        return [encode_plain(f"{type(leaf).__module__}.{type(leaf).__qualname__}")]
