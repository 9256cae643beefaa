"""A walk through all that objects hold, and a digest of it."""

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
from torch import nn
from xxhash import xxh3_128

from lightning_d9m.errors import SettingError
from lightning_d9m.state.parts import (
    ATTRIBUTES,
    DICT,
    ITEMS,
    MISSING,
    OPAQUE,
    SET,
    TABLE,
    TABLES,
    Content,
    Holder,
    Kind,
    are_equal,
    find_kind,
)
from lightning_d9m.state.plain_data import encode_plain


@dataclass(slots=True, eq=False)
class Node:
    """An object that can change, where it was found first, and what it held.

    Attributes:
        path: The names on the way to it, as a program writes them.
        owner: The object.
        kind: How it is read and put back.
        content: What it held; a copy for data.
    """

    path: str
    owner: Any
    kind: Kind
    content: Any

    def get_first(self, key: Any) -> Any:
        """Return what a dict or an object held under a key; ``MISSING`` if nothing."""
        return dict(zip(self.content.keys, self.content.parts, strict=True)).get(key, MISSING)

    def set_part(self, key: Any, value: Any) -> None:
        """Set what a dict or an object holds under a key now; ``MISSING`` removes it."""
        kind: Any = self.kind
        if value is not MISSING or key in (kind.read(self.owner).keys or ()):
            kind.set_part(self.owner, key, value)

    def find_parts(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield path, key, first and present value of each part that is another one now."""
        kind: Any = self.kind
        before, now = self.content, kind.read(self.owner)
        old = dict(zip(before.keys, before.parts, strict=True))
        new = dict(zip(now.keys, now.parts, strict=True))
        for content in (before, now):
            for place, key in enumerate(content.keys):
                part, first = new.get(key, MISSING), old.get(key, MISSING)
                if part is first or (content is now and key in old):
                    continue
                if first is MISSING and _is_own_method(self.owner, key, part):
                    continue
                if find_kind(part) is not None or not are_equal(part, first):
                    yield name_part(self.path, kind, content, place), key, first, part


def _is_own_method(owner: Any, name: Any, value: Any) -> bool:
    """Return whether a value is a method of the owner's class, which a wrapper has put back."""
    bound = isinstance(value, MethodType) and value.__self__ is owner
    return bound and value.__func__ is getattr(type(owner), name, None)


def walk(
    owners: Mapping[str, object],
    *,
    leave_out: Callable[[str, object], bool] | None = None,
    known: Container[int] = (),
    enter_owners: bool = False,
) -> Iterator[tuple[str, object, Kind | None]]:
    """Yield every object that can be reached from the owners: its path, itself and its kind.

    An object that is reached by several paths is entered at the first. The kind is None for a
    value that is only replaced as a whole, and for an object that was yielded before. Objects of
    libraries are yielded as opaque and not entered, as is what ``leave_out`` returns True for.

    Args:
        owners: Objects by name.
        leave_out: Called with the path and each object that can change.
        known: The identities of objects that are not entered again.
        enter_owners: Enter the owners themselves whatever their type.
    """
    seen: set[int] = set()
    kept = []  # the id of a freed object may become that of another
    entered = set(map(id, owners.values())) if enter_owners else ()
    stack: list[tuple[str, Any, Kind | None]] = [
        (name, owner, None) for name, owner in reversed(list(owners.items()))
    ]
    while stack:
        path, value, kind = stack.pop()
        kind = kind or find_kind(value)
        if kind is OPAQUE and id(value) in entered:
            kind = ATTRIBUTES
        if kind is None or id(value) in seen or id(value) in known:
            yield path, value, None
            continue
        seen.add(id(value))
        kept.append(value)
        if leave_out is not None and leave_out(path, value):
            yield path, value, OPAQUE
            continue
        yield path, value, kind
        if kind in (ITEMS, DICT, SET) and hasattr(value, "__dict__"):  # of a subclass
            stack.append((f"{path}.__dict__", vars(value), TABLE))
        if isinstance(kind, Holder):
            content = kind.read(value)
            for place in reversed(range(len(content.parts))):
                part = content.parts[place]
                name = content.keys[place] if content.keys else None
                is_table = name in TABLES and isinstance(value, nn.Module)
                table = TABLE if is_table and isinstance(part, dict) else None
                stack.append((name_part(path, kind, content, place), part, table))


def name_part(path: str, kind: Holder, content: Content, place: int) -> str:
    """Return the path of a part of a holder; a module's parameters are named as its attributes."""
    if kind is TABLE:
        path = path.rpartition(".")[0]
    return (path + kind.name(content, place)).removeprefix(".")


def digest_value(value: object) -> str:
    """Return 32 hex digits that are equal for equal values, whatever they hold.

    An opaque object counts with its type and place.
    """
    first: dict[int, str] = {}
    found: dict[str, bytes] = {}
    for path, part, kind in walk({"": value}):
        content: object = part
        if kind is not None:
            first[id(part)] = path
            content = kind.describe(kind.read(part))
        elif id(part) in first and find_kind(part) is not None:
            content = f"the same as {first[id(part)]}"
        if kind is not TABLE:
            found[path] = f"\0{type(part).__qualname__}\0".encode() + _encode(content)
    hasher = xxh3_128()
    for path, content in sorted(found.items()):
        hasher.update(path.encode() + content)
    return hasher.hexdigest()


def _encode(content: object) -> bytes:
    if isinstance(content, np.ndarray) and content.dtype.hasobject:
        return b"\0".join(map(_encode, (content.shape, *content.flat)))
    try:
        return encode_plain(content)
    except SettingError:  # a function, a class, a dtype
        name = getattr(content, "__qualname__", None) or re.sub(r" at 0x\w+", "", repr(content))
        return name.encode()
