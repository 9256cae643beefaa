"""Digests of what objects hold.

They are taken by pickle's walk, which is written in C and writes to a hash; nothing is unpickled.
``digest_together`` is for one process, and knows objects without a form by their identity.
``digest_saved`` is the same in every process, and refuses what it cannot read.
"""

from contextlib import suppress
from pickle import Pickler, PicklingError
from types import MethodType, SimpleNamespace
from typing import IO, Any, cast

import numpy as np
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
    list_items,
    read_memory,
)
from lightning_d9m.engine.state.plain_data import encode_plain, view_bytes
from lightning_d9m.engine.state.state import LeaveOut

# Of data that are read in 0.1 seconds: in memory, and on a device, from which they are copied. Of
# larger data only the version and the place in memory are compared.
_MOST_BYTES, _MOST_ON_DEVICE = 2**30, 2**24
_ERRORS = (RuntimeError, TypeError, ValueError, ReferenceError, PicklingError)


def digest_data(owner: Any) -> tuple[Any, ...]:
    """Return the digest of a tensor or an array; of a large one what changes with it."""
    most = _MOST_ON_DEVICE if isinstance(owner, Tensor) and not owner.is_cpu else _MOST_BYTES
    with suppress(RuntimeError, ValueError, TypeError):
        if sum(part.nbytes for part in read_memory(owner)) <= most:
            return _digest_elements(owner)
    with suppress(RuntimeError, ValueError):  # without memory, or without a shape yet
        if isinstance(owner, Tensor):
            return owner._version, owner.data_ptr()  # noqa: SLF001 - torch has no public counter
        return (owner.ctypes.data,)
    return ()


def _digest_elements(owner: Any) -> tuple[Any, ...]:
    return str(owner.dtype), *owner.shape, *map(_digest_memory, read_memory(owner))


def _digest_memory(part: Any) -> bytes:
    """Return the digest of the elements of a dense tensor or an array."""
    if isinstance(part, Tensor):
        part = view_bytes(part.detach())
    return xxh3_128_digest(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


def digest_together(owner: Any, leave_out: LeaveOut) -> tuple[Any, ...]:
    """Return the digest of what a long container holds, the objects that count as such, and items.

    Its objects have no nodes.
    """
    digest = _Digest(leave_out)
    try:
        digest.dump(owner)
    except _ERRORS:
        # Too deep, freed, or without memory or pickled form: it may change unseen.
        return object(), *list_items(owner)
    return digest.hash.digest(), *digest.identities, *list_items(owner)


class _Digest(Pickler):
    """Hashes what objects hold.

    Args:
        leave_out: See ``walk``; None for a digest that is the same in every process.
    """

    def __init__(self, leave_out: LeaveOut | None = None) -> None:
        self.hash = xxh3_128()
        self.identities: list[Any] = []
        self._leave_out = leave_out
        super().__init__(cast("IO[bytes]", SimpleNamespace(write=self.hash.update)), 5)
        # Without references, which depend on what is one object by chance.
        self.fast = leave_out is None

    def reducer_override(self, value: Any) -> Any:
        """Return what counts of an object, but of numbers and builtin containers."""
        if value is tuple:  # which this method returns
            return NotImplemented
        kind: Any = find_kind(value)
        leave_out = self._leave_out
        everywhere = leave_out is None
        if everywhere and isinstance(value, CODE):
            if is_of_program(value) or isinstance(value, MethodType):
                raise PicklingError(value)  # nothing tells that it is the same code
            return tuple, (value.__module__, value.__qualname__)
        if everywhere and kind is None:
            return NotImplemented
        # The attributes of a container of a subclass, as ``walk`` yields them.
        has_own = kind in (ITEMS, DICT, SET) and hasattr(value, "__dict__")
        # Those of a tensor are lost where it is saved.
        has_own = has_own or (kind is TENSOR and not everywhere and bool(vars(value)))
        own = (vars(value),) if has_own else ()
        held: tuple[Any, ...]
        if kind in (TENSOR, ARRAY):
            held = (_digest_elements(value) if everywhere else digest_data(value), *own)
        elif kind is GENERATOR:
            held = (kind.read(value),)
        elif leave_out is None:
            held = (_read_all(value, kind), *own)
        elif isinstance(kind, Holder) and not leave_out("", value):
            held = (kind.read(value), *own)
        else:
            closed = kind in (OPAQUE, SET)
            self.identities += [value, *(list_items(kind.read(value)) if closed else ())]
            held = own if closed else ()
        return tuple, (type(value).__qualname__, held)


def digest_saved(owner: Any) -> str | None:
    """Return a digest of all that an object holds, or of the state that it says it has.

    It is the same in another process. None if something in the object cannot be read.
    """
    says = hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
    digest = _Digest()
    try:
        digest.dump(owner.state_dict() if says else owner)
    except Exception:  # noqa: BLE001 - whatever a program raises
        return None
    return digest.hash.hexdigest()


def _read_all(value: Any, kind: Kind) -> Any:
    found = kind.read(value)
    if kind is OPAQUE:
        found = tuple(found.values())
        if any(isinstance(part, Unreadable) for part in found):
            raise PicklingError(value)
    return sorted(map(encode_plain, found)) if kind is SET else found
