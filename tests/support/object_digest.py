"""The digest of all that a walk through a value finds, with which tests compare two values."""

import re
from collections import deque

import numpy as np
from xxhash import xxh3_128

from lightning_d9m.engine.state.parts import OPAQUE, TABLE, Holder, find_kind
from lightning_d9m.engine.state.plain_data import encode_plain
from lightning_d9m.engine.state.state import walk
from lightning_d9m.errors import SettingError


def digest_object(value):
    """Return 32 hex digits that are equal for equal values, whatever they hold.

    An opaque object counts with its type and place.
    """
    first, found = {}, {}
    for path, part, kind in walk({"": (value,)}):
        content = part
        if kind is not None:
            first[id(part)] = path
            content = kind.read(part)
            if kind is OPAQUE or isinstance(kind, Holder):
                content = len(part) if isinstance(part, list | tuple | deque | set) else None
        elif id(part) in first and find_kind(part) is not None:
            content = f"the same as {first[id(part)]}"
        if kind is not TABLE:
            found[path] = f"\0{type(part).__qualname__}\0".encode() + _encode(content)
    hasher = xxh3_128()
    for path, content in sorted(found.items()):
        hasher.update(path.encode() + content)
    return hasher.hexdigest()


def _encode(content):
    if isinstance(content, np.ndarray) and content.dtype.hasobject:
        return b"\0".join(map(_encode, (content.shape, *content.flat)))
    try:
        return encode_plain(content)
    except SettingError:
        if isinstance(content, frozenset):
            return b"\0".join(sorted(map(_encode, content)))
        # a function, a class, a dtype
        name = getattr(content, "__qualname__", None) or re.sub(r" at 0x\w+", "", repr(content))
        return str(name).encode()
