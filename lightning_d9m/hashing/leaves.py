"""Leaves of a nested value, each with the path that leads to it."""

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass

import torch
from torch import nn

_SCALARS = (str, bytes, int, float, complex, type(None))
# Deeper than any batch.
_DEEPEST = 32


def list_leaves(value: object) -> list[tuple[str, object]]:
    """Return (path, leaf) for each leaf of a value, in its order.

    Containers are dicts, lists, tuples, named tuples, deques and dataclasses, and objects of other
    classes that Lightning moves to a device by their method ``to``: their attributes. One that
    holds nothing but strings, numbers and None is itself a leaf: a list of a thousand texts is one
    place, not a thousand. So is an empty one, one that is inside itself, and everything else:
    tensors, arrays, objects.

    Args:
        value: Anything.

    >>> [path for path, _ in list_leaves({"x": [torch.ones(1), (torch.ones(1), 2)], "y": "text"})]
    ['x.0', 'x.1.0', 'x.1.1', 'y']
    >>> list_leaves(7)
    [('', 7)]
    """
    return list(_walk(value, "", ()))


def _walk(value: object, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, object]]:
    ends = len(above) == _DEEPEST or id(value) in above
    entries = None if ends else _entries(value)
    if not entries or (_has_digest(value) and all(isinstance(e, _SCALARS) for _, e in entries)):
        yield path, value
        return
    above = (*above, id(value))
    for key, entry in entries:
        yield from _walk(entry, f"{path}.{key}" if path else key, above)


def _entries(value: object) -> list[tuple[str, object]] | None:
    """Return the entries of a container with their names; None for what is none."""
    if isinstance(value, (*_SCALARS, torch.Tensor, AbstractSet)):
        return None
    if isinstance(value, Mapping):
        return [(str(key), entry) for key, entry in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple | deque):
        return [(str(number), entry) for number, entry in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    return list(vars(value).items()) if _is_movable(value) else None


def _is_movable(value: object) -> bool:
    """Return whether Lightning would move an object, and not only what it holds, to a device."""
    movable = hasattr(type(value), "to") and hasattr(value, "__dict__")
    return movable and not isinstance(value, nn.Module)


def _has_digest(value: object) -> bool:
    """Return whether a container of texts and numbers has defined bytes as a whole."""
    return isinstance(value, Mapping | list | tuple) or is_dataclass(value)
