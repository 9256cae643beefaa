"""A search through what objects hold, those of libraries too: attributes and items."""

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_d9m.state.parts import GENERATOR, find_kind

# Types whose objects hold nothing, and those of data and code.
_ATOMS = frozenset({
    *(type(None), bool, int, float, str, bytes, torch.Tensor, nn.Parameter, np.ndarray),
    *(torch.device, torch.dtype, torch.Size, types.BuiltinFunctionType),
})  # fmt: skip
_DATA = (torch.Tensor, np.ndarray, type, str, bytes, types.ModuleType)
# Objects of these packages have parts only if they are owners. Those of pandas hold data: a dozen
# objects for each table, which a logger or a dataset may have dozens of.
_FOREIGN = {"lightning", "lightning_fabric", "pytorch_lightning", "lightning_d9m", "pandas"}
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# A longer list holds data, and so do nested lists of more items in all.
_MOST_ITEMS = 1000
_MOST_NESTED_ITEMS = 10_000
_DEPTH = 8
_MOST_VISITED = 50_000
_CONTAINERS = (dict, list, tuple, deque)


def search(
    owners: Mapping[str, object], *, depth: int = _DEPTH, most: int = _MOST_VISITED
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the object of all that owners hold, each once, from the outside in.

    Generators and the modules in other objects are yielded and not entered.

    Args:
        owners: Objects by name.
        depth: The number of steps from an owner.
        most: The number of objects that are visited below the owners' own attributes.
    """
    seen: dict[int, object] = {}  # an object that was freed would give its id to another
    # The path, the object, its level, and the number of items of the lists around it.
    waiting = deque((f"{name}", owner, 0, 1) for name, owner in owners.items())
    while waiting:
        path, value, level, items = waiting.popleft()
        if id(value) in seen:
            continue
        if level > 1 and (most := most - 1) < 0:
            return
        seen[id(value)] = value
        yield path, value
        if level == depth or find_kind_safely(value) is GENERATOR:
            continue
        with suppress(ReferenceError):  # of a weak reference to a freed object
            if isinstance(value, _CONTAINERS):
                items *= len(value)
            waiting.extend(
                (f"{path}.{name}", part, level + 1, items)
                for name, part in _list_parts(value, level, items)
                if type(part) not in _ATOMS and id(part) not in seen
            )


def find_kind_safely(value: object) -> object:
    """Return the kind of an object, None for a weak reference to a freed one."""
    try:
        return find_kind(value)
    except ReferenceError:
        return None


def find_generators(owners: Mapping[str, object]) -> dict[str, Any]:
    """Return the generators in attributes, lists and dicts of objects, by path."""
    found = search(owners)
    return {path: value for path, value in found if find_kind_safely(value) is GENERATOR}


def _list_parts(value: Any, level: int, items: int) -> Iterable[tuple[Any, Any]]:
    """Return the names and the parts of an object."""
    if isinstance(value, _CONTAINERS):
        if len(value) > _MOST_ITEMS or items > _MOST_NESTED_ITEMS:
            return ()
        return list(value.items() if isinstance(value, dict) else enumerate(value))
    package = str(getattr(type(value), "__module__", "")).partition(".")[0]
    if isinstance(value, _DATA) or (package in _FOREIGN and level):
        return ()
    own = getattr(value, "__dict__", None)
    hidden = _MODULE_ATTRIBUTES if isinstance(value, nn.Module) else ()
    return [part for part in own.items() if part[0] not in hidden] if isinstance(own, dict) else ()
