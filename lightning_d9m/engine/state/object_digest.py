"""Digests of what objects hold, by pickle's walk through them, which is written in C.

Nothing is unpickled: the walk writes to a hash. One digest is for one process, and knows objects
without a form by their identity; the other is the same in every process.
"""

from collections.abc import Collection
from contextlib import suppress
from pickle import Pickler, PicklingError
from types import MethodType, SimpleNamespace
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_digest

from lightning_d9m.engine.state.parts import (
    ARRAY,
    CODE,
    DICT,
    GENERATOR,
    ITEMS,
    OPAQUE,
    SET,
    TENSOR,
    Holder,
    Kind,
    Unreadable,
    find_kind,
    is_of_program,
    read_memory,
)
from lightning_d9m.engine.state.plain_data import encode_plain
from lightning_d9m.engine.state.state import VERSIONED, LeaveOut

# Of larger data only the version and the place in memory are compared.
_MOST_BYTES = 2**24
_ERRORS = (RuntimeError, TypeError, ValueError, ReferenceError, PicklingError)


def list_items(container: Any) -> Collection[Any]:
    """Return the items of a container; of a dict the keys and the values."""
    return [*container, *container.values()] if isinstance(container, dict) else container


def digest_data(owner: Any) -> Any:
    """Return the digest of a tensor or an array; of a large one what changes with it."""
    with suppress(RuntimeError, ValueError, TypeError):
        parts = read_memory(owner)
        if sum(part.nbytes for part in parts) <= _MOST_BYTES:
            return str(owner.dtype), tuple(owner.shape), *map(_digest_memory, parts)
    with suppress(RuntimeError):  # without memory
        if isinstance(owner, Tensor):
            return VERSIONED.read(owner)
        return tuple(owner.flat) if owner.dtype.hasobject else owner.ctypes.data
    return None


def _digest_memory(part: Any) -> bytes:
    """Return the digest of the elements of a dense tensor or an array."""
    if isinstance(part, Tensor):
        part = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif part.dtype.hasobject:
        raise TypeError(part.dtype)
    return xxh3_128_digest(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


def digest_together(owner: Any, leave_out: LeaveOut) -> tuple[Any, ...]:
    """Return the digest of what a long container holds, the objects that count as such, and items.

    Its objects have no nodes.
    """
    digest = _Digest(leave_out)
    try:
        digest.dump(owner)
    except (RuntimeError, TypeError, ValueError, ReferenceError, PicklingError):
        # Too deep, freed, or without memory or pickled form: it may change unseen.
        return object(), *list_items(owner)
    return digest.hash.digest(), *digest.identities, *list_items(owner)


class _Digest(Pickler):
    """Hashes what objects hold by pickle's walk through them, which is written in C."""

    def __init__(self, leave_out: LeaveOut) -> None:
        self.hash = xxh3_128()
        self.identities: list[Any] = []
        self._leave_out = leave_out
        super().__init__(cast("IO[bytes]", SimpleNamespace(write=self.hash.update)), 5)

    def reducer_override(self, value: Any) -> Any:
        """Return what counts of an object, but of numbers and builtin containers."""
        if value is tuple:  # which this method returns
            return NotImplemented
        kind: Any = find_kind(value)
        held: tuple[Any, ...] = ()
        if kind in (TENSOR, ARRAY):
            held = (digest_data(value),)
        elif kind is GENERATOR:
            held = (encode_plain(kind.read(value)),)
        elif isinstance(kind, Holder) and not self._leave_out("", value):
            held = (kind.read(value), *_list_own_attributes(value, kind))
        else:
            self.identities.append(value)
            if kind in (OPAQUE, SET):
                self.identities += kind.read(value)
                held = _list_own_attributes(value, kind)
        return tuple, (type(value).__qualname__, held)


def _list_own_attributes(value: Any, kind: Kind) -> tuple[Any, ...]:
    """Return the attributes of a container of a subclass, as ``walk`` yields them."""
    return (vars(value),) if kind in (ITEMS, DICT, SET) and hasattr(value, "__dict__") else ()


def digest_saved(owner: Any) -> str | None:
    """Return a digest of all that an object holds, or of the state that it says it has.

    It is the same in another process. None if something in the object cannot be read.
    """
    says = hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
    try:
        pickler = _Saved(lambda _path, _value: False)
        pickler.fast = True  # without references, which depend on what is one object by chance
        pickler.dump(owner.state_dict() if says else owner)
    except Exception:  # noqa: BLE001 - whatever a program raises
        return None
    return pickler.hash.hexdigest()


class _Saved(_Digest):
    def reducer_override(self, value: Any) -> Any:
        """Return what an object holds, as pickle would write it."""
        kind = find_kind(value)
        if isinstance(value, CODE):
            if value is tuple:
                return NotImplemented
            if is_of_program(value) or isinstance(value, MethodType):
                raise PicklingError(value)  # nothing tells that it is the same code
            return tuple, (value.__module__, value.__qualname__)
        if kind is None:
            return NotImplemented
        held: Any = ()
        if kind in (TENSOR, ARRAY):
            held = (str(value.dtype), tuple(value.shape), *map(_digest_memory, read_memory(value)))
        elif kind is GENERATOR:
            held = (encode_plain(kind.read(value)),)
        elif isinstance(kind, Holder | Kind):
            held = (_read_all(value, kind), *_list_own_attributes(value, kind))
        return tuple, (type(value).__qualname__, held)


def _read_all(value: Any, kind: Kind) -> Any:
    found = kind.read(value)
    if kind is OPAQUE and any(isinstance(part, Unreadable) for part in found):
        raise PicklingError(value)
    return sorted(map(encode_plain, found)) if kind is SET else found
