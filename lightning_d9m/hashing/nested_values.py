"""The walker of nested values: ``(path, leaf)`` pairs in order. Nothing here imports torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

# Returns the (key, entry) pairs of a container, given its depth; None for a leaf.
Entries: TypeAlias = Callable[[Any, int], Iterable[tuple[object, Any]] | None]

PLAIN_TYPES = frozenset((type(None), bool, int, float, str))
"""The exact types of most leaves. A subclass may be a member of an enumeration."""

# Keys whose repr names them; that of another object may hold its address.
_PLAIN_KEYS = (str, int, float, bytes, tuple, type(None))
_NAMES = frozenset((str, int))
_CONTAINERS = (Mapping, list, tuple)


def container_entries(value: object, _depth: int) -> Iterable[tuple[object, Any]] | None:
    """Return the entries of a mapping, list or tuple; None for an empty one or any other value."""
    if type(value) in PLAIN_TYPES:  # most values; asking an abstract class takes longer
        return None
    if isinstance(value, Mapping):
        return value.items() if value else None
    return enumerate(value) if isinstance(value, list | tuple) and value else None


def list_leaves(value: object, entries: Entries = container_entries) -> list[tuple[str, Any]]:
    """Return (path, leaf) for each leaf of a nested value, depth first, in its order.

    A container that holds itself is a leaf where it occurs again. To map the leaves to other
    values, use ``torch.utils._pytree.tree_map``.

    Args:
        value: Any value.
        entries: Decides which values are containers.

    >>> list_leaves({"betas": (0.9, 0.999), "lr": 0.1, "no": []})
    [('betas.0', 0.9), ('betas.1', 0.999), ('lr', 0.1), ('no', [])]
    """
    found = entries(value, 0)
    if found is None:
        return [("", value)]
    leaves: list[tuple[str, Any]] = []
    _collect(found, "", (id(value),), entries, leaves)
    return leaves


class Layout:
    """The keys of the leaves in nested mappings, lists and tuples, for values that are alike.

    Naming the leaves of a checkpoint takes longer than hashing them, and the checkpoints of a fit
    have the same keys and types.

    Attributes:
        paths: The dotted path of each leaf, depth first. Several leaves may have the same one, as
            below a dict with the key ``a.b``.
        keys: The key of each leaf, which no other leaf has.
    """

    _root: "_Container"

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.keys: list[str] = []
        # The place of each leaf among the entries that `_Container.read` appends.
        self._places: list[int] = []
        # False if another value with equal keys and types may have other leaves.
        self._is_known = True

    @classmethod
    def of(
        cls, value: Mapping[Any, Any], path: str = "", key: str = "", above: tuple[int, ...] = ()
    ) -> tuple["Layout", list[Any]]:
        """Return the layout of a value and its leaves; an empty container is not a leaf.

        A container that holds itself is a leaf where it occurs again.

        >>> layout, leaves = Layout.of({"a.b": 1, "a": {"b": 2}, "c": [3]})
        >>> list(zip(layout.paths, layout.keys, leaves))
        [('a.b', "{'a.b'}", 1), ('a.b', "{'a'}{'b'}", 2), ('c.0', "{'c'}[0]", 3)]
        """
        layout = cls()
        entries: list[Any] = []
        layout._root = layout._explore(value, path, key, above, entries)
        return layout, [entries[place] for place in layout._places]

    def read(self, value: Mapping[Any, Any]) -> list[Any] | None:
        """Return the leaves of a value; None if it does not have this layout."""
        entries: list[Any] = []
        if not self._is_known or not self._root.read(value, entries):
            return None
        return [entries[place] for place in self._places]

    def _explore(
        self, value: Any, path: str, key: str, above: tuple[int, ...], out: list[Any]
    ) -> "_Container":
        names, entries = _split(value, is_mapping=isinstance(value, Mapping))
        left, right = "[]" if names is None else "{}"
        start = len(out)
        out += entries
        above = (*above, id(value))
        # Numbers of other types are equal to these, and have another repr.
        self._is_known &= names is None or _NAMES.issuperset(map(type, names))
        inner = []
        for place, entry in enumerate(entries):
            name = place if names is None else names[place]
            below, written = _name(path, key, name, left + right)
            holds_itself = id(entry) in above
            self._is_known &= not holds_itself
            if type(entry) in PLAIN_TYPES or not isinstance(entry, _CONTAINERS) or holds_itself:
                self.paths.append(below)
                self.keys.append(written)
                self._places.append(start + place)
            else:
                inner.append((place, self._explore(entry, below, written, above, out)))
        return _Container(type(value), names, list(map(type, entries)), inner)


def list_sections(
    value: Mapping[Any, Any], path: str = "", key: str = "", above: tuple[int, ...] = ()
) -> Iterator[tuple[Mapping[Any, Any], str, str, tuple[int, ...]]]:
    """Yield the parts of a value whose layouts change apart, as the arguments of ``Layout.of``.

    These are its entries, and those of a mapping in it that holds only mappings, as the states of
    callbacks in a checkpoint.
    """
    above = (*above, id(value))
    for name, entry in value.items():
        whole = not isinstance(entry, Mapping) or id(entry) in above
        if whole or not all(isinstance(part, Mapping) for part in entry.values()):
            yield {name: entry}, path, key, above
        else:
            yield from list_sections(entry, *_name(path, key, name, "{}"), above)


def _name(path: str, key: str, name: object, brackets: str) -> tuple[str, str]:
    """Return the path and the key of an entry of a container."""
    written = repr(name) if isinstance(name, _PLAIN_KEYS) else f"<{name}>"
    below = f"{path}.{name}" if path else str(name)
    return below, f"{key}{brackets[0]}{written}{brackets[1]}"


class _Container(NamedTuple):
    """A mapping, list or tuple.

    Attributes:
        kind: Its type.
        names: The keys of a mapping; None for a sequence.
        types: The types of its entries.
        inner: The containers among its entries, and their places.
    """

    kind: type
    names: list[Any] | None
    types: list[type]
    inner: list[tuple[int, Any]]

    def read(self, value: Any, out: list[Any]) -> bool:
        """Append the entries of a value; return False if it has other keys or types."""
        if type(value) is not self.kind:
            return False
        names, entries = _split(value, is_mapping=self.names is not None)
        if list(map(type, entries)) != self.types or names != self.names:
            return False
        # True and 1 are equal as keys.
        if names and self.names and list(map(type, names)) != list(map(type, self.names)):
            return False
        out += entries
        return all(inner.read(entries[place], out) for place, inner in self.inner)


def _split(value: Any, *, is_mapping: bool) -> tuple[list[Any] | None, list[Any]]:
    """Return the keys and the values of a mapping; None and the items of a sequence."""
    if not is_mapping:
        return None, list(value)
    items = list(value.items())
    return [name for name, _ in items], [entry for _, entry in items]


def _collect(
    found: Iterable[tuple[object, Any]],
    path: str,
    above: tuple[int, ...],
    entries: Entries,
    out: list[tuple[str, Any]],
) -> None:
    for key, entry in found:
        below = f"{path}.{key}" if path else str(key)
        inner = None if id(entry) in above else entries(entry, len(above))
        if inner is None:
            out.append((below, entry))
        else:
            _collect(inner, below, (*above, id(entry)), entries, out)
