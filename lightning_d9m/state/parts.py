"""The parts of an object: how they are read, named and put back.

Every object is of one kind: a value that is only replaced as a whole (a number, a string, a
function), a holder of other objects (attributes, a dict, a list), data (a tensor, an array, a
random generator), or opaque: an object of a library that does not say what its state is.
"""

import enum
import inspect
import logging
import operator
import random
import re
import struct
import sys
import sysconfig
import types
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), enum.Enum),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    types.CodeType,
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, PurePath),
    *(np.generic, np.dtype, weakref.ref, re.Pattern, frozenset),
    # They only report, and cache whether a level is enabled.
    *(logging.Logger, logging.Handler),
)
# What a module holds besides its attributes. The other tables of torch hold hooks, which are code.
TABLES = ("_parameters", "_buffers", "_modules")
_HIDDEN = frozenset(vars(nn.Module())) - {"training", *TABLES}
_HOOKS = tuple(sorted(name for name in _HIDDEN if re.fullmatch("_(forward|backward).*hooks", name)))
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Stands among a module's attributes for the code of all hooks of it and its parameters.
_CODE_OF_HOOKS = "hooks()"
QUESTIONS = ("qsize", "locked", "tell")
"""Methods that return the size of a queue, whether a lock is held, and a position in a file."""
# A longer container holds data, which are compared and not entered; a set is opaque.
_MOST_ITEMS = 100_000
# Of what pickle would save of an object.
_MOST_SAVED_BYTES, _MOST_SAVED_ITEMS = 2**20, 1000
# Wherever they are installed: what their objects keep is theirs, except where it is known.
_LIBRARIES = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_d9m")
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_d9m")
_PATHS = sysconfig.get_paths()
_LIBRARY_FOLDERS = tuple(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGES = {"site-packages", "dist-packages"}
_SIZED = (list, dict, set, deque, tuple)
_STATEFUL = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, types.SimpleNamespace)


SPARSE: dict[torch.layout, Callable[[Tensor], tuple[Tensor, ...]]] = {
    torch.sparse_coo: lambda t: (t._indices(), t._values()),  # noqa: SLF001 - as stored, coalesced or not
    torch.sparse_csr: lambda t: (t.crow_indices(), t.col_indices(), t.values()),
    torch.sparse_csc: lambda t: (t.ccol_indices(), t.row_indices(), t.values()),
    torch.sparse_bsr: lambda t: (t.crow_indices(), t.col_indices(), t.values()),
    torch.sparse_bsc: lambda t: (t.ccol_indices(), t.row_indices(), t.values()),
}
"""Returns the dense tensors of which a sparse one consists, by layout."""

MISSING = object()
"""Stands for a part that is not there."""


class Kind(ABC):
    """A way to read and put back objects of some types."""

    @abstractmethod
    def read(self, owner: Any) -> Any:
        """Return the content, which stays as it is when the owner changes."""

    def write(self, owner: Any, content: Any) -> None:  # noqa: B027 - such an object stays as it is
        """Put a content back into the owner, which stays the same object."""

    def matches(self, owner: Any, content: Any) -> bool:
        """Return whether the owner has this content."""
        return are_equal(self.read(owner), content)

    def sign(self, owner: Any) -> object:  # noqa: ARG002 - others read it
        """Return what is equal as long as nothing changed; None if only ``matches`` can tell."""
        return None


class ByParts(Kind):
    """Objects that are compared by what they hold: the same objects, or equal values."""

    def matches(self, owner: Any, content: Any) -> bool:
        """See `Kind`."""
        return are_same(self.read(owner), content)


class Holder(ByParts):
    """Objects that hold other objects. The content is a tuple or a dict of these themselves."""

    def read(self, owner: Any) -> Any:
        """See `Kind`."""
        return tuple(owner)

    def write(self, owner: Any, content: Any) -> None:
        """See `Kind`."""
        if not isinstance(owner, tuple):
            owner.clear()
            owner.extend(content)

    def sign(self, owner: Any) -> object:
        """Return the identities of the parts, which are known as the content keeps them alive."""
        return tuple(map(id, owner))

    def name(self, _key: Any, place: int) -> str:
        """Return the name of a part in a path."""
        return f"[{place}]"


class Dict(Holder):
    """A dict, whose parts have keys."""

    def read(self, owner: Any) -> Any:
        """See `Kind`."""
        return dict(owner.items())

    def write(self, owner: Any, content: Any) -> None:
        """See `Kind`."""
        owner.clear()
        for key, part in content.items():
            owner[key] = part  # not update(), by which a Counter counts

    def sign(self, owner: Any) -> object:
        """See `Kind`."""
        return tuple(owner), tuple(map(id, owner.values()))

    def set_part(self, owner: Any, key: Any, value: Any) -> None:
        """Set one part of a dict, a table or attributes; ``MISSING`` removes it."""
        if value is MISSING:
            del owner[key]
        else:
            owner[key] = value

    def name(self, key: Any, place: int) -> str:
        """See `Holder`."""
        plain = isinstance(key, str | int | float | bytes | enum.Enum | None)
        return f"[{key!r}]" if plain else f"[{type(key).__name__} {place}]"


class _Table(Dict):
    """The parameters, buffers or modules of a module, which are named as attributes."""

    def name(self, key: Any, _place: int) -> str:
        return f".{key}"


class _Attributes(_Table):
    """The attributes of an object, in its dict or in slots."""

    def read(self, owner: Any) -> Any:
        own = getattr(owner, "__dict__", {})
        slots = _read_slots(owner)
        found = {**own, **slots}
        if isinstance(owner, nn.Module):
            found = {name: part for name, part in own.items() if name not in _HIDDEN}
            if hooks := _read_hooks(owner):
                found[_CODE_OF_HOOKS] = hooks
        return found

    def write(self, owner: Any, content: Any) -> None:
        gone = dict.fromkeys(self.read(owner).keys() - content.keys(), MISSING)
        for name, part in (gone | content).items():
            self.set_part(owner, name, part)

    def set_part(self, owner: Any, key: Any, value: Any) -> None:
        own = getattr(owner, "__dict__", {})
        if key == _CODE_OF_HOOKS and isinstance(owner, nn.Module):
            return  # they stay as they are
        if value is MISSING:
            object.__delattr__(owner, key)
        elif key in own:
            own[key] = value
        else:
            object.__setattr__(owner, key, value)

    def sign(self, owner: Any) -> object:
        own = getattr(owner, "__dict__", None)
        if own is None or _list_slots(owner.__class__):
            return None
        hooks = [*_list_hooks(owner)] if isinstance(owner, nn.Module) else ()
        return tuple(own), tuple(map(id, own.values())), tuple(map(tuple, hooks))


def _list_hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Yield the tables of hooks that are not empty; the number of a hook is used once."""
    own = module.__dict__
    yield from filter(None, map(own.get, _HOOKS))
    for parameter in own["_parameters"].values():
        if isinstance(parameter, Tensor):
            yield from filter(None, (getattr(parameter, name) for name in _HOOKS_OF_TENSORS))


def _read_hooks(module: nn.Module) -> frozenset[Any]:
    """Return the code of the hooks that the program defines."""
    hooks = {inspect.unwrap(hook) for table in _list_hooks(module) for hook in table.values()}
    plain = {getattr(hook, "func", getattr(hook, "__func__", hook)) for hook in hooks}
    return frozenset(
        getattr(hook, "__code__", type(hook))
        for hook in plain
        if is_of_program(hook if hasattr(hook, "__code__") else type(hook))
    )


class _Function(_Attributes):
    """The outer variables, defaults and attributes that a function of the program holds."""

    def read(self, owner: Any) -> Any:
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        found = {name: getattr(owner, name) for name in ("__code__", *_HELD_BY_FUNCTIONS)}
        return found | {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}

    def set_part(self, owner: Any, key: Any, value: Any) -> None:
        if key in owner.__code__.co_freevars and value is not MISSING:
            owner.__closure__[owner.__code__.co_freevars.index(key)].cell_contents = value

    sign = Kind.sign


class _Variables(_Attributes):
    """The data among the variables of a class or a file: no code, no callables of libraries."""

    def read(self, owner: Any) -> Any:
        found = vars(owner).items()
        return {name: own for name, own in found if not name.startswith("__") and _is_data(own)}

    def set_part(self, owner: Any, key: Any, value: Any) -> None:
        if value is MISSING:
            delattr(owner, key)
        else:
            setattr(owner, key, value)

    def sign(self, owner: Any) -> object:
        return tuple(vars(owner)), tuple(map(id, vars(owner).values()))


class _Set(Kind):
    """A set, whose items are values."""

    def read(self, owner: Any) -> frozenset[Any]:
        return frozenset(owner)

    def write(self, owner: Any, content: Any) -> None:
        owner.clear()
        owner.update(content)


class _Long(ByParts):
    """A long list or dict, whose objects are not entered."""

    def read(self, owner: Any) -> Any:
        return (DICT if isinstance(owner, dict) else ITEMS).read(owner)

    def write(self, owner: Any, content: Any) -> None:
        (DICT if isinstance(owner, dict) else ITEMS).write(owner, content)


class _Tensor(Kind):
    """A tensor; a change is found by its bits, as ``.data`` is changed without a version."""

    def read(self, owner: Tensor) -> Tensor:
        with torch.no_grad():
            return owner.detach().clone()

    @torch.no_grad()
    def write(self, owner: Tensor, content: Tensor) -> None:
        # Through .data, so that autograd does not take it for a change of its own saved tensors.
        same = (owner.layout, owner.shape) == (torch.strided, content.shape)
        steps = zip(owner.stride(), owner.shape, strict=True) if same else ()
        expanded = any(step == 0 and size > 1 for step, size in steps)  # which shares its memory
        if same and owner.dtype == content.dtype and not expanded:
            owner.data.copy_(content)
        else:
            owner.data = content.clone()

    def matches(self, owner: Tensor, content: Tensor) -> bool:
        return equal_bits(owner, content)


class _Array(Kind):
    def read(self, owner: np.ndarray) -> np.ndarray:
        return np.array(owner)

    def write(self, owner: np.ndarray, content: np.ndarray) -> None:
        if owner.shape != content.shape:
            owner.resize(content.shape, refcheck=False)
        owner[...] = content

    def matches(self, owner: np.ndarray, content: np.ndarray) -> bool:
        if (owner.shape, owner.dtype) != (content.shape, content.dtype):
            return False
        if owner.dtype.hasobject:
            return are_same(tuple(owner.flat), tuple(content.flat))
        return owner.tobytes() == content.tobytes()


class _Generator(Kind):
    """A random generator of torch, NumPy or Python."""

    def read(self, owner: Any) -> Any:
        if isinstance(owner, np.random.Generator):
            return owner.bit_generator.state
        if isinstance(owner, random.Random):
            with suppress(NotImplementedError):  # SystemRandom does not have a state
                return owner.getstate()
            return None
        words = {"legacy": False} if isinstance(owner, np.random.RandomState) else {}
        return owner.get_state(**words)

    def write(self, owner: Any, content: Any) -> None:
        if isinstance(owner, np.random.Generator):
            owner.bit_generator.state = content
        elif isinstance(owner, random.Random):
            if content is not None:
                owner.setstate(content)
        else:
            owner.set_state(content)


class _Opaque(ByParts):
    """An object that is not entered, of which only its attributes or items are compared.

    Of an object without attributes it is what pickle would save. An iterator that pickle refuses
    never matches, as nothing tells whether it was advanced.
    """

    def read(self, owner: Any) -> tuple[Any, ...]:
        own = getattr(owner, "__dict__", None)
        size = (len(owner),) if isinstance(owner, _SIZED) else ()
        slots = tuple(_read_slots(owner).values())
        if isinstance(own, dict) or size or slots:
            return (*size, *(own or {}).values(), *slots)
        first, again = (tuple(_list_saved(owner)) for _ in range(2))
        if are_same(first, again):
            return first
        ended = getattr(owner, "gi_frame", owner) is None
        return (object(),) if hasattr(owner, "__next__") and not ended else ()


class _Told(Kind):
    """A queue, lock or file, of which only what it tells is compared: size, hold or position."""

    def read(self, owner: Any) -> tuple[Any, ...]:
        answers = []
        for name in QUESTIONS:
            with suppress(Exception):  # a pipe has no position, and a closed file tells nothing
                answers.append((name, getattr(owner, name)()))
        return tuple(answers)


def _read_slots(owner: Any) -> dict[str, Any]:
    names = _list_slots(owner.__class__)
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _list_saved(owner: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the objects that pickle would save of an object; a new one if it refuses."""
    try:
        saved = owner.__reduce_ex__(2) if sys.getsizeof(owner) <= _MOST_SAVED_BYTES else None
    except Exception:  # noqa: BLE001 - whatever a library raises
        yield object()
        return
    pending = [saved]
    while pending:
        part = pending.pop()
        if isinstance(part, list | tuple | dict):
            inner = part.items() if isinstance(part, dict) else part
            yield len(part)
            pending += inner if len(part) <= _MOST_SAVED_ITEMS else ()
        elif depth and find_kind(part) is OPAQUE and not hasattr(part, "__dict__"):
            yield from _list_saved(part, depth - 1)
        else:
            yield part


ATTRIBUTES, ITEMS, DICT, TABLE, SET = _Attributes(), Holder(), Dict(), _Table(), _Set()
TENSOR, ARRAY, GENERATOR, OPAQUE, TOLD = _Tensor(), _Array(), _Generator(), _Opaque(), _Told()
FUNCTION, VARIABLES, LONG = _Function(), _Variables(), _Long()
_EMPTY = types.CellType()
_HELD_BY_FUNCTIONS = ("__dict__", "__defaults__", "__kwdefaults__")
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def find_kind(value: Any) -> Kind | None:
    """Return the kind of an object; None for a value that is only replaced as a whole."""
    try:
        kind = _find_kind_of_type(value.__class__)
    except ReferenceError:  # a weak reference to a freed object
        return None
    if isinstance(value, types.FunctionType):
        held = value.__closure__ or any(getattr(value, name) for name in _HELD_BY_FUNCTIONS)
        return FUNCTION if held and is_of_program(value) else None
    if kind in (ITEMS, DICT, SET) and len(value) > _MOST_ITEMS:
        return OPAQUE if kind is SET else LONG
    if kind is SET and any(find_kind(item) is not None for item in value):
        return OPAQUE
    if kind is ARRAY and not value.flags.writeable:
        return None  # a mapped file may be larger than the memory
    return kind


_KINDS: tuple[tuple[Any, Kind | None], ...] = (
    (Tensor, TENSOR),
    (np.ndarray, ARRAY),
    ((torch.Generator, np.random.Generator, np.random.RandomState, random.Random), GENERATOR),
    (_VALUES, None),
    (dict, DICT),
    ((list, deque, tuple), ITEMS),
    (set, SET),
    ((nn.Module, *_STATEFUL), ATTRIBUTES),
)


@lru_cache(maxsize=10_000)
def _find_kind_of_type(kind: Any) -> Kind | None:
    other = ATTRIBUTES if is_dataclass(kind) or is_of_program(kind) else OPAQUE
    return next((found for base, found in _KINDS if issubclass(kind, base)), other)


def is_of_program(kind: Any) -> bool:
    """Return whether the program defines a class or a function."""
    return _is_source_of_program(str(getattr(kind, "__module__", None)))


def name_namespaces(owners: Iterable[object]) -> dict[str, Any]:
    """Return the program's classes of objects and the files that they use, by name.

    These are the files of the classes, and those from which they import.
    """
    kinds = dict.fromkeys(kind for owner in owners for kind in type(owner).__mro__)
    own = [kind for kind in kinds if is_of_program(kind)]
    files: dict[str, Any] = {}
    waiting = [kind.__module__ for kind in own]
    for name in waiting:
        if name in files or name not in sys.modules or not _is_source_of_program(name):
            continue
        files[name] = sys.modules[name]
        for value in vars(sys.modules[name]).values():
            if isinstance(value, types.ModuleType):
                waiting.append(value.__name__)
            elif isinstance(value, type | types.FunctionType):
                waiting.append(str(value.__module__))
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in own} | files


def is_of_lightning(kind: Any) -> bool:
    """Return whether Lightning or this package defines a class or a function."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] in _LIGHTNING


@lru_cache(maxsize=10_000)
def _is_source_of_program(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    # Other environments, on whose packages this one builds, have folders of these names.
    outside = file is not None and not (
        file.startswith(_LIBRARY_FOLDERS) or _PACKAGES & {*Path(file).parts}
    )
    return name.partition(".")[0] not in _LIBRARIES and (name == "__main__" or outside)


def _is_data(value: object) -> bool:
    if isinstance(value, types.FunctionType):
        return find_kind(value) is FUNCTION
    if isinstance(value, _CODE) or hasattr(value.__class__, "__get__"):
        return False
    return find_kind(value) is not OPAQUE or not callable(value)


@lru_cache(maxsize=10_000)
def _list_slots(kind: Any) -> tuple[str, ...]:
    named = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    every = [name for names in named for name in ((names,) if isinstance(names, str) else names)]
    return tuple(name for name in every if name not in ("__dict__", "__weakref__"))


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    kinds = [(tensor.shape, tensor.dtype, tensor.layout, tensor.device) for tensor in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    one, other = one.detach(), other.detach()
    if one.device.type == "meta":
        return True
    if one.is_quantized or one.layout is torch._mkldnn:  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
        return bool(torch.equal(one.to_dense(), other.to_dense()))
    if one.layout is not torch.strided:
        return all(map(equal_bits, read_memory(one), read_memory(other)))
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = integers[one.element_size()]
    return bool(torch.equal(one.view(bits), other.view(bits)))


def read_memory(value: Any) -> tuple[Any, ...]:
    """Return the dense tensors or the array that have the elements of a tensor or an array."""
    read = SPARSE.get(getattr(value, "layout", torch.strided))
    return (value,) if read is None else read(value)


def are_equal(one: Any, other: Any) -> bool:  # noqa: PLR0911 - one case for each type
    """Return whether two contents or values are equal to the bit."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return equal_bits(one, other)
    if isinstance(one, np.ndarray):
        return ARRAY.matches(one, other)
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


def are_same(one: Any, other: Any) -> bool:
    """Return whether two contents hold the same objects, or equal values."""
    if isinstance(one, dict):
        return are_same((*one, *one.values()), (*other, *other.values()))
    if len(one) != len(other):
        return False
    return all(map(operator.is_, one, other)) or all(
        left is right
        or (type(left) is type(right) and find_kind(left) is None and are_equal(left, right))
        for left, right in zip(one, other, strict=True)
    )
