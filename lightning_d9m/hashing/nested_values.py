"""The walker of nested values: ``(path, leaf)`` pairs in order. Nothing here imports torch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

# Returns the (key, entry) pairs of a container, given its depth; None for a leaf.
Entries: TypeAlias = Callable[[Any, int], Iterable[tuple[object, Any]] | None]

PLAIN_TYPES = frozenset((type(None), bool, int, float, str))
"""The exact types of most leaves. A subclass may be a member of an enumeration."""

# Keys whose repr names them; that of another object may hold its address.
_PLAIN_KEYS = (str, int, float, bytes, tuple, type(None))


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


def list_keyed_leaves(value: object) -> list[tuple[str, str, Any]]:
    """Return (path, key, leaf) for each leaf of nested mappings, lists and tuples, depth first.

    Several leaves may have the same path, as below a dict with the key ``a.b``; each has another
    key. A container that holds itself is a leaf where it occurs again.

    >>> list_keyed_leaves({"a.b": 1, "a": {"b": 2}, "c": [3]})
    [('a.b', "{'a.b'}", 1), ('a.b', "{'a'}{'b'}", 2), ('c.0', "{'c'}[0]", 3)]
    """
    leaves: list[tuple[str, str, Any]] = []
    _collect_keyed(value, "", "", (), leaves)
    return leaves


def _collect_keyed(
    value: Any, path: str, key: str, above: tuple[int, ...], out: list[tuple[str, str, Any]]
) -> None:
    found = container_entries(value, 0)
    if found is None or id(value) in above:
        out.append((path, key, value))
        return
    left, right = "{}" if isinstance(value, Mapping) else "[]"
    for name, entry in found:
        written = repr(name) if isinstance(name, _PLAIN_KEYS) else f"<{name}>"
        below = f"{path}.{name}" if path else str(name)
        _collect_keyed(entry, below, f"{key}{left}{written}{right}", (*above, id(value)), out)


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
