"""Nested values: the leaves of batches, and an encoding as bytes.

Equal bytes mean equal values of equal types.
"""

import functools
import struct
import types
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import itemgetter
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from lightning_d9m.engine.state.parts import reduce_object
from lightning_d9m.errors import DigestError

# Each value begins with a tag of its type, and content of variable size is preceded by its size, so
# that no two values share an encoding.
Piece = bytes | torch.Tensor
Note = Callable[[str], object]
# In one value: objects that hold each other may be reached by any number of ways.
_MOST_OBJECTS = 10_000
# NumPy's kinds with bytes of fixed meaning: bool, integers, floats, complex, dates, text.
_NUMPY_KINDS = frozenset("biufcmMSU")


def encode(value: object, note: Note | None = None, *, enters: bool = True) -> list[Piece]:
    """Encode a value; its tensors remain among the bytes.

    Args:
        value: The value.
        note: Called with the reason for each part that cannot be read; the part then counts by its
            type. None to raise an error for each part whose bytes are not defined.
        enters: Whether such a part counts by what pickle would save of it, if there is a ``note``.

    Raises:
        DigestError: The value holds itself, or something whose bytes are not defined, and there is
            no ``note``. The message says where in the value.
    """
    encoder = _Encoder(note, enters=enters)
    try:
        encoder.encode(value, "value")
    except RecursionError as error:
        reason = "A value that is nested this deeply has no digest."
        if note is None:
            raise DigestError(reason) from error
        note(reason)
        return encode(type(value))
    return encoder.out


def _encode_text(text: str) -> bytes:
    return _tag(b"S", text.encode("utf-8", "surrogatepass"))


_ARRAYS = (np.generic, np.ndarray)
# How a value is encoded: by the first entry that has its type. So bool and enumerations, which may
# be integers, come before int.
_SCALARS: tuple[tuple[Any, Callable[[Any], bytes]], ...] = (
    (type(None), lambda _: b"N"),
    (bool, lambda value: b"B1" if value else b"B0"),
    # Before Python 3.11, a flag that combines others has no name.
    (Enum, lambda value: _tag(b"E", f"{_name(type(value))}.{value.name or value.value}".encode())),
    (int, lambda value: _tag(b"I", b"%x" % value)),
    # The bytes of the number, because a text would lose the sign and the payload of a NaN.
    (float, lambda value: b"F" + struct.pack("<d", value)),
    (str, _encode_text),
    (complex, lambda value: b"C" + struct.pack("<2d", value.real, value.imag)),
    ((bytes, bytearray, memoryview), lambda value: _tag(b"Y", bytes(value))),
    (PurePath, lambda value: _tag(b"P", value.as_posix().encode("utf-8", "surrogateescape"))),
    (
        (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme),
        lambda value: _tag(b"Q", str(value).encode()),
    ),
    (
        (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
        lambda value: _tag(b"Q", _name(value).encode()),
    ),
)


@functools.lru_cache(maxsize=256)  # few types occur, at each of the hundreds of places of a state
def _find_encoder(kind: type) -> Callable[[Any], bytes] | None:
    return next((encoder for kinds, encoder in _SCALARS if issubclass(kind, kinds)), None)


def _encode_scalar(value: object) -> bytes | None:
    kind: Any = type(value)
    encoder = _find_encoder(kind)
    return None if encoder is None else encoder(value)


class _Encoder:
    """Encodes a value and its parts, one after the other, to ``out``."""

    def __init__(self, note: Note | None, *, enters: bool) -> None:
        self.out: list[Piece] = []
        self._note = note
        self._objects_left = _MOST_OBJECTS if enters and note is not None else 0
        self._above: dict[int, str] = {}  # the containers around the part, and where they are

    def encode(self, value: object, where: str) -> None:
        """Encode a part of the value; ``where`` says which."""
        if isinstance(value, _ARRAYS):
            self._encode_array(value, where)
        elif (scalar := _encode_scalar(value)) is not None:
            self.out.append(scalar)
        elif isinstance(value, torch.Tensor):
            self.out += (b"T", value)
        elif (place := self._above.get(id(value))) is not None:
            error = DigestError(
                f"{where} is {place} itself: a value that holds itself has no digest."
            )
            self._encode_type(value, error)
        else:
            self._above[id(value)] = where
            self._encode_container(value, where)
            del self._above[id(value)]

    def _encode_type(self, value: object, error: DigestError) -> None:
        """Encode the type of a part without defined bytes."""
        if self._note is None:
            raise error
        self._note(str(error))
        self.encode(type(value), "")

    def _encode_array(self, value: np.generic | np.ndarray, where: str) -> None:
        padded = value.dtype.char in "gG"  # long double: 10 of 16 bytes
        if value.dtype.kind not in _NUMPY_KINDS or padded or isinstance(value, np.ma.MaskedArray):
            error = DigestError(
                f"{where} is a NumPy {type(value).__name__} of dtype {value.dtype}, whose bytes "
                "are not defined. Pass its fields, or its elements as a list."
            )
            # The elements of others have bytes that nothing sets.
            if type(value) is np.ndarray and value.dtype.kind == "O":
                self._encode_object(value, where, error)
            else:
                self._encode_type(value, error)
            return
        shape = ",".join(map(str, value.shape))
        head = f"{value.dtype.str} [{shape}]\n".encode()
        self.out.append(_tag(b"A", head + value.tobytes()))

    def _encode_container(self, value: object, where: str) -> None:
        if (container := read_container(value)) is not None:
            kind, parts = container
            self.out.append(b"%s%x:" % (kind, len(parts)))
            if kind[:1] in b"LKM":  # entries have numbers
                for number, part in parts:
                    self.encode(part, f"{where}[{number}]")
                return
            keyed = [(self._encode_key(key, where), key, part) for key, part in parts]
            if kind == b"D":
                # Sorted by their encodings: keys of several types have no order of their own.
                keyed.sort(key=itemgetter(0))
            for encoded, key, part in keyed:
                self.out.append(encoded)
                self.encode(part, f"{where}[{key!r}]" if kind == b"D" else f"{where}.{key}")
        elif isinstance(value, AbstractSet):
            # Sorted, because the order of a set of strings changes with the hash seed of a process.
            self.out.append(b"U%x:" % len(value))
            self.out += sorted(self._encode_key(item, where) for item in value)
        elif isinstance(value, torch.Generator):
            self.out += (_tag(b"G", str(value.device).encode()), value.get_state())
        else:
            error = DigestError(
                f"{where} is of type {_name(type(value))}, whose bytes are not defined. Pass its "
                "state as numbers, strings, tensors, and dicts, lists or dataclasses of them."
            )
            self._encode_object(value, where, error)

    def _encode_object(self, value: object, where: str, error: DigestError) -> None:
        """Encode what pickle would save of a part without defined bytes, else its type."""
        saved: Any = None
        # A module leads to all that a program has, and the ledger has its weights.
        if self._objects_left and not isinstance(value, nn.Module):
            self._objects_left -= 1
            with suppress(Exception):  # whatever an object raises, or pickle if it refuses
                saved = read_saved(value)
        if saved is None:
            self._encode_type(value, error)
            return
        self.out.append(b"J")
        for part in saved:
            self.encode(part, where)

    def _encode_key(self, key: object, where: str) -> bytes:
        if type(key) is str:  # nearly all, as those of an optimizer's settings in each epoch
            return _encode_text(key)
        inner = _Encoder(self._note, enters=self._objects_left > 0)
        inner.encode(key, f"a key of {where}")
        if any(isinstance(piece, torch.Tensor) for piece in inner.out):
            inner.out.clear()
            error = DigestError(
                f"A key of {where} holds a tensor, which as a key is equal only to itself. "
                "Use its name as the key."
            )
            inner._encode_type(key, error)
        return b"".join(cast(list[bytes], inner.out))


def read_saved(value: object) -> tuple[Any, Any, Any, list[Any], list[Any]]:
    """Return what pickle would save of an object.

    It is a function or a name, what is passed to it, a state, items, and entries.

    Raises:
        TypeError: If pickle refuses; or what the object raises.
    """
    saved = reduce_object(value)
    parts = (saved,) if isinstance(saved, str) else saved
    made, arguments, state, items, entries = (*parts, *[None] * 4)[:5]
    return made, arguments, state, [*(items or ())], [*(entries or ())]


def read_container(value: object) -> tuple[bytes, list[tuple[Any, Any]]] | None:
    """Return the entries of a container, with their keys, numbers or names; None for other values.

    Containers are mappings, lists, tuples, named tuples, deques, partial functions and dataclasses;
    a set has only keys. The bytes are an encoding of the container's type.
    """
    if isinstance(value, Mapping):
        return b"D", [*value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names = value._fields
    elif isinstance(value, list | tuple):
        return b"L" if isinstance(value, list) else b"K", [*enumerate(value)]
    elif isinstance(value, deque):
        return b"M" + (_encode_scalar(value.maxlen) or b""), [*enumerate(value)]
    elif isinstance(value, functools.partial):
        names = ("func", "args", "keywords")
    elif is_dataclass(value) and not isinstance(value, type):
        # A field may not be set yet.
        names = tuple(field.name for field in fields(value) if hasattr(value, field.name))
    else:
        return None
    return _tag(b"O", _name(type(value)).encode()), [(name, getattr(value, name)) for name in names]


def _tag(tag: bytes, content: bytes) -> bytes:
    return b"%s%x:%s" % (tag, len(content), content)


def _name(thing: Callable[..., object]) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


_LEAVES = (str, bytes, int, float, complex, type(None))
# Never entered, whatever attributes they have.
_WHOLE = (*_LEAVES, AbstractSet, torch.Tensor, nn.Module)
# Deeper than any batch.
_MAX_DEPTH = 32


def list_pytree_leaves(value: object) -> list[tuple[str, object]]:
    """Return (path, leaf) for each leaf of a value, in its order.

    Containers are dicts, lists, tuples, named tuples, deques, dataclasses, and objects that
    Lightning moves to a device by their method ``to`` (their attributes). Any other than the last
    of only strings, numbers and None is one leaf: a list of a thousand strings gets one digest, not
    a thousand. Empty containers are leaves, too.

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
    is_leaf = id(value) in above or len(above) == _MAX_DEPTH or isinstance(value, _WHOLE)
    container = None if is_leaf else read_container(value)
    if container is not None:
        # A container of strings and numbers has a digest as a whole.
        entries = container[1]
        is_leaf = all(isinstance(entry, _LEAVES) for _, entry in entries)
    else:
        # Lightning moves such an object to a device by its own method.
        is_moved = hasattr(type(value), "to") and hasattr(value, "__dict__")
        entries = [] if is_leaf or not is_moved else [*vars(value).items()]
    if is_leaf or not entries:
        out.append((path, value))
        return
    for key, entry in entries:
        _collect(entry, f"{path}.{key}" if path else str(key), (*above, id(value)), out)
