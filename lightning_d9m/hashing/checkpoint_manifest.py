"""The manifest of a checkpoint: one digest for each tensor, to find and name damage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, compress
from operator import add, is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_d9m.errors import CheckpointError, DigestError
from lightning_d9m.hashing.address_cache import AddressCache
from lightning_d9m.hashing.digest import digest_pieces
from lightning_d9m.hashing.nested_values import PLAIN_TYPES, Layout, list_sections
from lightning_d9m.hashing.value_bytes import Piece, encode, encode_exact
from lightning_d9m.text import quote

_HALF = 8  # bytes of each entry: 64 bits find accidents
# In version 1 the key of a leaf was its dotted path, which several leaves may share.
_VERSION = 2
_UNKNOWN = object()


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
        self._addresses = AddressCache()

    def make(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest of a checkpoint's content: plain values, 16 bytes for each tensor.

        Args:
            content: Nested dicts, lists and tuples. For any other object only its type is hashed.

        Returns:
            ``"version"``: that of this format; ``"tensors"``: uint8 of shape (n, 16), the digests
            of key and bytes of each tensor, in ascending order; ``"values"``: the digest of all
            other values (32 hex digits).
        """
        sections, halves, values = self._digest(content)
        names = chain.from_iterable(own.names for own in sections)
        found = dict(zip(names, halves, strict=True))
        rows = sorted(map(add, found, found.values()))
        table = np.frombuffer(b"".join(rows), dtype=np.uint8).copy().reshape(-1, 2 * _HALF)
        return {"version": self._version, "tensors": torch.from_numpy(table), "values": values}

    def digest(self, content: Mapping[str, Any]) -> tuple[dict[bytes, tuple[str, bytes]], str]:
        """Return path and half the digest of each tensor by that of its name; that of the values.

        Of tensors with the same name the last one counts.
        """
        sections, halves, values = self._digest(content)
        names = chain.from_iterable(own.names for own in sections)
        paths = chain.from_iterable(own.list_paths() for own in sections)
        return dict(zip(names, zip(paths, halves, strict=True), strict=True)), values

    def _digest(self, content: Mapping[str, Any]) -> tuple[list["_Leaves"], list[bytes], str]:
        """Return the sections, half the digest of each tensor, and the digest of the values."""
        known: dict[tuple[str, object], _Leaves] = {}
        sections: list[_Leaves] = []
        tensors: list[Tensor] = []
        pieces: list[Piece] = []
        count = 0
        for section, path, key, above in list_sections(content):
            place = (key, next(iter(section)))
            found = self._known.get(place)
            entries = None if found is None else found.layout.read(section)
            if found is None or entries is None:
                layout, entries = Layout.of(section, path, key, above)
                found = _Leaves(layout, entries, self._version)
            known[place] = found
            sections.append(found)
            tensors += found.select_tensors(entries)
            count += found.encode_values(entries, pieces)
        self._known = known
        data = bytes.fromhex("".join(self._addresses.digest(tensors)))
        halves = [data[at : at + _HALF] for at in range(0, len(data), 2 * _HALF)]
        return sections, halves, digest_pieces([b"L%x:" % count, *pieces])


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
        entries: Its entries in one checkpoint.
        version: That of the manifest; in the first one, the path of a leaf is its name.

    Attributes:
        layout: The layout.
        names: The digest of the name of each tensor.
    """

    def __init__(self, layout: Layout, entries: Sequence[Any], version: int) -> None:
        self.layout = layout
        self.names: list[bytes] = []
        # The places of the tensors and of the other leaves, and what `encode([name, leaf])` begins
        # with for each of these.
        self._tensors: list[int] = []
        self._values: list[int] = []
        self._starts: list[bytes] = []
        texts = layout.paths if version == 1 else layout.keys
        for place, text in zip(layout.places, texts, strict=True):
            if isinstance(entries[place], Tensor):
                self._tensors.append(place)
                self.names.append(blake2b(text.encode(), digest_size=_HALF).digest())
            else:
                self._values.append(place)
                self._starts.append(b"L2:%b" % encode_exact(text))
        # These leaves in the last checkpoint, and what each was encoded as.
        self._last: list[object] = [_UNKNOWN] * len(self._values)
        self._encoded: list[list[Piece]] = [[]] * len(self._values)

    def list_paths(self) -> list[str]:
        """Return the path of each tensor."""
        paths = dict(zip(self.layout.places, self.layout.paths, strict=True))
        return [paths[place] for place in self._tensors]

    def select_tensors(self, entries: Sequence[Any]) -> list[Tensor]:
        """Return the tensors among the entries."""
        return [entries[place] for place in self._tensors]

    def encode_values(self, entries: Sequence[Any], pieces: list[Piece]) -> int:
        """Append the encoded names and values of the other leaves; return their number."""
        values = [entries[place] for place in self._values]
        # An object of an immutable type that is the same as before has the same bytes. Equality
        # does not say that: 0.0 is equal to -0.0.
        for index in compress(range(len(values)), map(is_not, values, self._last)):
            leaf, start = values[index], self._starts[index]
            if type(leaf) in PLAIN_TYPES:
                self._encoded[index], self._last[index] = [start + encode_exact(leaf)], leaf
            else:
                self._encoded[index] = [start, *_encode_other(leaf)]
        pieces += chain.from_iterable(self._encoded)
        return len(values)


def _encode_other(leaf: object) -> list[Piece]:
    try:
        return encode(leaf)
    except DigestError:
        return [encode_exact(f"{type(leaf).__module__}.{type(leaf).__qualname__}")]
