"""A walk through what objects hold: their attributes, and the items of lists, tuples and dicts."""

import random
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from inspect import Signature
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

Parts: TypeAlias = Iterable[tuple[object, Any]]
Step: TypeAlias = tuple[Any, object, Any, int, int, int]
"""An object: the step to its holder or None, its name there, the object, its kind, how deep it is,
and how many items there are in the containers that hold it, were they all as long."""

# Kinds of objects. Objects of the first kind are not visited.
NO_PARTS, SEQUENCE, DICT, GENERATOR, MODULE, IMPORTED, OBJECT, _PROXY = range(8)

MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_OPAQUE = (torch.Tensor, np.ndarray, type, str, bytes)
# Objects of these packages have parts only if they are owners. Those of pandas hold data: a dozen
# objects for each table, which a logger or a dataset may have dozens of.
_FOREIGN = {"lightning", "lightning_fabric", "pytorch_lightning", "lightning_d9m", "pandas"}
# The most frequent types without parts.
_ATOMS = frozenset({
    *(type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray),
    *(torch.device, torch.dtype, torch.Size, weakref.ref, Signature, BuiltinFunctionType),
})  # fmt: skip
# Objects of a class that defines neither have no attributes, unless they are methods.
_OF_ATTRIBUTES = ("__dict__", "__getattr__")
_MOST_TYPES = 10_000
# A longer list holds data, and one kind of data has no generators in it: no list of transforms is
# that long.
_MOST_ITEMS = 1000
# Nested lists with more items in all hold data too.
_MOST_NESTED_ITEMS = 10_000
# A list that is longer than the first may hold data; the second of each type are its sample.
_MOST_UNSAMPLED = 50
_SAMPLED = 5
# The level below which most objects are data.
_SHALLOW = 4


def are_data(values: Iterable[object]) -> bool:
    """Return whether the types of values show that none of them holds a generator."""
    return _ATOMS.issuperset(map(type, values))


class ObjectWalk(ABC):
    """A walk from owners to the objects that they hold, in the order of their depth.

    It leaves out lists of more than 1000 items, and nested lists of more than 10,000 in all.

    Args:
        depth: How many steps the walk goes from an owner.
        most_visited: How many objects it visits below the owners' own attributes. A thousand
            objects with dozens of attributes each would otherwise take seconds.
        most_deep: How many objects it visits below the fourth level.
        ends: The kinds of objects whose parts it does not visit.
    """

    def __init__(
        self, *, depth: int, most_visited: int, most_deep: int, ends: Iterable[int]
    ) -> None:
        self._depth = depth
        self._left = [most_visited, most_deep]
        self._ends = frozenset({NO_PARTS, *ends})

    def visit(self, owners: Iterable[tuple[object, object]], depth: int = 0) -> list[Step]:
        """Return the step to each object, first to the owners, which have names."""
        # All steps are kept until the end: the id of a freed object may become that of another.
        steps, seen = _start(owners, depth)
        kinds = _KINDS
        # In one method: its time is that of a few lines for each object and for each attribute.
        for step in steps:  # which grows
            _, _, value, kind, depth, items = step
            if depth == self._depth or kind in self._ends:
                continue
            hidden: Collection[object] = ()
            if kind <= DICT:
                parts, items = self._list_items(value, kind, depth, items)
            else:
                attributes = getattr(value, "__dict__", None)
                if not attributes or not isinstance(attributes, dict):
                    continue
                parts = attributes.items()
                if kind == MODULE:
                    hidden = MODULE_ATTRIBUTES  # the caller lists modules
            before = len(steps)
            depth += 1
            for name, part in parts:
                kind = kinds[type(part)]
                if kind and (kind > DICT or part) and id(part) not in seen and name not in hidden:
                    if kind == _PROXY:
                        kind = _classify_proxy(part)
                    seen.add(id(part))
                    steps.append((step, name, part, kind, depth, items))
            if depth > 1:  # the attributes of all owners are visited, however many owners there are
                deep = depth > _SHALLOW
                del steps[before + max(self._left[deep], 0) :]
                self._left[deep] -= len(steps) - before
        return steps

    @abstractmethod
    def choose(self, parts: Parts, sample: Parts, depth: int) -> Parts:
        """Return which parts to visit of a list of more than 50.

        Args:
            parts: The parts with their names.
            sample: The first five parts of each type.
            depth: Their depth.
        """

    def _list_items(self, value: Any, kind: int, depth: int, items: int) -> tuple[Parts, int]:
        """Return the items to visit of a list or dict, and the number of all in nested lists."""
        size = len(value)
        items *= size
        if size > _MOST_ITEMS or items > _MOST_NESTED_ITEMS:
            return (), items
        parts = _name_items(value, kind)
        if size > _MOST_UNSAMPLED:
            sample = _take_sample(value, kind)
            self._left[0] -= len(sample)  # before their choice, which may visit them
            parts = self.choose(parts, sample, depth + 1) if sample else ()
        return parts, items


def _start(owners: Iterable[tuple[object, object]], depth: int) -> tuple[list[Step], set[int]]:
    seen: set[int] = set()
    steps: list[Step] = []
    for name, owner in owners:
        if id(owner) not in seen:
            seen.add(id(owner))
            steps.append((None, name, owner, _classify_owner(owner), depth, 1))
    return steps, seen


def name_path(step: Step) -> str:
    """Return the names on the way to an object, joined by periods."""
    names = [f"{step[1]}"]
    while step := step[0]:
        names.append(f"{step[1]}")
    return ".".join(reversed(names))


def _name_items(value: Any, kind: int) -> Parts:
    return value.items() if kind == DICT else enumerate(value)


def _take_sample(value: Any, kind: int) -> list[tuple[object, Any]]:
    types = dict.fromkeys(map(type, value.values() if kind == DICT else value))
    return [
        item for of in types if _KINDS[of] for item in islice(_of_type(value, kind, of), _SAMPLED)
    ]


def _of_type(value: Any, kind: int, of: type) -> Parts:
    return (item for item in _name_items(value, kind) if type(item[1]) is of)


class _Kinds(dict[type, int]):
    """The kind of the objects of each type: one lookup without a call for almost all of them."""

    def __missing__(self, kind: type) -> int:
        if len(self) >= _MOST_TYPES:
            self.clear()  # of classes that a program makes again and again
        self[kind] = found = _classify_type(kind)
        return found


def _classify_type(kind: type) -> int:
    if issubclass(kind, _GENERATORS):
        return GENERATOR
    found = _classify(kind, kind)
    defined = {name: value for base in kind.__mro__[-2::-1] for name, value in vars(base).items()}
    if found in (MODULE, IMPORTED, OBJECT) and (
        "__class__" in defined
        or kind in weakref.ProxyTypes
        or type(defined.get("__getattribute__")) is FunctionType
    ):
        return _PROXY  # an object of the type may say that it is of another one
    if found == OBJECT and kind is not MethodType and defined.keys().isdisjoint(_OF_ATTRIBUTES):
        return NO_PARTS
    return found


def _classify_proxy(value: object) -> int:
    try:
        shown = getattr(value, "__class__", None)
    except ReferenceError:  # a weak reference to a freed object
        return NO_PARTS
    return _classify(type(value), shown if isinstance(shown, type) else type(value))


def _classify_owner(owner: object) -> int:
    kind = _KINDS[type(owner)]
    if kind == _PROXY:
        return _classify_proxy(owner)
    return kind or (NO_PARTS if isinstance(owner, _OPAQUE) else OBJECT)


def _classify(kind: type, shown: type) -> int:
    """Return the kind of the objects of a type, which may say that they are of another one."""

    def is_any(*classes: type) -> bool:
        return issubclass(kind, classes) or issubclass(shown, classes)

    if is_any(dict, list, tuple):
        return DICT if is_any(dict) else SEQUENCE
    if is_any(torch.nn.Module):
        return MODULE
    package = str(getattr(kind, "__module__", "")).partition(".")[0]  # some have none, or no text
    if is_any(*_OPAQUE) or package in _FOREIGN:
        return NO_PARTS
    return IMPORTED if is_any(ModuleType) else OBJECT


_KINDS = _Kinds(dict.fromkeys(_ATOMS, NO_PARTS))
