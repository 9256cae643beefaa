"""Plain data as bytes, for objects that travel between ranks.

Bytes from another process are never unpickled, because unpickling runs code. The format is JSON; a
type that JSON lacks is an object with one key, the name of the type.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.errors import RanksDisagreeError, SettingError


def encode_plain(value: object) -> bytes:
    """Encode None, numbers, strings, bytes, paths, tensors, and lists, tuples and dicts of these.

    A subclass (``np.float64``, a named tuple) arrives as its base class; a tensor arrives on the
    CPU and without its graph.

    Raises:
        SettingError: The value contains an object of another type.
    """
    return json.dumps(_to_json(value)).encode()


def decode_plain(data: bytes) -> Any:
    """Return the value that `encode_plain` encoded.

    Raises:
        RanksDisagreeError: The bytes are not the output of `encode_plain`.
    """
    try:
        return _from_json(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise RanksDisagreeError(
            f"Another rank sent {len(data)} bytes that are not plain data (they begin with "
            f"{bytes(data[:16])!r}): every rank must run the same version of lightning_d9m.",
            intents=(),
        ) from error


def _to_json(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    for kind, (base, to_json, _) in _FORMATS.items():
        if isinstance(value, base):
            return {kind: to_json(value)}
    raise SettingError(
        f"An object of type {type(value).__qualname__} cannot be broadcast: ranks exchange None, "
        "numbers, strings, bytes, paths, dense tensors, and lists, tuples and dicts of these, "
        "because unpickling runs code. Broadcast the fields of the object, and build it again."
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return _FORMATS[kind][2](content)


def _tensor_to_json(tensor: Tensor) -> object:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise SettingError(
            f"Tensors with layout {tensor.layout} and dtype {tensor.dtype} cannot be broadcast: "
            "ranks exchange dense tensors. Broadcast its dense parts."
        )
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = base64.b64encode(plain.numpy().tobytes()).decode()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]


def _tensor_from_json(content: Any) -> Tensor:
    name, shape, data = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    raw = bytearray(base64.b64decode(data, validate=True))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


# The types that JSON lacks: the type, the function to JSON, and the function back.
_FORMATS: dict[str, tuple[type, Callable[[Any], object], Callable[[Any], Any]]] = {
    "tuple": (
        tuple,
        lambda value: [_to_json(item) for item in value],
        lambda content: tuple(_from_json(item) for item in content),
    ),
    "dict": (
        dict,
        lambda value: [[_to_json(key), _to_json(item)] for key, item in value.items()],
        lambda content: {_from_json(key): _from_json(item) for key, item in content},
    ),
    "bytes": (
        bytes,
        lambda value: base64.b64encode(value).decode(),
        lambda content: base64.b64decode(content, validate=True),
    ),
    "path": (PurePath, str, Path),
    "tensor": (Tensor, _tensor_to_json, _tensor_from_json),
}
