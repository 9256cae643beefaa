"""Leaves of a nested value, each with the path that leads to it."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass

import torch

_SCALARS = (str, bytes, int, float, complex, type(None))
# Deeper than any batch; a value that holds itself ends here too.
_DEEPEST = 32


def list_leaves(value: object) -> list[tuple[str, object]]:
    """Return (path, leaf) for each leaf of a value, in its order.

    Containers are dicts, lists, tuples, named tuples and dataclasses. One that holds nothing but
    strings, numbers and None is itself a leaf: a list of a thousand texts is one place, not a
    thousand. So is an empty one, and everything else: tensors, arrays, objects.

    Args:
        value: Anything.

    >>> [path for path, _ in list_leaves({"x": [torch.ones(1), (torch.ones(1), 2)], "y": "text"})]
    ['x.0', 'x.1.0', 'x.1.1', 'y']
    >>> list_leaves(7)
    [('', 7)]
    """
    return list(_walk(value, "", 0))


def _walk(value: object, path: str, depth: int) -> Iterator[tuple[str, object]]:
    entries = None if depth == _DEEPEST else _entries(value)
    if not entries or all(isinstance(entry, _SCALARS) for _, entry in entries):
        yield path, value
        return
    for key, entry in entries:
        yield from _walk(entry, f"{path}.{key}" if path else key, depth + 1)


def _entries(value: object) -> list[tuple[str, object]] | None:
    """Return the entries of a container with their names; None for what is none."""
    if isinstance(value, (*_SCALARS, torch.Tensor, AbstractSet)):
        return None
    if isinstance(value, Mapping):
        return [(str(key), entry) for key, entry in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return [(str(number), entry) for number, entry in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    return None
