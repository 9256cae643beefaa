"""Plain data as bytes, for objects that travel between ranks.

Bytes from another process are never unpickled, because unpickling runs code. The format is the
size of a JSON text, the text, and the contents of tensors and bytes in their order in it. A type
that JSON lacks is an object with one key, the name of the type.
"""

import io
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_d9m.errors import RanksDisagreeError, SettingError

_SIZE_BYTES = 8
_JSON_TYPES = {type(None), bool, int, float, str}


def encode_plain(value: object) -> bytes:
    """Encode None, numbers, strings, bytes, paths, tensors, arrays, and containers of these.

    A subclass (a named tuple, say) arrives as its base class; a tensor arrives without its graph,
    and on the CPU unless ``decode_plain`` is given a device.

    Raises:
        SettingError: The value contains an object of another type.
    """
    contents: list[bytes] = []
    text = json.dumps(_to_json(value, contents)).encode()
    return b"".join((len(text).to_bytes(_SIZE_BYTES, "little"), text, *contents))


def decode_plain(data: bytes, device: torch.device | None = None) -> Any:
    """Return the value that `encode_plain` encoded.

    Tensors that were not on the CPU are moved to the device, if there is one.

    Raises:
        RanksDisagreeError: The bytes are not the output of `encode_plain`.
    """
    contents = _Contents(data, device)
    try:
        text = _read_exactly(
            contents, int.from_bytes(_read_exactly(contents, _SIZE_BYTES), "little")
        )
        return _from_json(json.loads(text), contents)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise RanksDisagreeError(
            f"Another rank sent {len(data)} bytes that are not plain data (they begin with "
            f"{bytes(data[:16])!r}): every rank must run the same version of lightning_d9m.",
            intents=(),
        ) from error


def pack_bytes(data: bytes) -> Tensor:
    """Return bytes as a tensor, as which a checkpoint holds them without pickled objects."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of ``pack_bytes``."""
    return tensor.numpy().tobytes()


class _Contents(io.BytesIO):
    """The encoded bytes, with the device of tensors that were not on the CPU."""

    def __init__(self, data: bytes, device: torch.device | None) -> None:
        super().__init__(data)
        self.device = device


def _to_json(value: object, contents: list[bytes]) -> object:
    number = isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)
    if value is None or number:
        return value
    if isinstance(value, list):
        # Numbers as they are: most long lists hold nothing else.
        plain = set(map(type, value)) <= _JSON_TYPES
        return value if plain else [_to_json(item, contents) for item in value]
    for kind, (base, to_json, _) in _FORMATS.items():
        if isinstance(value, base):
            return {kind: to_json(value, contents)}
    raise SettingError(
        f"An object of type {type(value).__qualname__} cannot be sent to another rank: ranks "
        "exchange None, numbers, strings, bytes, paths, tensors, arrays, and lists, tuples, sets "
        "and dicts of these, because unpickling runs code. Send the fields of the object, and "
        "build it again."
    )


def _from_json(value: Any, contents: _Contents) -> Any:
    if isinstance(value, list):
        return [_from_json(item, contents) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return _FORMATS[kind][2](content, contents)


def _read_exactly(contents: _Contents, size: int) -> bytes:
    found = contents.read(size)
    if len(found) != size:
        raise ValueError(size)
    return found


def _dict_to_json(value: dict[Any, Any], contents: list[bytes]) -> object:
    if any(isinstance(key, Tensor) for key in value):
        raise SettingError(
            "A tensor is a key of a dict, and as a key it is equal only to itself, so the dict "
            "cannot be sent to another rank: use the name of the tensor as the key."
        )
    return [[_to_json(key, contents), _to_json(item, contents)] for key, item in value.items()]


def _dict_from_json(content: Any, contents: _Contents) -> dict[Any, Any]:
    return {_from_json(key, contents): _from_json(item, contents) for key, item in content}


def _bytes_to_json(value: bytes, contents: list[bytes]) -> object:
    contents.append(value)
    return len(value)


def _tensor_to_json(tensor: Tensor, contents: list[bytes]) -> object:
    if tensor.is_sparse:
        parts = [tensor._indices(), tensor._values(), list(tensor.shape), tensor.is_coalesced()]  # noqa: SLF001 - the public ones need a coalesced tensor
        return _to_json(parts, contents)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise SettingError(
            f"Tensors with layout {tensor.layout} and dtype {tensor.dtype} cannot be sent to "
            "another rank: ranks exchange dense and sparse COO tensors. Send its dense parts."
        )
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    size = _bytes_to_json(plain.numpy().tobytes(), contents)
    name = str(tensor.dtype).removeprefix("torch.")
    return [name, list(tensor.shape), size, *([] if tensor.is_cpu else [1])]


def _array_to_json(array: np.ndarray | np.generic, contents: list[bytes]) -> object:
    if array.dtype.hasobject:
        raise SettingError(
            f"An array of dtype {array.dtype} cannot be sent to another rank, as it holds objects: "
            "use numbers or text."
        )
    return [array.dtype.str, list(array.shape), _bytes_to_json(array.tobytes(), contents)]


def _array_from_json(content: Any, contents: _Contents) -> Any:
    kind, shape, size = content
    raw = bytearray(_read_exactly(contents, size))
    return np.frombuffer(raw, dtype=np.dtype(kind)).reshape(shape)


def _set_to_json(value: Any, contents: list[bytes]) -> object:
    # In an order that does not depend on hashes.
    return [_bytes_to_json(item, contents) for item in sorted(map(encode_plain, value))]


def _set_from_json(content: Any, contents: _Contents) -> set[Any]:
    return {decode_plain(_read_exactly(contents, size)) for size in content}


def _tensor_from_json(content: Any, contents: _Contents) -> Tensor:
    if not isinstance(content[0], str):  # the parts of a sparse tensor
        indices, values, shape, coalesced = _from_json(content, contents)
        return torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=True, is_coalesced=coalesced
        )
    name, shape, size, *elsewhere = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    raw = bytearray(_read_exactly(contents, size))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    found = flat.reshape(shape)
    return found.to(contents.device) if elsewhere and contents.device else found


# The types that JSON lacks: the type, the function to JSON, and the function back.
_Encode = Callable[[Any, list[bytes]], object]
_Decode = Callable[[Any, _Contents], Any]
_FORMATS: dict[str, tuple[Any, _Encode, _Decode]] = {
    "tuple": (
        tuple,
        lambda value, contents: _to_json([*value], contents),
        lambda content, contents: tuple(_from_json(item, contents) for item in content),
    ),
    "dict": (dict, _dict_to_json, _dict_from_json),
    "bytes": (bytes, _bytes_to_json, lambda size, contents: _read_exactly(contents, size)),
    "path": (PurePath, lambda path, _: str(path), lambda text, _: Path(text)),
    "deque": (
        deque,
        lambda value, contents: [value.maxlen, *(_to_json(item, contents) for item in value)],
        lambda content, contents: deque(_from_json(content[1:], contents), content[0]),
    ),
    "set": (set | frozenset, _set_to_json, _set_from_json),
    "complex": (
        complex,
        lambda value, _: [value.real, value.imag],
        lambda content, _: complex(*content),
    ),
    "number": (
        np.generic,
        _array_to_json,
        lambda content, contents: _array_from_json(content, contents)[()],
    ),
    "array": (np.ndarray, _array_to_json, _array_from_json),
    "tensor": (Tensor, _tensor_to_json, _tensor_from_json),
}
