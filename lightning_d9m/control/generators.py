"""States of random generators as plain values for checkpoints.

All values load with ``torch.load(..., weights_only=True)``: tensors, numbers, strings,
lists and dicts.
"""

import random
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from inspect import Signature
from types import BuiltinFunctionType
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import torch

from lightning_d9m.control.seeding import RngState

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Objects of these packages are searched only if they are owners.
_FOREIGN = {"lightning", "lightning_fabric", "pytorch_lightning", "lightning_d9m"}
# The most frequent types, none of which holds a generator.
_ATOMS = frozenset({
    *(type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray),
    *(torch.device, torch.dtype, torch.Size, ref, Signature, BuiltinFunctionType),
})  # fmt: skip
_CONTAINERS = (dict, list, tuple)
_OPAQUE = (torch.Tensor, np.ndarray, type, str, bytes)
MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
# How deep objects are searched for generators: dataset -> transform -> its list -> a transform ->
# its list -> a transform -> generator, in a loader that replaces the dataset by a proxy.
_DEPTH = 8
# A longer list holds data, and one kind of data has no generators in it: no list of transforms is
# that long.
_MOST_ITEMS = 1000
# Of a list that is longer than the first, the second of each type are searched; if none of them
# holds a generator, the others do not either.
_MOST_UNSAMPLED = 50
_SAMPLED = 5
# Nested lists with more items in all hold data too.
_MOST_NESTED_ITEMS = 10_000
# Objects that one search visits below the owners' own attributes. A thousand objects with dozens of
# attributes each would otherwise take seconds.
_MOST_VISITED = 20_000
# The same below a depth at which most objects are data.
_SHALLOW = 4
_MOST_DEEP = 2000


def encode_rng(state: RngState) -> dict[str, Any]:
    """Return the state of all generators of a process as plain values."""
    return {
        "python": _encode_python(state.python),
        "numpy": _encode_plain(state.numpy),
        "torch": state.torch_cpu,
        "devices": {name: list(states) for name, states in state.devices.items()},
    }


def decode_rng(encoded: Mapping[str, Any]) -> RngState:
    """Return the state from the plain values of ``encode_rng``."""
    return RngState(
        python=_decode_python(encoded["python"]),
        numpy=_decode_plain(encoded["numpy"]),
        torch_cpu=encoded["torch"],
        devices={name: list(states) for name, states in encoded["devices"].items()},
    )


def capture_generators(owners: Mapping[str, object]) -> dict[str, Any]:
    """Return the state of every generator that the objects hold.

    Args:
        owners: Objects by name. See ``find_generators`` for the search.

    Returns:
        Plain values by the generator's path, such as ``"model.noise"``.
    """
    return {path: _encode(generator) for path, generator in find_generators(owners).items()}


def restore_generators(owners: Mapping[str, object], encoded: Mapping[str, Any]) -> list[str]:
    """Restore every generator to its captured state.

    Returns:
        The paths of generators that were captured and are missing now, or were not captured.
    """
    found = find_generators(owners)
    for path in encoded.keys() & found.keys():
        _restore(found[path], encoded[path])
    return sorted(encoded.keys() ^ found.keys())


def find_generators(owners: Mapping[str, object]) -> dict[str, Any]:
    """Return the generators in attributes, lists and dicts of objects, by path.

    The search goes from the outside in, eight levels deep. It leaves out lists that are too long to
    hold anything but data, and ends when it has visited 20,000 objects, and 2,000 below the fourth
    level. A list of more than 50 objects, none of which is a generator, is searched only if one of
    the first five of a type holds one.
    """
    return _Search().run((name, owner, 0, 1) for name, owner in owners.items())


class _Search:
    """One search for generators."""

    def __init__(self) -> None:
        self._left = _MOST_VISITED
        self._deep_left = _MOST_DEEP
        self._known: dict[type, bool] = {}

    def run(self, start: Iterable[tuple[str, object, int, int]]) -> dict[str, Any]:
        """Return the generators by path; see ``list_parts`` for what describes an object."""
        found: dict[str, Any] = {}
        seen: set[int] = set()
        pending = deque(start)
        while pending:
            path, value, depth, items = pending.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if self._is_generator(type(value)):
                found[path] = value
            elif depth < _DEPTH:
                if isinstance(value, _CONTAINERS):
                    items *= len(value)
                    if self._holds_data(value, depth):
                        continue
                parts = [
                    (f"{path}.{name}", part, depth + 1, items)
                    for name, part in list_parts(value, depth, items)
                    if type(part) not in _ATOMS
                ]
                # Each owner's own attributes are visited, however many owners there are.
                if depth >= _SHALLOW:
                    parts = parts[: self._deep_left]
                    self._deep_left -= len(parts)
                elif depth:
                    parts = parts[: self._left]
                    self._left -= len(parts)
                pending += parts
        return found

    def _is_generator(self, kind: type) -> bool:
        """Return whether instances are generators; torch.Generator answers slowly, in Python."""
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = issubclass(kind, _KINDS)
        return known

    def _holds_data(self, value: Any, depth: int) -> bool:
        """Return whether a sample of a long list shows that its items hold no generators.

        A dataset of a thousand objects would otherwise be searched before each validation, which
        took 10% of small trainings.
        """
        if not _MOST_UNSAMPLED < len(value) <= _MOST_ITEMS:
            return False
        held = value.values() if isinstance(value, dict) else value
        if not _may_hold(held):
            return True
        samples: dict[type, list[Any]] = {}
        for item in held:
            of_type = samples.setdefault(type(item), [])
            if len(of_type) < _SAMPLED and type(item) not in _ATOMS:
                of_type.append(item)
        if any(map(self._is_generator, samples)):
            return False
        start = [("", item, depth + 1, 1) for items in samples.values() for item in items]
        self._left -= len(start)
        return not self.run(start)


def list_parts(value: Any, depth: int, items: int) -> Iterable[tuple[object, Any]]:
    """Return the named parts of a value; nothing if it cannot hold a generator.

    Args:
        value: The value.
        depth: How many steps lead to it from an owner.
        items: If it is a container: how many items there are in it and in its siblings, were they
            all as long.
    """
    if isinstance(value, _CONTAINERS):
        held = value.values() if isinstance(value, dict) else value
        if items > _MOST_NESTED_ITEMS or not _may_hold(held):
            return ()
        return value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, torch.nn.Module):
        # Its parts are modules with attributes of their own; the caller lists them.
        return [entry for entry in vars(value).items() if entry[0] not in MODULE_ATTRIBUTES]
    if isinstance(value, _OPAQUE):
        return ()
    if depth and type(value).__module__.partition(".")[0] in _FOREIGN:
        return ()  # a Trainer, a controlled loader
    return getattr(value, "__dict__", {}).items()


def are_data(values: Iterable[object]) -> bool:
    """Return whether the types of values show that none of them holds a generator."""
    return _ATOMS.issuperset(map(type, values))


def _may_hold(items: Collection[object]) -> bool:
    """Return whether one of the items may hold a generator, without a line of Python for each."""
    return len(items) <= _MOST_ITEMS and not _ATOMS.issuperset(map(type, items))


def _encode(generator: Any) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state()}
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": _encode_plain(generator.bit_generator.state)}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "legacy", "state": _encode_plain(generator.get_state(legacy=False))}
    try:
        return {"kind": "python", "state": _encode_python(generator.getstate())}
    except NotImplementedError:  # SystemRandom does not have a state
        return {"kind": "none", "state": None}


def _restore(generator: Any, encoded: Mapping[str, Any]) -> None:
    state = encoded["state"]
    if encoded["kind"] == "torch":
        generator.set_state(state)
    elif encoded["kind"] == "numpy":
        generator.bit_generator.state = _decode_plain(state)
    elif encoded["kind"] == "legacy":
        generator.set_state(_decode_plain(state))
    elif encoded["kind"] == "python":
        generator.setstate(_decode_python(state))


def _encode_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    # torch.tensor would read every word in Python; NumPy is faster.
    words = torch.from_numpy(np.array(words, dtype=np.int64))
    return {"version": version, "words": words, "gauss": gauss}


def _decode_python(encoded: Mapping[str, Any]) -> tuple[Any, ...]:
    return (encoded["version"], tuple(encoded["words"].tolist()), encoded["gauss"])


def _encode_plain(value: Any) -> Any:
    """Return NumPy's nested state with arrays as tensors, and long integers as strings."""
    if isinstance(value, Mapping):
        return {str(key): _encode_plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        data = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        return {"dtype": str(value.dtype), "bytes": data}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int) and value.bit_length() > 63:  # noqa: PLR2004 - PCG64's have 128 bits
        return {"number": str(value)}
    return value


def _decode_plain(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"number"}:
        return int(value["number"])
    if value.keys() == {"dtype", "bytes"}:
        return np.frombuffer(value["bytes"].numpy().tobytes(), dtype=value["dtype"]).copy()
    return {key: _decode_plain(part) for key, part in value.items()}
