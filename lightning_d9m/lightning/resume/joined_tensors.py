"""Numbers in one storage: a checkpoint's file has an entry for each storage, not tensor."""

from typing import Any

import torch
from torch import Tensor


def join_tensors(value: dict[str, Any]) -> dict[str, Any]:
    """Return plain values whose tensors of one number share a storage for each dtype.

    torch writes such tensors as views of it, which load as any other tensor: an entry of the file
    takes 30 microseconds, and a state has dozens of numbers as tensors. Larger ones stay apart: a
    generator reads its state from the beginning of the storage.

    Args:
        value: Nested dicts, lists and tuples; the other values are kept.
    """
    numbers: dict[torch.dtype, list[Tensor]] = {}
    _collect(value, numbers)
    parts = {dtype: iter(_join(tensors)) for dtype, tensors in numbers.items()}
    joined: dict[str, Any] = _replace(value, parts)
    return joined


def _is_number(value: object) -> bool:
    return (
        type(value) is Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and value.numel() == 1
        and not (value.requires_grad or value.is_complex() or value.is_quantized)
    )


def _collect(value: Any, numbers: dict[torch.dtype, list[Tensor]]) -> None:
    if type(value) in (dict, list, tuple):
        for entry in value.values() if type(value) is dict else value:
            _collect(entry, numbers)
    elif _is_number(value):
        numbers.setdefault(value.dtype, []).append(value)


def _join(tensors: list[Tensor]) -> list[Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sizes = [tensor.numel() for tensor in tensors]
    return [
        part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors, strict=True)
    ]


def _replace(value: Any, parts: dict[torch.dtype, Any]) -> Any:
    if type(value) is dict:
        return {key: _replace(entry, parts) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(entry, parts) for entry in value)
    return next(parts[value.dtype]) if _is_number(value) else value
