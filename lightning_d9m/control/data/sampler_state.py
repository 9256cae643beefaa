"""The attributes that a user's sampler changes, such as a count of epochs or a shuffled list.

A resumed run starts with a new sampler, whose attributes have their first values.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.control.data.resumable_sampler import is_user_made

Attributes = dict[str, dict[str, Any]]
"""Encoded values by the name of the attribute, by the number of the sampler."""

ATTRIBUTES = "sampler attributes"
"""The key of the attributes of a loader's samplers, beside the states of their generators."""

_MOST_ITEMS = 2**22  # of a list; a longer one is not read
_LARGEST = 2**63  # a tensor holds integers of 64 bits
_NUMBERS = (bool, int, float)


def read_attributes(samplers: Iterable[Any]) -> Attributes:
    """Return the attributes of the user's samplers that are plain values, as plain values."""
    found: Attributes = {}
    for number, sampler in enumerate(samplers):
        values = vars(sampler) if is_user_made([sampler]) and hasattr(sampler, "__dict__") else {}
        # The loader's control sets these in each epoch.
        ours = {"seed"} if isinstance(sampler, DistributedSampler) else set()
        ours |= {"epoch"} if hasattr(sampler, "set_epoch") else set()
        encoded = {name: _encode(value) for name, value in values.items() if name not in ours}
        found[str(number)] = {name: value for name, value in encoded.items() if value is not None}
    return found


def find_changed_attributes(first: Attributes, now: Attributes) -> Attributes:
    """Return the attributes that are not as they were first."""
    found: Attributes = {}
    for number, attributes in now.items():
        for name, value in attributes.items():
            if not _equal(first.get(number, {}).get(name), value):
                found.setdefault(number, {})[name] = value
    return found


def write_attributes(samplers: Iterable[Any], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the attributes of samplers; a list is changed in place, because others may hold it."""
    for number, sampler in enumerate(samplers):
        for name, encoded in saved.get(str(number), {}).items():
            value, present = _decode(encoded), getattr(sampler, name, None)
            if type(present) is list and type(value) is list:
                present[:] = value
            else:
                setattr(sampler, name, value)


def _encode(value: Any) -> dict[str, Any] | None:
    """Return a number, a text, an array or a nested list of these as plain values, else None."""
    kind = type(value)
    found: dict[str, Any] | None = None
    if kind is int and not -_LARGEST <= value < _LARGEST:
        return None
    if value is None or kind in (*_NUMBERS, str):
        found = {"kind": "value", "value": value}
    elif isinstance(value, torch.Tensor):
        found = {"kind": "tensor", "value": value.detach().cpu().clone()}
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        found = {"kind": "array", "value": torch.from_numpy(value.copy())}
    elif kind in (list, tuple) and len(value) <= _MOST_ITEMS:
        if (numbers := _encode_numbers(value)) is not None:
            return {"kind": kind.__name__, **numbers}
        items = [_encode(item) for item in value]
        if None not in items:
            found = {"kind": kind.__name__, "items": items}
    return found


def _encode_numbers(values: Sequence[Any]) -> dict[str, Any] | None:
    """Return numbers of one type as a tensor; None for anything else."""
    kinds = set(map(type, values))
    if len(kinds) != 1 or not kinds <= set(_NUMBERS):
        return None
    (kind,) = kinds
    if kind is not float and not -_LARGEST <= min(values) <= max(values) < _LARGEST:
        return None
    numbers = np.array(values, dtype="float64" if kind is float else "int64")
    return {"of": kind.__name__, "value": torch.from_numpy(numbers)}


def _decode(encoded: Mapping[str, Any]) -> Any:
    kind, value = encoded["kind"], encoded.get("value")
    if kind == "value":
        return value
    if kind in ("tensor", "array"):
        assert isinstance(value, torch.Tensor), "as _encode makes it"
        return value.clone() if kind == "tensor" else value.clone().numpy()
    if value is None:
        items = [_decode(item) for item in encoded["items"]]
    else:
        items = [bool(item) for item in value] if encoded["of"] == "bool" else value.tolist()
    return tuple(items) if kind == "tuple" else items


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
