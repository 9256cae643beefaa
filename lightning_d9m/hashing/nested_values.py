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
        places: The place of each leaf among the entries of all containers, depth first.
    """

    def __init__(self, path: str, key: str) -> None:
        self.places: list[int] = []
        self._name = path, key
        self._containers: list[_Container] = []
        # The keys of all mappings, their types, and the types of all entries.
        self._names: list[object] = []
        self._name_types: list[type] = []
        self._types: list[type] = []
        # False if another value with equal keys and types may have other leaves.
        self._is_known = True

    @classmethod
    def of(
        cls, value: Mapping[Any, Any], path: str = "", key: str = "", above: tuple[int, ...] = ()
    ) -> tuple["Layout", list[Any]]:
        """Return the layout of a value and its entries; an empty container is not a leaf.

        A container that holds itself is a leaf where it occurs again.

        >>> layout, entries = Layout.of({"a.b": 1, "a": {"b": 2}, "c": [3]})
        >>> leaves = [entries[place] for place in layout.places]
        >>> list(zip(layout.paths, layout.keys, leaves))
        [('a.b', "{'a.b'}", 1), ('a.b', "{'a'}{'b'}", 2), ('c.0', "{'c'}[0]", 3)]
        """
        layout = cls(path, key)
        entries: list[Any] = [value]
        layout._explore(0, above, entries)
        layout._types = list(map(type, entries))
        layout._name_types = list(map(type, layout._names))
        # Numbers of other types are equal to these, and have another repr.
        layout._is_known &= _NAMES.issuperset(layout._name_types)
        return layout, entries

    @property
    def paths(self) -> list[str]:
        """The dotted path of each leaf, depth first.

        Several leaves may have the same one, as below a dict with the key ``a.b``.
        """
        names = [self._name[0]]
        for container in self._containers:
            above = names[container.place]
            start = f"{above}." if above else ""
            names += [f"{start}{name}" for name in container.names or range(container.size)]
        return [names[place] for place in self.places]

    @property
    def keys(self) -> list[str]:
        """The key of each leaf, which no other leaf has."""
        names = [self._name[1]]
        for container in self._containers:
            above = names[container.place]
            if container.names is None:
                names += [f"{above}[{place}]" for place in range(container.size)]
            elif _NAMES.issuperset(map(type, container.names)):  # most, without a call for each
                names += [f"{above}{{{name!r}}}" for name in container.names]
            else:
                names += [_extend(above, name) for name in container.names]
        return [names[place] for place in self.places]

    def read(self, value: Mapping[Any, Any]) -> list[Any] | None:
        """Return the entries of a value; None if it does not have this layout."""
        if not self._is_known:
            return None
        entries: list[Any] = [value]
        found: list[object] = []
        for place, kind, size, names in self._containers:
            container: Any = entries[place]
            if type(container) is not kind or len(container) != size:
                return None
            if names is None:
                entries += container
            else:
                found += container
                entries += container.values()
        # All at once, in C. True and 1 are equal as keys.
        alike = found == self._names and list(map(type, found)) == self._name_types
        return entries if alike and list(map(type, entries)) == self._types else None

    def _explore(self, place: int, above: tuple[int, ...], out: list[Any]) -> None:
        value = out[place]
        is_mapping = isinstance(value, Mapping)
        names = list(value) if is_mapping else None
        entries = list(value.values() if is_mapping else value)
        self._containers.append(_Container(place, type(value), len(entries), names))
        self._names += names or ()
        start = len(out)
        out += entries
        above = (*above, id(value))
        inner = [kind for kind in set(map(type, entries)) if issubclass(kind, _CONTAINERS)]
        if not inner:
            self.places += range(start, len(out))
            return
        for number, entry in enumerate(entries, start):
            if type(entry) not in inner:
                self.places.append(number)
            elif id(entry) in above:
                self._is_known = False
                self.places.append(number)
            else:
                self._explore(number, above, out)


def list_sections(
    value: Mapping[Any, Any],
) -> Iterator[tuple[Mapping[Any, Any], str, str, tuple[int, ...]]]:
    """Yield the parts of a value whose layouts change apart, as the arguments of ``Layout.of``.

    These are its entries, and those of a mapping in it that holds only mappings, as the states of
    callbacks in a checkpoint.
    """
    above = (id(value),)
    for name, entry in value.items():
        inner = isinstance(entry, Mapping) and entry is not value
        if inner and all(isinstance(part, Mapping) for part in entry.values()):
            path, key = str(name), _extend("", name)
            for below, part in entry.items():
                yield {below: part}, path, key, (*above, id(entry))
        else:
            yield {name: entry}, "", "", above


def _extend(key: str, name: object) -> str:
    """Return the key of an entry of a mapping."""
    return f"{key}{{{name!r}}}" if isinstance(name, _PLAIN_KEYS) else f"{key}{{<{name}>}}"


class _Container(NamedTuple):
    """A mapping, list or tuple.

    Attributes:
        place: Its place among the entries of the containers above and before it.
        kind: Its type.
        size: The number of its entries.
        names: The keys of a mapping; None for a sequence.
    """

    place: int
    kind: type[Any]
    size: int
    names: list[Any] | None


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
