"""A search through what objects hold, those of libraries too: attributes and items."""

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
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
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# A longer list holds data, and so do nested lists of more items in all.
_MOST_ITEMS = 1000
_MOST_NESTED_ITEMS = 10_000
# A longer list may hold data; the second of each type are its sample.
_MOST_UNSAMPLED = 50
_SAMPLED = 5
_DEPTH = 8
_MOST_VISITED = 20_000

Parts = Iterable[tuple[object, Any]]


def search(
    owners: Mapping[str, object],
    *,
    depth: int = _DEPTH,
    most: int = _MOST_VISITED,
    level: int = 0,
    takes: Callable[[Mapping[str, Any], int], bool] = lambda _sample, _level: True,
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the object of all that owners hold, each once, from the outside in.

    Generators and the modules in other objects are yielded and not entered.

    Args:
        owners: Objects by name.
        depth: The number of steps from an owner.
        most: The number of objects that are visited below the owners' own attributes.
        level: The level of the owners themselves, above 0 for parts of what was searched before.
        takes: Called with a sample of a list or dict of more than 50 items, and the level of the
            items; returns whether they are searched.
    """
    seen: dict[int, object] = {}  # an object that was freed would give its id to another
    waiting = deque((f"{name}", owner, level, 1) for name, owner in owners.items())
    while waiting:
        path, value, level, items = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        if level == depth or find_kind_safely(value) is GENERATOR:
            continue
        try:
            parts, items = _list_parts(value, items, takes, level)
        except ReferenceError:  # a weak reference to a freed object
            continue
        for name, part in parts:
            if type(part) in _ATOMS or id(part) in seen:
                continue
            if level and (most := most - 1) < 0:
                break
            waiting.append((f"{path}.{name}", part, level + 1, items))


def find_kind_safely(value: object) -> object:
    """Return the kind of an object, None for a weak reference to a freed one."""
    try:
        return find_kind(value)
    except ReferenceError:
        return None


def find_generators(owners: Mapping[str, object]) -> dict[str, Any]:
    """Return the generators in attributes, lists and dicts of objects, by path.

    A list of more than 50 objects is searched only if one of the first five of a type is, or
    holds, a generator: a dataset of a thousand objects would otherwise be searched before each
    validation.
    """
    left = _MOST_VISITED  # in all samples

    def holds_generator(sample: Mapping[str, Any], level: int) -> bool:
        nonlocal left
        # Lists in a sample are searched without samples of their own, which could be endless.
        for _, value in search(sample, most=left, level=level):
            left -= 1
            if find_kind_safely(value) is GENERATOR:
                return True
        return False

    found = search(owners, takes=holds_generator)
    return {path: value for path, value in found if find_kind_safely(value) is GENERATOR}


def _list_parts(
    value: Any, items: int, takes: Callable[[Mapping[str, Any], int], bool], level: int
) -> tuple[Parts, int]:
    """Return the parts of an object, and the number of items of the lists that hold them."""
    if isinstance(value, dict | list | tuple | deque):
        items *= len(value)
        if len(value) > _MOST_ITEMS or items > _MOST_NESTED_ITEMS:
            return (), items
        parts = list(value.items() if isinstance(value, dict) else enumerate(value))
        if len(parts) > _MOST_UNSAMPLED:
            types_ = dict.fromkeys(type(part) for _, part in parts)
            sample = {
                f"{place}": part
                for of in types_.keys() - _ATOMS
                for place, (_, part) in islice(
                    ((place, own) for place, own in enumerate(parts) if type(own[1]) is of),
                    _SAMPLED,
                )
            }
            parts = parts if sample and takes(sample, level + 1) else []
        return parts, items
    package = str(getattr(type(value), "__module__", "")).partition(".")[0]
    if isinstance(value, _DATA) or (package in _FOREIGN and level):
        return (), items
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return (), items
    hidden = MODULE_ATTRIBUTES if isinstance(value, nn.Module) else ()
    return [(name, part) for name, part in own.items() if name not in hidden], items
