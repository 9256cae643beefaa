"""The leaves of batches and of modules' inputs and outputs."""

from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass

import torch
from torch import nn

_SCALARS = (str, bytes, int, float, complex, type(None))
# Deeper than any batch.
_MAX_DEPTH = 32


def list_pytree_leaves(value: object) -> list[tuple[str, object]]:
    """Return (path, leaf) for each leaf of a value, in its order.

    Containers are dicts, lists, tuples, named tuples, deques, dataclasses, and objects that
    Lightning moves to a device by their method ``to`` (their attributes). A dict, list, tuple or
    dataclass of only strings, numbers and None is one leaf: a list of a thousand strings gets one
    digest, not a thousand. Empty containers are leaves, too.

    >>> batch = {"x": [torch.ones(1), (torch.ones(1), 2)], "y": "text"}
    >>> [path for path, _ in list_pytree_leaves(batch)]
    ['x.0', 'x.1.0', 'x.1.1', 'y']
    >>> list_pytree_leaves(7)
    [('', 7)]
    """
    leaves: list[tuple[str, object]] = []
    _collect(value, "", (), leaves)
    return leaves


def _collect(
    value: object, path: str, above: tuple[int, ...], out: list[tuple[str, object]]
) -> None:
    # A container that holds itself is a leaf where it occurs again.
    is_leaf = id(value) in above or len(above) == _MAX_DEPTH
    entries = None if is_leaf else _entries(value)
    # A container of strings and numbers has a digest as a whole.
    has_digest = isinstance(value, Mapping | list | tuple) or is_dataclass(value)
    if not entries or (has_digest and all(isinstance(own, _SCALARS) for _, own in entries)):
        out.append((path, value))
        return
    for key, entry in entries:
        _collect(entry, f"{path}.{key}" if path else key, (*above, id(value)), out)


def _entries(value: object) -> list[tuple[str, object]] | None:
    if isinstance(value, (*_SCALARS, AbstractSet, torch.Tensor)):
        return None
    if isinstance(value, Mapping):
        return [(str(key), entry) for key, entry in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple | deque):
        return [(str(number), entry) for number, entry in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    # Lightning moves such an object to a device by its own method.
    is_movable = hasattr(type(value), "to") and hasattr(value, "__dict__")
    is_movable = is_movable and not isinstance(value, nn.Module)
    return list(vars(value).items()) if is_movable else None
