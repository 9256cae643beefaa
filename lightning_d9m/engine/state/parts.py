"""The parts of an object: how they are read, named and put back.

Every object is of one kind: a value that is only replaced as a whole (a number, a string, a
function), a holder of other objects (attributes, a dict, a list), data (a tensor, an array, a
random generator), or opaque: an object of a library that does not say what its state is.
"""

import argparse
import builtins
import copyreg
import enum
import gc
import inspect
import io
import logging
import operator
import queue
import random
import re
import struct
import sys
import sysconfig
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_d9m.engine.state.plain_data import decode_plain, encode_plain
from lightning_d9m.errors import SettingError
from lightning_d9m.program import LIGHTNING, PACKAGE_FOLDERS, is_of_framework

# Of most elements of data. An element of a subclass may have attributes.
PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})
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
# Objects of a 64-bit process lie above it; programs number things below it.
_LEAST_ADDRESS = 2**32
_GLOBAL: Any = (random.random, np.random.rand)
_WORD = struct.calcsize("P")
# Positions in the memory of NumPy's generators, and their bounds: MT19937 has 624 words, Philox a
# buffer of 4. NumPy sets any position, and the next draw reads there.
_POSITIONS = {"pos": 624, "buffer_pos": 4}
QUESTIONS = ("qsize", "locked", "_is_owned", "tell")
"""Methods that return the size of a queue, whether a lock is held, and a position in a file."""
# A longer container holds data, which are compared and not entered; a set is opaque.
_MOST_ENTERED = 100_000
# Of what pickle would save of an object. A larger one is unknown, and not read at each save.
_MOST_SAVED_BYTES, _MOST_SAVED_ITEMS = 2**24, 1000
# Names what memory of an object holds that is not an attribute. No attribute has parentheses.
_MEMORY = "memory()"
_PATHS = sysconfig.get_paths()
_LIBRARY_FOLDERS = tuple(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SIZED = (list, dict, set, deque, tuple)
_STATEFUL = (
    *(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, types.SimpleNamespace),
    *(UserDict, UserList, ChainMap, queue.Queue, argparse.Namespace),
)


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


def list_items(container: Any) -> Collection[Any]:
    """Return the items of a container; of a dict the keys and the values."""
    if isinstance(container, np.ndarray):
        return list(container.flat)
    return [*container, *container.values()] if isinstance(container, dict) else container


def holds_objects(container: Any) -> bool:
    """Return whether a container holds objects that can change, to judge by one of each type."""
    parts = container.values() if isinstance(container, dict) else container
    return any(
        find_kind(part) is not None for part in {type(part): part for part in parts}.values()
    )


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


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values that are only replaced as a whole are equal to the bit."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, np.ndarray):  # one that is only read
        return _equal_arrays(one, other)
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
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


def _equal_arrays(one: np.ndarray, other: np.ndarray) -> bool:
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    return same and one.tobytes() == other.tobytes()


@dataclass(frozen=True, eq=False)
class Kind:
    """A way to read and put back objects of some types.

    Attributes:
        read: Returns the content of an object, which stays as it is when the object changes.
        write: Puts a content back into the object, which stays the same one.
        compare: Returns whether two contents are equal.
        sign: Returns what is equal as long as nothing changed; None if only ``compare`` can tell.
        copies: Whether the content is a copy, with which the object itself can be compared.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object] = lambda _owner, _content: None
    compare: Callable[[Any, Any], bool] = are_equal
    sign: Callable[[Any], object] = lambda _owner: None
    copies: bool = False

    def matches(self, owner: Any, content: Any) -> bool:
        """Return whether the owner has this content."""
        return self.compare(owner if self.copies else self.read(owner), content)


@dataclass(frozen=True, eq=False)
class Holder(Kind):
    """Objects that hold other objects. The content is a tuple or a dict of these themselves.

    Attributes:
        name: Returns the name of a part in a path, by its key and place.
    """

    compare: Callable[[Any, Any], bool] = are_same
    name: Callable[[Any, int], str] = lambda key, _place: f".{key}"


def _set_item(owner: Any, key: Any, value: Any) -> None:
    if value is MISSING:
        del owner[key]
    else:
        owner[key] = value


@dataclass(frozen=True, eq=False)
class Dict(Holder):
    """Holders whose parts have keys.

    Attributes:
        set_part: Sets one part; ``MISSING`` removes it.
        takes: Returns whether ``read`` would return what is set under a key, and no code of the
            class, the file or Python is hidden by it.
    """

    set_part: Callable[[Any, Any, Any], None] = _set_item
    takes: Callable[[Any, Any], bool] = lambda _owner, _key: True

    def __post_init__(self) -> None:
        if self.write is Kind.write:
            object.__setattr__(self, "write", self._write_parts)

    def _write_parts(self, owner: Any, content: dict[Any, Any]) -> None:
        gone = dict.fromkeys(self.read(owner).keys() - content.keys(), MISSING)
        for name, part in (gone | content).items():
            self.set_part(owner, name, part)


def _read_items(owner: Any) -> Any:
    return dict(owner.items()) if isinstance(owner, dict) else tuple(owner)


def _write_items(owner: Any, content: Any) -> None:
    if isinstance(owner, tuple):
        return
    owner.clear()
    if isinstance(owner, set):
        owner.update(content)
    elif not isinstance(owner, dict):
        owner.extend(content)
    else:
        for key, part in content.items():
            owner[key] = part  # not update(), by which a Counter counts


def list_fields(kind: Any) -> tuple[str, ...] | None:
    """Return the names of the fields of a named tuple or a dataclass of the program, else None.

    One that is called, or that does something when it is freed, is not data.
    """
    named = issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)
    if has_memory(kind) != named or not (named or is_dataclass(kind)):
        return None
    names = kind._fields if named else [field.name for field in fields(kind)]
    static = [inspect.getattr_static(kind, name, None) for name in names]
    sets = [hasattr(own, "__set__") and not inspect.ismemberdescriptor(own) for own in static]
    acts = any({"__call__", "__del__"} & vars(base).keys() for base in kind.__mro__)
    return None if acts or (any(sets) and not named) else tuple(names)


def make_record(kind: Any, values: list[Any]) -> Any:
    """Return a named tuple or a dataclass with these values, without a call of its code."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    made = object.__new__(kind)
    for name, value in zip(list_fields(kind) or (), values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _name_key(key: Any, place: int) -> str:
    if isinstance(key, enum.Enum):
        return f"[{type(key).__name__}.{key.name}]"
    # A larger number may be an address, which differs from run to run.
    plain = isinstance(key, str | int | float | bytes | None) and not is_address(key)
    return f"[{key!r}]" if plain else f"[{type(key).__name__} {place}]"


def is_address(key: Any) -> bool:
    """Return whether a key of a dict may be the ``id()`` of an object."""
    return isinstance(key, int) and key >= _LEAST_ADDRESS


def leaves_out(owner: Any, name: str) -> bool:
    """Return whether a library's object is pickled without an attribute.

    Such an attribute is a cache, or has weak references to what was made of the object. One that is
    pickled in another form is not left out.
    """
    part, kind = getattr(owner, "__dict__", {}).get(name, MISSING), owner.__class__
    says = any(getattr(kind, own, None) is not getattr(object, own, None) for own in _SAVING)
    if part is MISSING or not says or _find_kind_of_type(kind) is not OPAQUE:
        return False  # an optimizer leaves out what the program adds to it
    pending, seen = [_reduce(owner)], dict[int, Any]()
    while pending:
        saved = pending.pop()
        named = isinstance(saved, str) and saved in (name, name.strip("_"))
        if named or saved is part or isinstance(saved, bytes | Unreadable):
            return False
        enters = isinstance(saved, tuple | list | dict) and id(saved) not in seen
        seen[id(saved)] = saved
        pending += list_items(saved) if enters else ()
    return True


def _read_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its dict or in slots."""
    own = getattr(owner, "__dict__", {})
    if not isinstance(owner, nn.Module):
        if isinstance(owner, _SIZED):  # whose items are not read
            return {**own, **_read_slots(owner), f"{_MEMORY}[0]": len(owner)}
        held = read_memory_of(owner) if has_memory(owner.__class__) else ()
        memory = {f"{_MEMORY}[{place}]": part for place, part in enumerate(held)}
        return {**own, **_read_slots(owner), **memory}
    found = {name: part for name, part in own.items() if name not in _HIDDEN}
    hooks = _read_hooks(owner)
    return {**found, _CODE_OF_HOOKS: hooks} if hooks else found


def _set_attribute(owner: Any, key: Any, value: Any) -> None:
    own = getattr(owner, "__dict__", {})
    if key == _CODE_OF_HOOKS or str(key).startswith(_MEMORY):
        return  # they stay as they are
    # Past the program's own __setattr__, which would count as a call of its code by a file.
    if value is MISSING:
        object.__delattr__(owner, key)
    elif key in own:
        own[key] = value
    else:
        object.__setattr__(owner, key, value)


def _takes_attribute(owner: Any, key: Any) -> bool:
    hidden = key in _HIDDEN and isinstance(owner, nn.Module)
    if hidden or key == _CODE_OF_HOOKS or str(key).startswith(_MEMORY):
        return False
    if key in _read_attributes(owner) or key in _list_slots(owner.__class__):
        return True
    return _is_plain_name(key) and _is_free(inspect.getattr_static(type(owner), key, None))


def _is_plain_name(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("__")


def _is_free(part: Any) -> bool:
    """Return whether what a class, a file or Python has under a name is neither code nor hides any.

    The value of a ``cached_property`` is an attribute of the object.
    """
    is_code = isinstance(part, CODE) or not _is_data(part)
    return isinstance(part, cached_property) or not is_code


def list_hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Yield the tables of hooks that are not empty; the number of a hook is used once.

    They are those of a module, its parameters and its buffers.
    """
    own = module.__dict__
    yield from filter(None, map(own.get, _HOOKS))
    # A traced module of TorchScript has neither table.
    tables = (own.get(name, {}) for name in ("_parameters", "_buffers"))
    for tensor in chain.from_iterable(table.values() for table in tables):
        if isinstance(tensor, Tensor):
            yield from filter(None, (getattr(tensor, name, None) for name in _HOOKS_OF_TENSORS))


def _read_hooks(module: nn.Module) -> frozenset[Any]:
    """Return the code of the hooks that the program defines."""
    hooks = {inspect.unwrap(hook) for table in list_hooks(module) for hook in table.values()}
    plain = {getattr(hook, "func", getattr(hook, "__func__", hook)) for hook in hooks}
    return frozenset(
        getattr(hook, "__code__", type(hook))
        for hook in plain
        if is_of_program(hook if hasattr(hook, "__code__") else type(hook))
    )


def _read_function(owner: Any) -> dict[str, Any]:
    """Return the outer variables, defaults and attributes that a function of the program holds."""
    cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
    found = {name: getattr(owner, name) for name in ("__code__", *_HELD_BY_FUNCTIONS)}
    return found | {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}


def _set_variable(owner: Any, key: Any, value: Any) -> None:
    """Set an outer variable of a function, or a variable of a class or a file."""
    if not isinstance(owner, types.FunctionType):
        # No property of a metaclass.
        base = type if isinstance(owner, type) else types.ModuleType
        if value is MISSING:
            base.__delattr__(owner, key)
        else:
            base.__setattr__(owner, key, value)
    elif key in owner.__code__.co_freevars and value is not MISSING and owner.__closure__:
        owner.__closure__[owner.__code__.co_freevars.index(key)].cell_contents = value


def _read_variables(owner: Any) -> dict[str, Any]:
    """Return the data among the variables of a class or a file.

    These are neither code nor callables of libraries.
    """
    found = {
        name: own
        for name, own in vars(owner).items()
        if not (name.startswith(_OF_PYTHON) or _loads_when_read(own))
    }
    # The functions of properties, and of static and class methods.
    functions = {
        f"{name}()[{place}]": part
        for name, own in found.items()
        if isinstance(own, _WRAPPERS)
        for place, part in enumerate(gc.get_referents(own))
        if isinstance(part, types.FunctionType | partial) and find_kind(part) is not None
    }
    members = {
        f"{name}.__dict__": vars(own) for name, own in found.items() if isinstance(own, enum.Enum)
    }
    # A descriptor of the program is code, and may hold data.
    data = {
        name: own for name, own in found.items() if _is_data(own) or find_kind(own) is ATTRIBUTES
    }
    return data | functions | members


def _loads_when_read(value: Any) -> bool:
    """Return whether a look at an object may import a module, as one by ``LazyLoader`` does."""
    kind = type(value)  # `isinstance` reads an attribute of the object
    read = types.ModuleType.__getattribute__
    return issubclass(kind, types.ModuleType) and kind.__getattribute__ is not read


def _takes_variable(owner: Any, key: Any) -> bool:
    if isinstance(owner, types.FunctionType):
        return key in owner.__code__.co_freevars
    hidden = (*owner.__mro__, type(owner)) if isinstance(owner, type) else (owner, builtins)
    parts = [vars(each).get(key) for each in hidden]
    return _is_plain_name(key) and all(map(_is_free, parts))


def _sign_variables(owner: Any) -> object:
    """Return the identities of all variables: a file has hundreds, most of which are code."""
    return tuple(vars(owner)), tuple(map(id, vars(owner).values()))


@torch.no_grad()
def _copy_tensor(owner: Tensor) -> Tensor:
    return owner.detach().clone()


@torch.no_grad()
def _write_tensor(owner: Tensor, content: Tensor) -> None:
    # .data hides the write from autograd, which would refuse it in a tensor that it has saved.
    same = (owner.layout, owner.shape) == (torch.strided, content.shape)
    steps = zip(owner.stride(), owner.shape, strict=True) if same else ()
    expanded = any(step == 0 and size > 1 for step, size in steps)  # which shares its memory
    if same and owner.dtype == content.dtype and not expanded:
        owner.data.copy_(content)
    else:
        owner.data = content.clone()


def _read_objects(owner: np.ndarray) -> tuple[Any, ...]:
    return sys.intern(str(owner.shape)), *owner.flat


def _write_objects(owner: np.ndarray, content: tuple[Any, ...]) -> None:
    if str(owner.shape) != content[0]:
        raise ValueError(content[0])
    for place, part in zip(range(owner.size), content[1:], strict=True):
        owner.flat[place] = part  # a list as it is, which a slice would take for many


def _write_array(owner: np.ndarray, content: np.ndarray) -> None:
    # Not resized: a tensor may share the memory, which would be freed under it.
    if owner.shape != content.shape:
        raise ValueError(content.shape)
    owner[...] = content


def _read_generator(owner: Any) -> bytes:
    if isinstance(owner, np.random.Generator):
        return encode_plain(owner.bit_generator.state)
    if isinstance(owner, random.Random):
        with suppress(NotImplementedError):  # SystemRandom does not have a state
            return encode_plain(owner.getstate())
        return encode_plain(None)
    words = {"legacy": False} if isinstance(owner, np.random.RandomState) else {}
    return encode_plain(owner.get_state(**words))


def check_positions(content: Any) -> None:
    """Check the state of a generator of NumPy, which reads memory at a position in it unchecked.

    Raises:
        ValueError: If it is out of bounds, or the state is not a dict of values and a dict, the
            only form that a checkpoint has. NumPy takes tuples and structures, too.
    """
    for held in (content, content.get("state") if type(content) is dict else None):
        if type(held) is not dict:
            raise ValueError(f"The state of a generator is a dict of a dict, not {content!r:.80}.")
        for name, most in _POSITIONS.items():
            if name in held and not 0 <= held[name] <= most:
                raise ValueError(f"{name!r} of a generator is {held[name]}, and at most {most}.")


def _write_generator(owner: Any, encoded: bytes) -> None:
    content = decode_plain(encoded)
    if not isinstance(owner, random.Random | torch.Generator):
        check_positions(content)
    if isinstance(owner, np.random.Generator):
        owner.bit_generator.state = content
    elif not isinstance(owner, random.Random):
        owner.set_state(content)
    elif content is not None:
        owner.setstate(content)


class Unreadable:
    """Stands for what nothing can read, and is not equal to another one."""


@lru_cache(maxsize=10_000)
def has_memory(kind: Any) -> bool:
    """Return whether objects of a class hold more than attributes: a class that is written in C."""
    fields = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0) + len(_list_slots(kind))
    return bool(kind.__basicsize__ > object.__basicsize__ + _WORD * fields)


def has_writable_bytes(value: Any) -> bool:
    """Return whether an object that is not entered shows its memory, as those of ctypes do."""
    with suppress(TypeError, ValueError, ReferenceError):
        return has_memory(value.__class__) and not memoryview(value).readonly
    return False


def read_memory_of(owner: Any) -> tuple[Any, ...]:
    """Return what an object holds besides its attributes.

    It is what pickle would save. Where pickle refuses it is the bytes of the object, its items, or
    what it tells; ``Unreadable`` without these. Code of libraries and an ended generator hold
    nothing.
    """
    # Twice, as what pickle saves may hold objects that are made for it, which no comparison with a
    # later reading could tell from a change.
    first, again = (tuple(_list_saved(owner)) for _ in range(2))
    if are_same(first, again):
        return first
    answers = dict(_ask(owner))
    found: tuple[Any, ...] = (*answers, *answers.values())
    is_code = callable(owner) or is_of_framework(type(owner).__module__)
    written = isinstance(owner, io.IOBase) and (owner.closed or not owner.readable())
    if is_code or written or getattr(owner, "gi_frame", owner) is None:
        return ()  # what is only written steers nothing
    with suppress(TypeError, ValueError):
        view = memoryview(owner)
        known = view.readonly or view.nbytes <= _MOST_SAVED_BYTES
        return (*found, b"" if view.readonly else view.tobytes() if known else Unreadable())
    if isinstance(owner, Collection):
        return (*owner, *(owner.values() if isinstance(owner, Mapping) else ()))
    return found if found and not answers.get("qsize") else (Unreadable(),)


def _ask(owner: Any) -> tuple[Any, ...]:
    """Return what a queue, lock or file tells: size, hold or position."""
    answers = []
    for name in QUESTIONS:
        with suppress(Exception):  # a pipe has no position, and a closed file tells nothing
            answers.append((name, getattr(owner, name)()))
    return tuple(answers)


def _read_slots(owner: Any) -> dict[str, Any]:
    names = _list_slots(owner.__class__)
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def reduce_object(owner: Any) -> Any:
    """Return what pickle would save of an object: the name, or the tuple, that reduces it.

    Raises:
        TypeError: If pickle refuses; or what the object raises.
    """
    reduce = copyreg.dispatch_table.get(type(owner))  # as of a type ``int | str``
    return owner.__reduce_ex__(2) if reduce is None else reduce(owner)


def _reduce(owner: Any) -> Any:
    """Return what pickle would save of an object; ``Unreadable`` if it refuses, or is large."""
    with suppress(Exception):  # whatever a library raises
        if sys.getsizeof(owner) <= _MOST_SAVED_BYTES:
            return reduce_object(owner)
    return Unreadable()


def _list_saved(owner: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the objects that pickle would save of an object; ``Unreadable`` if it refuses."""
    pending = [_reduce(owner)]
    while pending:
        part = pending.pop()
        if isinstance(part, list | tuple | dict):
            inner = part.items() if isinstance(part, dict) else part
            yield len(part)
            pending += [_encode_items(part)] if len(part) > _MOST_SAVED_ITEMS else inner
        elif isinstance(part, np.ndarray) and not part.dtype.hasobject:
            yield part.tobytes()
        elif depth and find_kind(part) is OPAQUE and not hasattr(part, "__dict__"):
            yield from _list_saved(part, depth - 1)
        else:
            yield part


def _encode_items(items: Any) -> Any:
    with suppress(SettingError):
        return encode_plain(items)
    return Unreadable()


# By which a class says what pickle saves of its objects.
_SAVING = ("__reduce_ex__", "__reduce__", "__getstate__")
_WRAPPERS = (staticmethod, classmethod, property)
# Names of variables that Python sets.
_OF_PYTHON = ("__", "_abc_impl")
_EMPTY = types.CellType()
_HELD_BY_FUNCTIONS = ("__dict__", "__defaults__", "__kwdefaults__")
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)

ITEMS = Holder(tuple, _write_items, name=lambda _, place: f"[{place}]")
# An array of objects.
OBJECTS = Holder(_read_objects, _write_objects, name=lambda _, place: f"[{place - 1}]")
DICT = Dict(_read_items, _write_items, name=_name_key)
WEAK = Dict(dict, takes=lambda own, _: isinstance(own, weakref.WeakKeyDictionary))
# The parameters, buffers or modules of a module, which are named as attributes.
TABLE = Dict(_read_items, _write_items)
ATTRIBUTES = Dict(_read_attributes, set_part=_set_attribute, takes=_takes_attribute)
FUNCTION = Dict(_read_function, set_part=_set_variable, takes=_takes_variable)
VARIABLES = Dict(
    _read_variables, set_part=_set_variable, takes=_takes_variable, sign=_sign_variables
)
# What a function is applied to; the arguments are entered, and stay the same objects.
PARTIAL = Holder(
    lambda own: {"func": own.func, "args": own.args, "keywords": own.keywords, **vars(own)}
)
CONTEXT = Dict(lambda own: {"get()": own.get(None)}, set_part=lambda own, _, value: own.set(value))
SET = Kind(frozenset, _write_items)
# A long list or dict, whose objects are not entered.
LONG = Kind(_read_items, _write_items, are_same)
# A change is found by its bits, as ``.data`` is changed without a version.
TENSOR = Kind(_copy_tensor, _write_tensor, equal_bits, copies=True)
ARRAY = Kind(np.array, _write_array, _equal_arrays, copies=True)
GENERATOR = Kind(_read_generator, _write_generator)
# What is not entered: its attributes, the number of its items, and its memory.
OPAQUE = Kind(_read_attributes, compare=are_same)
TOLD = Kind(_ask)


def find_kind(value: Any) -> Kind | None:
    """Return the kind of an object; None for a value that is only replaced as a whole."""
    try:
        kind = _find_kind_of_type(value.__class__)
    except ReferenceError:  # a weak reference to a freed object
        return None
    if isinstance(value, types.FunctionType | type | types.ModuleType):
        found = FUNCTION if isinstance(value, types.FunctionType) else VARIABLES
        return found if is_of_program(value) else None
    if kind in (ITEMS, DICT, SET) and len(value) > _MOST_ENTERED:
        return OPAQUE if kind is SET else LONG
    if kind is SET and any(find_kind(item) is not None for item in value):
        return OPAQUE
    if kind is ARRAY and not value.flags.writeable:
        return None  # a mapped file may be larger than the memory
    return OBJECTS if kind is ARRAY and value.dtype.hasobject else kind


_KINDS: tuple[tuple[Any, Kind | None], ...] = (
    (Tensor, TENSOR),
    (np.ndarray, ARRAY),
    ((torch.Generator, np.random.Generator, np.random.RandomState, random.Random), GENERATOR),
    (_VALUES, None),
    (dict, DICT),
    ((list, deque, tuple), ITEMS),
    (set, SET),
    ((nn.Module, *_STATEFUL), ATTRIBUTES),
    (partial, PARTIAL),
    (ContextVar, CONTEXT),
)


@lru_cache(maxsize=10_000)
def _find_kind_of_type(kind: Any) -> Kind | None:
    other = ATTRIBUTES if is_dataclass(kind) or is_of_program(kind) else OPAQUE
    return next((found for base, found in _KINDS if issubclass(kind, base)), other)


def is_of_program(kind: Any) -> bool:
    """Return whether the program defines a class or a function, or has a file."""
    name = "__name__" if isinstance(kind, types.ModuleType) else "__module__"
    return _is_source_of_program(str(getattr(kind, name, None)))


def find_owner(value: Any) -> Any:
    """Return the object of a bound method of the program, else None.

    Python's and NumPy's functions for random numbers have generators that are seeded otherwise.
    """
    own = isinstance(value, types.MethodType | types.BuiltinMethodType)
    owner = value.__self__ if own else None
    foreign = isinstance(owner, types.ModuleType) or is_of_lightning(type(owner))
    return None if foreign or any(owner is each.__self__ for each in _GLOBAL) else owner


def name_namespaces(value: Any) -> dict[str, Any]:
    """Return the program's classes of an object or a class, and the files of these, by name."""
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    own = [kind for kind in kinds if is_of_program(kind)]
    names = {kind.__module__ for kind in own if kind.__module__ in sys.modules}
    if isinstance(value, types.FunctionType) and value.__module__ in sys.modules:
        names = {value.__module__}
    return {name_namespace(each): each for each in (*own, *map(sys.modules.get, sorted(names)))}


def name_namespace(value: Any) -> str:
    """Return the name of a class or a file."""
    is_class = isinstance(value, type)
    return f"{value.__module__}.{value.__qualname__}" if is_class else str(value.__name__)


def is_of_lightning(kind: Any) -> bool:
    """Return whether Lightning or this package defines a class or a function."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] in LIGHTNING


@lru_cache(maxsize=10_000)
def _is_source_of_program(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    # Other environments, on whose packages this one builds, have folders of these names.
    outside = file is not None and not (
        file.startswith(_LIBRARY_FOLDERS) or PACKAGE_FOLDERS & {*Path(file).parts}
    )
    return not is_of_framework(name) and (name == "__main__" or outside)


def _is_data(value: object) -> bool:
    if isinstance(value, types.FunctionType | type | types.ModuleType):
        return find_kind(value) is not None
    if isinstance(value, CODE) or hasattr(value.__class__, "__get__"):
        return isinstance(value, types.MethodType)
    return find_kind(value) is not OPAQUE or not callable(value)


@lru_cache(maxsize=10_000)
def _list_slots(kind: Any) -> tuple[str, ...]:
    named = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    every = [name for names in named for name in ((names,) if isinstance(names, str) else names)]
    return tuple(name for name in every if name not in ("__dict__", "__weakref__"))
