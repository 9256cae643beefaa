"""Nested values: the leaves of batches, and an encoding as bytes.

Equal bytes mean equal values of equal types.
"""

import functools
import struct
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import itemgetter
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from lightning_d9m.errors import DigestError

# Each value begins with a tag of its type, and content of variable size is preceded by its size, so
# that no two values share an encoding.
Piece = bytes | torch.Tensor
# NumPy's kinds with bytes of fixed meaning: bool, integers, floats, complex, dates, text.
_NUMPY_KINDS = frozenset("biufcmMSU")


def encode(value: object) -> list[Piece]:
    """Encode a value; its tensors remain among the bytes.

    Raises:
        DigestError: The value holds itself, or something whose bytes are not defined. The message
            says where in the value.
    """
    pieces: list[Piece] = []
    try:
        _encode(value, pieces, "value", {})
    except RecursionError as error:
        raise DigestError("A value that is nested this deeply has no digest.") from error
    return pieces


def _encode(value: object, out: list[Piece], where: str, above: dict[int, str]) -> None:
    scalar = _encode_scalar(value, where)
    if scalar is not None:
        out.append(scalar)
    elif isinstance(value, torch.Tensor):
        out += (b"T", value)
    elif id(value) in above:
        raise DigestError(
            f"{where} is {above[id(value)]} itself: a value that holds itself has no digest."
        )
    else:
        above[id(value)] = where
        _encode_container(value, out, where, above)
        del above[id(value)]


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


def _encode_scalar(value: object, where: str) -> bytes | None:
    if isinstance(value, _ARRAYS):
        return _encode_array(value, where)
    kind: Any = type(value)
    encoder = _find_encoder(kind)
    return None if encoder is None else encoder(value)


def _encode_array(value: np.generic | np.ndarray, where: str) -> bytes:
    padded = value.dtype.char in "gG"  # long double: 10 of 16 bytes
    if value.dtype.kind not in _NUMPY_KINDS or padded or isinstance(value, np.ma.MaskedArray):
        raise DigestError(
            f"{where} is a NumPy {type(value).__name__} of dtype {value.dtype}, whose bytes are "
            "not defined. Pass its fields, or its elements as a list."
        )
    shape = ",".join(map(str, value.shape))
    return _tag(b"A", f"{value.dtype.str} [{shape}]\n".encode() + value.tobytes())


def _encode_container(value: object, out: list[Piece], where: str, above: dict[int, str]) -> None:
    match value:
        case tuple() if hasattr(value, "_fields"):
            _encode_object(value, value._fields, out, where, above)
        case list() | tuple():
            out.append((b"L%x:" if isinstance(value, list) else b"K%x:") % len(value))
            for index, item in enumerate(value):
                _encode(item, out, f"{where}[{index}]", above)
        case Mapping():
            out.append(b"D%x:" % len(value))
            # Sorted by their encodings: keys of several types have no order of their own.
            entries = [(_encode_key(key, where), key, item) for key, item in value.items()]
            for encoded, key, item in sorted(entries, key=itemgetter(0)):
                out.append(encoded)
                _encode(item, out, f"{where}[{key!r}]", above)
        case AbstractSet():
            # Sorted, because the order of a set of strings changes with the hash seed of a process.
            out.append(b"U%x:" % len(value))
            out += sorted(_encode_key(item, where) for item in value)
        case torch.Generator():
            out += (_tag(b"G", str(value.device).encode()), value.get_state())
        case functools.partial():
            _encode_object(value, ("func", "args", "keywords"), out, where, above)
        case _ if is_dataclass(value):
            _encode_object(value, [field.name for field in fields(value)], out, where, above)
        case _:
            raise DigestError(
                f"{where} is of type {_name(type(value))}, whose bytes are not defined. Pass its "
                "state as numbers, strings, tensors, and dicts, lists or dataclasses of them."
            )


def _encode_object(
    value: object, names: Sequence[str], out: list[Piece], where: str, above: dict[int, str]
) -> None:
    # A field of a dataclass may not be set yet.
    names = [name for name in names if hasattr(value, name)]
    out.append(_tag(b"O", _name(type(value)).encode()) + b"%x:" % len(names))
    for name in names:
        out.append(_encode_text(name))
        _encode(getattr(value, name), out, f"{where}.{name}", above)


def _encode_key(key: object, where: str) -> bytes:
    if type(key) is str:  # nearly all, as those of an optimizer's settings in each epoch
        return _encode_text(key)
    pieces: list[Piece] = []
    _encode(key, pieces, f"a key of {where}", {})
    if any(isinstance(piece, torch.Tensor) for piece in pieces):
        raise DigestError(
            f"A key of {where} holds a tensor, which as a key is equal only to itself. "
            "Use its name as the key."
        )
    return b"".join(cast(list[bytes], pieces))


def _tag(tag: bytes, content: bytes) -> bytes:
    return b"%s%x:%s" % (tag, len(content), content)


def _name(thing: Callable[..., object]) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


_LEAVES = (str, bytes, int, float, complex, type(None))
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
    if not entries or (has_digest and all(isinstance(entry, _LEAVES) for _, entry in entries)):
        out.append((path, value))
        return
    for key, entry in entries:
        _collect(entry, f"{path}.{key}" if path else key, (*above, id(value)), out)


def _entries(value: object) -> list[tuple[str, object]] | None:
    if isinstance(value, (*_LEAVES, AbstractSet, torch.Tensor)):
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
