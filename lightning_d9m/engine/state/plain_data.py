"""Plain data as bytes, for objects that travel between ranks.

Bytes from another process are never unpickled, because unpickling runs code. The format is the
size of a JSON text, the text, and the contents of tensors and bytes in their order in it. A type
that JSON lacks is an object with one key, the name of the type.
"""

import io
import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_d9m.errors import RanksDisagreeError, SettingError

_SIZE_BYTES = 8
# From torch itself, so that the dtypes of later versions are known, too.
_DTYPES = {
    str(own).removeprefix("torch."): own
    for own in vars(torch).values()
    if isinstance(own, torch.dtype)
}
_DTYPE_OF_ARRAY = re.compile(r"[<>|=][biufcSUVmM]\d+(\[\w+\])?")
_JSON_TYPES = {type(None), bool, int, float, str}
FindForm: TypeAlias = Callable[[Any], tuple[str, Any] | None]
MakeObject: TypeAlias = Callable[[str, Any], Any]


def encode_plain(value: object, find_form: FindForm = lambda _: None) -> bytes:
    """Encode None, numbers, strings, bytes, paths, tensors, arrays, and containers of these.

    A subclass (a named tuple, say) arrives as its base class, and a ``defaultdict`` without a
    factory of the program. A tensor arrives without its graph, and on the CPU unless
    ``decode_plain`` is given a device.

    Args:
        value: The value.
        find_form: Called with each object in it, but not with numbers and texts. Returns a name and
            a value that is encoded instead, of which ``make`` of ``decode_plain`` makes an object.

    Raises:
        SettingError: The value contains an object of another type.
    """
    contents: list[bytes] = []
    text = json.dumps(_to_json(value, contents, find_form)).encode()
    # The order of bytes is fixed, not that of the machine.
    return b"".join((len(text).to_bytes(_SIZE_BYTES, "little"), text, *contents))


def _refuse(name: str, _content: Any) -> Any:
    raise KeyError(name)


def decode_plain(
    data: bytes, device: torch.device | None = None, make: MakeObject = _refuse
) -> Any:
    """Return the value that `encode_plain` encoded.

    Args:
        data: The bytes.
        device: The device of tensors that were not on the CPU, if there is one.
        make: Called with the name and the decoded value of each form; returns the object.

    Raises:
        RanksDisagreeError: The bytes are not the output of `encode_plain`.
    """
    contents = io.BytesIO(data)
    try:
        size = int.from_bytes(_read_exactly(contents, _SIZE_BYTES), "little")
        return _from_json(json.loads(_read_exactly(contents, size)), contents, device, make)
    except (
        *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError),
        MemoryError,
    ) as error:
        raise RanksDisagreeError(
            f"Another rank sent {len(data)} bytes that are not plain data (they begin with "
            f"{bytes(data[:16])!r}): every rank must run the same version of lightning_d9m.",
            intents=(),
        ) from error


def pack_bytes(data: bytes) -> Tensor:
    """Return bytes as a tensor, as which a checkpoint holds them without pickled objects."""
    # A copy that may be written to: torch warns of a tensor on the memory of `bytes`.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of ``pack_bytes``."""
    return tensor.numpy().tobytes()


def view_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a dense tensor; those on the CPU are not copied.

    ``numpy()`` would fix the size of the storage, which the program may resize in place later.
    """
    found: np.ndarray = np.from_dlpack(tensor.cpu().contiguous().reshape(-1).view(torch.uint8))
    return found


def _to_json(value: object, contents: list[bytes], find_form: FindForm) -> object:
    if type(value) in _JSON_TYPES:
        return value
    if (form := find_form(value)) is not None:
        return {form[0]: _to_json(form[1], contents, find_form)}
    # `np.float64` is a float of Python, too, and would lose its type.
    if isinstance(value, int | float | str) and not isinstance(value, np.generic):
        return value
    if isinstance(value, list):
        return _list_to_json(value, contents, find_form)
    if isinstance(value, bytes):
        contents.append(value)
        return {"bytes": len(value)}
    for kind, (base, to_list, _) in _FORMATS.items():
        if isinstance(value, base):
            return {kind: _list_to_json(to_list(value), contents, find_form)}
    raise SettingError(
        f"An object of type {type(value).__qualname__} cannot be sent to another rank: ranks "
        "exchange None, numbers, strings, bytes, paths, tensors, arrays, and lists, tuples, sets "
        "and dicts of these, because unpickling runs code. Send the fields of the object, and "
        "build it again."
    )


def _list_to_json(items: list[Any], contents: list[bytes], find_form: FindForm) -> object:
    # Numbers as they are: most long lists hold nothing else.
    plain = set(map(type, items)) <= _JSON_TYPES
    return items if plain else [_to_json(item, contents, find_form) for item in items]


def _from_json(
    value: Any, contents: io.BytesIO, device: torch.device | None, make: MakeObject
) -> Any:
    if isinstance(value, list):
        return [_from_json(item, contents, device, make) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return _read_exactly(contents, content)
    parts = _from_json(content, contents, device, make)
    if kind not in _FORMATS:
        return make(kind, parts)
    decoded = _FORMATS[kind][2](parts)
    elsewhere = kind == "tensor" and type(content[-1]) is int
    return decoded.to(device) if elsewhere and device else decoded


def _read_exactly(contents: io.BytesIO, size: int) -> bytes:
    found = contents.read(size)
    if len(found) != size:
        raise ValueError(size)
    return found


def _list_items(value: dict[Any, Any]) -> list[Any]:
    if any(isinstance(key, Tensor) for key in value):
        raise SettingError(
            "A tensor is a key of a dict, and as a key it is equal only to itself, so the dict "
            "cannot be sent to another rank: use the name of the tensor as the key."
        )
    # In one list, and not as an object of JSON, whose keys are texts only.
    return [part for item in value.items() for part in item]


def _name_factory(factory: Any) -> str | None:
    return next((name for name, kind in _FACTORIES.items() if kind is factory), None)


def _pair(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _split_tensor(tensor: Tensor) -> list[Any]:
    if tensor.is_sparse:
        return [tensor._indices(), tensor._values(), list(tensor.shape), tensor.is_coalesced()]  # noqa: SLF001 - the public ones need a coalesced tensor
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise SettingError(
            f"Tensors with layout {tensor.layout} and dtype {tensor.dtype} cannot be sent to "
            "another rank: ranks exchange dense and sparse COO tensors. Send its dense parts."
        )
    plain = view_bytes(tensor.detach()).tobytes()
    name = str(tensor.dtype).removeprefix("torch.")
    return [name, list(tensor.shape), plain, *([] if tensor.is_cpu else [1])]


def _join_tensor(parts: list[Any]) -> Tensor:
    if not isinstance(parts[0], str):
        indices, values, shape, coalesced = parts
        # Checked, because torch by default trusts indices, and a kernel would then use any of them
        # as a place in memory.
        return torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=True, is_coalesced=coalesced, device="cpu"
        )
    dtype = _DTYPES[parts[0]]
    raw = bytearray(memoryview(parts[2]))
    # `frombuffer` refuses a buffer without bytes.
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(parts[1])


def _split_array(array: np.ndarray | np.generic) -> list[Any]:
    if array.dtype.hasobject:
        raise SettingError(
            f"An array of dtype {array.dtype} cannot be sent to another rank, as it holds objects: "
            "use numbers or text."
        )
    # Of an array of structures their names and types.
    return [np.lib.format.dtype_to_descr(array.dtype), list(array.shape), array.tobytes()]


def _join_array(parts: list[Any]) -> Any:
    dtype = np.lib.format.descr_to_dtype(parts[0])
    if dtype.hasobject or (dtype.names is None and not _DTYPE_OF_ARRAY.fullmatch(parts[0])):
        raise ValueError(parts[0])
    # Copied, since an array on the memory of `bytes` cannot be written to.
    return np.frombuffer(parts[2], dtype).copy().reshape(parts[1])


# What a ``defaultdict`` makes. A rank, or a file that a stranger may have written, names no others,
# and code of the program is not sent.
_MADE = (bool, int, float, complex, str, list, tuple, dict, set, deque, Counter, OrderedDict)
_FACTORIES: dict[Any, Any] = {kind.__name__: kind for kind in _MADE}
# The types that JSON lacks besides bytes: the type, the function to a list, and that back.
_FORMATS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "counter": (Counter, _list_items, lambda parts: Counter(_pair(parts))),
    "ordered": (OrderedDict, _list_items, lambda parts: OrderedDict(_pair(parts))),
    "defaultdict": (
        defaultdict,
        lambda own: [_name_factory(own.default_factory), *_list_items(own)],
        lambda parts: defaultdict(_FACTORIES.get(parts[0]), _pair(parts[1:])),
    ),
    "dict": (dict, _list_items, _pair),
    "path": (PurePath, lambda own: [str(own)], lambda parts: Path(*parts)),
    "deque": (deque, lambda own: [own.maxlen, *own], lambda parts: deque(parts[1:], parts[0])),
    # In an order that does not depend on hashes.
    "set": (
        set | frozenset,
        lambda own: sorted(map(encode_plain, own)),
        lambda parts: {*map(decode_plain, parts)},
    ),
    "complex": (complex, lambda own: [own.real, own.imag], lambda parts: complex(*parts)),
    "number": (np.generic, _split_array, lambda parts: _join_array(parts)[()]),
    "array": (np.ndarray, _split_array, _join_array),
    "tensor": (Tensor, _split_tensor, _join_tensor),
}


# Dicts of these types have a form in checkpoints, with their items, attributes and, if it is one,
# factory. The messages of ranks have fewer parts, see ``_FORMATS``.
DICTS: dict[str, Any] = {kind.__name__: kind for kind in (Counter, OrderedDict, defaultdict)}


def split_dict(value: Any) -> list[Any]:
    """Return the parts of a dict of a builtin subclass, for ``join_dict``.

    Raises:
        TypeError: If its factory is code of the program.
    """
    factory = getattr(value, "default_factory", None)
    if (name := _name_factory(factory)) is None and factory is not None:
        raise TypeError(value)
    own = getattr(value, "__dict__", {})  # such as the versions that a `state_dict()` notes
    return [type(value).__name__, name, [[*pair] for pair in value.items()], {**own}]


def join_dict(kind: Any, factory: Any, pairs: list[Any], own: dict[Any, Any]) -> Any:
    """Return a dict of a type of ``DICTS`` from what ``split_dict`` has returned.

    Raises:
        KeyError: If the factory is not one that a file may name.
        TypeError: If an attribute would hide one of the type.
    """
    made = kind() if factory is None else kind(_FACTORIES[factory])
    for key, part in pairs:
        made[key] = part  # not update(), by which a Counter counts
    for name, part in own.items():
        if hasattr(made, name):  # it would hide a method
            raise TypeError(name)
        setattr(made, name, part)
    return made
