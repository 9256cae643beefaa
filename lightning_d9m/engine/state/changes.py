"""Values that objects did not hold at first, as plain data for a checkpoint."""

import enum
import os
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_d9m.engine.state.object_digest import (
    digest_data,
    digest_saved,
    digest_together,
)
from lightning_d9m.engine.state.parts import (
    ARRAY,
    ATTRIBUTES,
    CODE,
    DICT,
    GENERATOR,
    ITEMS,
    LONG,
    MISSING,
    OBJECTS,
    OPAQUE,
    PLAIN_TYPES,
    SET,
    TENSOR,
    VARIABLES,
    WEAK,
    Dict,
    Holder,
    Kind,
    Unreadable,
    are_same,
    find_kind,
    holds_objects,
    is_address,
    leaves_out,
    list_fields,
    list_items,
    make_record,
    read_memory,
)
from lightning_d9m.engine.state.plain_data import (
    DICTS,
    decode_plain,
    encode_plain,
    join_dict,
    split_dict,
)
from lightning_d9m.engine.state.state import LeaveOut, Node, Watch, holds_data
from lightning_d9m.errors import RanksDisagreeError, SettingError

# Objects in a longer container are compared together, without a node for each.
_MOST_NODES = 1000
# Of the changes that are encoded, and of each, about: a cache may be larger than the model. An
# average of the weights usually is, and is in the checkpoint already, from the callback's
# ``state_dict``.
_MOST_BYTES, _ALWAYS_BYTES = 2**24, 2**12
_KEYS = (str, int, float, complex, bytes, tuple, np.generic, type(None), enum.Enum)
# Ends the path of an object that has changed, which another may have replaced meanwhile.
_AT_FIRST = "'"
_PLAIN = {*PLAIN_TYPES, list, tuple, dict, set, deque, type(Path())}
_CONTAINERS = {list, tuple, dict, set, frozenset, deque, *DICTS.values()}
_HOLDERS = (ITEMS, DICT, SET, LONG, OBJECTS)
_HELD = (*_HOLDERS, TENSOR, ARRAY, GENERATOR)
_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (
        *(np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox),
        np.random.SFC64,
    )
}
# Immutable values of the standard library, by the names of their types, and what they are made of.
# `Fraction` is missing: it would compute for minutes what a text of a file says.
_REDUCED = (date, datetime, time, timedelta, timezone, Decimal, range, slice)
_MADE_OF: dict[str, tuple[Any, Callable[[Any], Iterable[Any]]]] = {
    # The fourth protocol keeps the fold of a time.
    **{kind.__name__: (kind, lambda own: own.__reduce_ex__(4)[1]) for kind in _REDUCED},
    "frozenset": (frozenset, lambda own: [_list_in_order(own)]),
    "UUID": (UUID, lambda own: [own.hex]),
}
_MALFORMED = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError)


class Change(NamedTuple):
    """A part of a holder, or all that an object holds (without a key), that has changed.

    Attributes:
        path: Where it is, as a program writes it.
        node: The holder or the object.
        key: The name of the part, in a tuple; empty for the object itself.
        value: What it holds now; ``MISSING`` if the part is gone.
        first: What the part was at first.
    """

    path: str
    node: Node
    key: tuple[Any, ...]
    value: Any
    first: Any = None


class Changes:
    """The values that the owners and the objects in them did not hold at first.

    Args:
        owners: Objects by name, which are entered whatever their type.
        leave_out: See ``walk``. What it returns True for is not looked at, now and later.
        hide: Returns the attributes of an object that are not looked at.
        copies: Keep copies of what changes, so that ``undo`` can restore it, and encode it whatever
            its size.
        namespaces: See ``walk``.
        expects: ``capture`` keeps the digest of what has changed and cannot be encoded, so that
            ``restore`` can tell whether the program has restored it itself.

    Attributes:
        filled: The paths of what the last ``capture`` could not encode, and that was put in empty
            places.
        unknown: The paths of what the last ``capture`` could not read.
        expected: The paths of what the last ``capture`` took a digest of, or could not encode among
            the attributes of tensors, which mostly hold what a step computes.
        replaced: The objects that are left out, and that the last ``capture`` found in the place of
            others: the path, the object, and whether the place was empty.
        unlike: The paths of what the last ``restore`` found to be other than it was.
        has_settled: Whether ``settle`` was called.
    """

    def __init__(
        self,
        owners: Mapping[str, object],
        *,
        leave_out: LeaveOut,
        hide: Callable[[object], Collection[str]] = lambda _: (),
        copies: bool = False,
        namespaces: bool = False,
        expects: bool = False,
    ) -> None:
        self._ignored: set[int] = set()
        self._hide = hide
        # Of new objects that several places hold: first a number, then the plain form, by identity;
        # and those that are made again.
        self._shared: dict[int, Any] = {}
        self._made: dict[tuple[str, int], Any] = {}
        self._path, self._code = "", set[int]()
        # The object whose content is encoded, not its path, and whether its type may be lost.
        self._entered: tuple[object, bool] = (None, False)
        self._device = torch.device("cpu")
        self._copies = copies
        self._expects = expects
        self.has_settled = False
        self.filled: set[str] = set()
        self.unknown: list[str] = []
        self.replaced: list[tuple[str, object, bool]] = []
        self.expected: list[str] = []
        self.unlike: list[str] = []
        # A node for each of 100,000 transitions of a replay buffer would take longer than a step.
        together = Kind(partial(digest_together, leave_out=leave_out), compare=are_same)

        def ignore(path: str, value: object) -> bool:
            found = leave_out(path, value)
            # The id of a freed object may be that of another now.
            (self._ignored.add if found else self._ignored.discard)(id(value))
            return found or (not copies and _is_long(value))

        def choose(_path: str, value: Any, kind: Kind) -> Kind:
            if id(value) in self._ignored:
                return _SAVED if isinstance(value, Optimizer) else _IGNORED
            if copies:
                return kind
            if kind in (OPAQUE, LONG) and (_is_long(value) or isinstance(value, set)):
                return together
            return _DIGESTED if kind in (TENSOR, ARRAY) else kind

        self._leave_out = ignore
        self._watch = Watch(owners, leave_out=ignore, choose=choose, namespaces=namespaces)

    def __deepcopy__(self, memo: dict[int, object]) -> "Changes":
        """Return this object: the program may copy a Trainer or loader, whose parts it watches."""
        return self

    def settle(self) -> None:
        """Take objects that were made or replaced since as held at first, but no plain values.

        Data in them count as changed, as they may be made of the weights, which have other values
        when the fit resumes. Only the first call does so.
        """
        if self.has_settled:
            return
        self.has_settled = True
        known = {*self._watch.nodes}
        for node in self._watch.find_changed():
            now = node.kind.read(node.owner)
            if isinstance(node.kind, Dict):
                parts = [change._replace(key=("",)) for change in self._find_parts(node)]
                held = {id(part.value) for part in parts if self._encode_change(part) is None}
                held |= self._ignored
                now = node.content | {key: own for key, own in now.items() if id(own) in held}
            elif node.kind is not OPAQUE and self._encode_change(Change("", node, (), node.owner)):
                continue
            self._watch.set_content(node, now)
        self._watch.add_data()
        for place in self._watch.nodes.keys() - known if self._expects else ():
            node = self._watch.nodes[place]
            if node.kind is _DIGESTED:
                node.content = ()
            elif node.kind in (ATTRIBUTES, DICT):
                node.content = {key: own for key, own in node.content.items() if _is_kept(own)}

    def ignore(self, values: Iterable[object]) -> None:
        """Look at objects no more, nor at what was found in them."""
        for value in values:
            first = self._watch.nodes.get(id(value))
            if first is None or first.kind is _IGNORED:
                continue
            inner = (f"{first.path}.", f"{first.path}[")
            for node in self._watch.nodes.values():
                if node is first or node.path.startswith(inner):
                    node.kind = _IGNORED

    def capture(self) -> tuple[dict[str, bytes], list[str]]:
        """Return what has changed, encoded, by path; and the paths of what cannot be encoded.

        What cannot be read is in neither. Generators count as changed, as they may have been seeded
        otherwise at first.
        """
        self.unknown, self.expected, self.replaced = [], [], []
        # Last, so that nothing else lacks room because of them.
        changes = sorted(self._find_all(), key=self._is_of_tensor)
        found: dict[str, bytes] = {}
        unsaved: list[str] = []
        self.filled.clear()
        if not self._copies:  # which are restored one by one
            self._find_shared(changes)
        size = 0
        for change in changes:
            name = change.path.removesuffix(_AT_FIRST)
            if _is_filled(change):
                self.filled.add(name)
            is_unreadable = _is_unreadable(change)
            data = None if is_unreadable else self._encode_change(change, size)
            if data is None and self._is_of_tensor(change):
                self.expected.append(name)
            elif is_unreadable:
                self.unknown += [] if self._is_left_out(change) else [name]
            elif data is None:
                digest = digest_saved(change.value) if self._expects else None
                if digest is None or not all(map(self._is_key, change.key)):
                    unsaved.append(name)
                else:
                    self.expected.append(name)
                    found[change.path] = self._encode(change, _Digest(digest))
            else:
                found[change.path] = data
                size += len(data)
        self._shared.clear()
        return found, unsaved

    def find_first(self) -> str | None:
        """Return the path of the first change; None without one.

        What fills an empty place counts from then on as held at first, and so does what is left of
        a dict that loses entries, as a cache does.
        """
        for change in self._find_all():
            is_removed = change.value is MISSING and isinstance(change.node.owner, dict)
            is_removed |= _is_unreadable(change) and not hasattr(change.value, "__next__")
            if not (is_removed or _is_filled(change) or self._is_of_tensor(change)):
                return change.path.removesuffix(_AT_FIRST)
            node = self._watch.nodes[id(change.node.owner)]
            self._watch.set_content(node, node.kind.read(node.owner))
        return None

    def restore(self, captured: Mapping[str, bytes], device: torch.device) -> list[str]:
        """Write what was captured into objects that were made in the same way.

        Returns:
            The paths for which there is no object.
        """
        missing, entries = list[str](), []
        self._made.clear()
        self.unlike, self._device = [], device
        for path, data in captured.items():
            try:
                place, key, *value = decode_plain(data, device, self._make)
                (made,) = value or [MISSING]
                entries.append((path, self._watch.paths[place], [*key], made))
            except (*_MALFORMED, RanksDisagreeError):
                missing.append(path)
        # First what objects hold, then the objects that replace others, and then what is compared:
        # a path leads to the object that was there at first until another takes its place.
        order = sorted(entries, key=lambda entry: (isinstance(entry[3], _Digest), bool(entry[2])))
        for path, node, key, made in order:
            try:
                if isinstance(made, _Digest):
                    kind: Any = node.kind
                    now = kind.read(node.owner).get(*key, MISSING) if key else node.owner
                    self.unlike += [] if digest_saved(now) == made else [path]
                else:
                    self._write(node, key, made)
            except _MALFORMED:
                missing.append(path)
        return [path.removesuffix(_AT_FIRST) for path in missing]

    def _write(self, node: Node, key: list[Any], made: Any) -> None:
        """Write data to where ``capture`` finds data, and code only to a holder of that code.

        The checkpoint names the place and the value, and anybody may have written it.

        Raises:
            TypeError: If ``capture`` finds nothing there, or the value is of another type.
        """
        node, own = self._open(node), find_kind(node.owner)
        code = {id(part) for part in _list_deep(made) if isinstance(part, CODE)}
        # Such as `sys.path`, which a program may import.
        interpreter = map(id, (*vars(sys).values(), *vars(os.environ).values()))
        wrong = node.kind is _IGNORED or id(node.owner) in interpreter
        wrong = wrong or bool(code - _list_identities(node, key))
        if key and not wrong and isinstance(node.kind, Dict):
            (name,) = key
            holder = self._watch.paths.get(node.path.removesuffix(".data"))
            if isinstance(name, weakref.ref) and holder is not None:
                # It makes the references by whose calls it drops its entries.
                node, name = replace(holder, kind=WEAK), name()
            kind: Any = node.kind
            if kind.takes(node.owner, name) and name not in self._hide(node.owner):
                node.set_part(name, made)
                return
        elif not (key or wrong) and own in _HELD and _have_same_form(node.owner, made):
            own.write(node.owner, own.read(made))
            return
        raise TypeError(node.path)

    def undo(self, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
        """Restore what differs between two captures, unless it has changed since.

        Generators are restored in any case, because nothing but their owner uses them.
        """
        now, _ = self.capture()
        differing = {path for path in before.keys() | after if before.get(path) != after.get(path)}
        for change in list(self._find_all()):
            path, node = change.path, change.node
            own = path in differing and now.get(path) == after.get(path)
            if path in before and (own or node.kind is GENERATOR):
                self.restore({path: before[path]}, torch.device("cpu"))
            elif own and change.key:
                node.set_part(change.key[0], change.first)
            elif own:
                node.kind.write(node.owner, node.content)

    def _find_all(self) -> Iterator[Change]:
        """Yield what has changed, and all generators."""
        while successors := self._find_successors(changed := self._watch.find_changed()):
            self._watch.replace(successors)
        known = set(map(id, changed))
        for node in self._watch.nodes.values():
            if node.kind is GENERATOR and id(node) not in known:
                changed.append(node)
        for node in changed:
            holder, _, name = node.path.rpartition(".")
            held = self._watch.paths.get(holder)
            now = node.owner if held is None else getattr(held.owner, name, node.owner)
            if now is not node.owner and held is not None and held.kind is OPAQUE:
                continue  # a library has replaced it, which changes the holder
            own = self._open(node)
            if own.kind is OPAQUE:
                yield Change(node.path, node, (), node.owner)
            elif isinstance(own.kind, Dict):
                yield from self._find_parts(own)
            elif not (isinstance(node.owner, tuple) and node.kind is ITEMS):
                yield Change(f"{node.path}{_AT_FIRST}", node, (), node.owner)

    def _list_holders(self, change: Change) -> Iterator[tuple[Any, str]]:
        """Yield the objects on the way to a change, the last first, and the name of its part."""
        path = change.node.path
        while path:
            path, _, name = path.rpartition(".")
            if (held := self._watch.paths.get(path)) is not None:
                yield held.owner, name.partition("[")[0]  # of an entry of a cache that of the cache

    def _is_left_out(self, change: Change) -> bool:
        """Return whether the holder of a change says, where it pickles, that it is not state."""
        return any(leaves_out(owner, name) for owner, name in self._list_holders(change))

    def _open(self, node: Node) -> Node:
        """Return an object of a library as one of the program's, if all in it can be put back.

        It then has the same attributes as at first, and they hold data, and objects that are
        watched themselves, such as the module that it serves.
        """
        if node.kind is not OPAQUE or hasattr(node.owner, "load_state_dict"):
            return node  # what says its state should be saved by that
        parts, nodes = OPAQUE.read(node.owner), self._watch.nodes
        known = getattr(node.owner, "__dict__", {}).keys() >= parts.keys() == node.content.keys()
        opens = known and all(
            holds_data(own) or (id(own) in nodes and nodes[id(own)].kind is not OPAQUE)
            for own in parts.values()
        )
        return replace(node, kind=ATTRIBUTES) if opens else node

    def _find_successors(self, changed: Iterable[Node]) -> dict[int, Any]:
        """Find the new objects that have taken the places of those that were there at first.

        A program that makes an object again in each step has one with other values, and a resumed
        run writes these to its first one. That has the same class, and nothing holds it any more.
        """
        nodes, found = self._watch.nodes, dict[int, Any]()
        holders = [own for own in changed if isinstance(own.kind, Dict) and not self._copies]
        for node in holders:
            for path, key, first, part in node.find_parts():
                held, kind = nodes.get(id(first)), find_kind(part)
                alike = held is not None and held.kind is kind and type(part) is type(first)
                own = alike and kind in (ATTRIBUTES, VARIABLES) and id(part) not in nodes
                saves = isinstance(part, (type, nn.Module, Optimizer, LRScheduler))
                hidden = key in self._hide(node.owner)
                if own and not (saves or hidden or self._leave_out(path, part)):
                    found.setdefault(id(first), part)
        if len({*map(id, found.values())}) < len(found):
            return {}  # one object in the places of two
        reached = self._watch.list_reached() if found else set()
        return {first: part for first, part in found.items() if first not in reached}

    def _is_of_tensor(self, change: Change) -> bool:
        """Return whether an attribute of a tensor holds what has changed."""
        return any(isinstance(owner, torch.Tensor) for owner, _ in self._list_holders(change))

    def _find_parts(self, node: Node) -> Iterator[Change]:
        hidden = self._hide(node.owner)
        for path, key, first, part in node.find_parts():
            if key in hidden:
                continue
            if find_kind(part) is not None:
                self._leave_out(path, part)
            if find_kind(part) is None or id(part) not in self._ignored:
                yield Change(path, node, (key,), part, first)
            else:
                self.replaced.append((path, part, first is None or first is MISSING))

    def _encode_change(self, change: Change, size: int = 0) -> bytes | None:
        """Return place, key and value of a change as bytes; None if they are large or not plain.

        ``size`` is that of the changes that were encoded before.
        """
        value = change.value
        self._path, self._code = change.path, _list_identities(change.node, change.key)
        kind: Any = change.node.kind
        if change.key and not kind.takes(change.node.owner, *change.key):
            return None
        if not change.key and isinstance(value, tuple):  # a long one, of containers
            return None
        with suppress(SettingError, TypeError, RecursionError):
            if value is MISSING:
                return self._encode(change)
            # Small values are kept whatever others take, so that the order does not decide.
            if self._copies or _fits(value, max(_MOST_BYTES - size, _ALWAYS_BYTES)):
                self._entered = (None, False) if change.key else (value, True)
                return self._encode(change, value)
        return None

    def _encode(self, change: Change, *value: object) -> bytes:
        """Return place and key of a change, and its value, as bytes.

        Raises:
            TypeError: If another process has no such key, or the value has no form.
        """
        if not all(map(self._is_key, change.key)):
            raise TypeError(change.key)
        return encode_plain([change.node.path, list(change.key), *value], self._find_form)

    def _is_key(self, key: Any) -> bool:
        """Return whether a dict of another process has this key, and not an address."""
        owner = key() if isinstance(key, weakref.ref) else key
        refers = owner is not key and id(owner) in self._watch.nodes and not isinstance(owner, CODE)
        return refers or (
            isinstance(key, _KEYS) and not (is_address(key) and key in self._watch.nodes)
        )

    def _is_record(self, value: Any) -> bool:
        """Return whether an object is a named tuple or a dataclass with just its fields."""
        kind = type(value)
        if id(kind) not in self._watch.nodes or (names := list_fields(kind)) is None:
            return False
        held = getattr(value, "__dict__", {}).keys() <= {*names}
        return held and all(hasattr(value, name) for name in names)

    def _find_shared(self, changes: Iterable[Change]) -> None:
        """Number the new objects that several places hold."""
        seen: set[int] = set()
        pending: list[Any] = []
        for change in changes:
            whole = not change.key and find_kind(change.value) in _HOLDERS
            pending += _list_parts(change.value) if whole else [change.value]
        while pending:
            value = pending.pop()
            kind = find_kind(value)
            if id(value) in seen:
                self._shared.setdefault(id(value), len(self._shared))
            elif id(value) not in self._watch.nodes and (kind in _HELD or self._is_record(value)):
                if not isinstance(value, tuple):
                    seen.add(id(value))
                if kind in (*_HOLDERS, ATTRIBUTES):
                    pending += [
                        part for part in _list_parts(value) if type(part) not in PLAIN_TYPES
                    ]

    def _find_form(self, value: Any) -> tuple[str, Any] | None:
        """Return the name and the content of the form of an object; None for one that is plain.

        Objects that were there at first have paths.

        Raises:
            TypeError: If it has no form.
        """
        entered, whole = self._entered
        if is_entered := value is entered:
            self._entered = None, False
        kind: Any = find_kind(value)
        if isinstance(value, CODE) and id(value) not in self._code:
            raise TypeError(value)
        if not is_entered and kind is not OPAQUE and id(value) in self._watch.nodes:
            return "known", self._watch.nodes[id(value)].path
        if type(value) is weakref.ref and id(value()) in self._watch.nodes:
            return "weak", value()
        if not is_entered and id(value) in self._shared:
            return "shared", self._share(value)
        if self._is_record(value):
            parts = [getattr(value, name) for name in list_fields(type(value)) or ()]
            return "record", [self._watch.nodes[id(type(value))].path, parts]
        if type(value) in DICTS.values() and not (is_entered and whole):
            if not all(map(self._is_key, value)):
                raise TypeError(value)
            return "subclass", split_dict(value)
        if (form := _find_own_form(value)) is None:
            self._check_plain(value, whole=is_entered and whole)
        return form

    def _check_plain(self, value: Any, *, whole: bool) -> None:
        """Raise a ``TypeError`` if an object is not plain data."""
        kind = find_kind(value)
        plain = type(value) in _PLAIN or kind in (TENSOR, ARRAY) or isinstance(value, np.generic)
        # What an object holds has a form whatever its type.
        if kind is OPAQUE or not (whole or (plain and not isinstance(value, nn.Parameter))):
            raise TypeError(value)
        keys = value if isinstance(value, dict) else ()
        # The items of a set are encoded without forms.
        items = [part for item in value for part in _list_deep(item)] if kind is SET else ()
        if not all(map(self._is_key, keys)) or not all(map(_is_item, items)):
            raise TypeError(value)

    def _share(self, value: Any) -> list[Any]:
        """Return the form of a new object that several places hold: its first place, and bytes."""
        if isinstance(number := self._shared[id(value)], int):
            self._shared[id(value)] = None  # within itself it has no form
            self._entered = value, False
            data = encode_plain(value, self._find_form)
            self._shared[id(value)] = [self._path, number, data]
        return [*self._shared[id(value)]]

    def _make(self, name: str, content: Any) -> Any:
        """Return the object of a form; the file may name what is not there, and what is not data.

        Raises:
            Exception: Any of ``_MALFORMED``.
        """
        match name, content:
            case "known", path:
                return self._watch.paths[path].owner
            case "weak", owner:
                return weakref.ref(owner)
            case "shared", [path, number, data]:
                if (path, number) not in self._made:
                    self._made[path, number] = decode_plain(data, self._device, self._make)
                return self._made[path, number]
            case "record", [path, [*values]]:
                kind = self._watch.paths[path].owner
                fields = list_fields(kind) if isinstance(kind, type) else None
                if fields is None or len(fields) != len(values):  # not a record, or of others
                    raise TypeError(path)
                if _holds_code(values):
                    raise TypeError(values)
                return make_record(kind, values)
        return _make_new(name, content)


def _make_new(name: str, content: Any) -> Any:
    """Return the object of a form that refers to no other object."""
    match name, content:
        case "generator", [[kind, name], state]:
            found = _make_generator(kind, name)
            GENERATOR.write(found, state)
            return found
        case "enum", [[module, name], member]:
            return _find_enum(module, name)[member]
        case "value", [kind, [*parts]]:
            return _MADE_OF[kind][0](*parts)
        case "digest", str():
            return _Digest(content)
        case "subclass", [kind, factory, [*pairs], {**own}] if not _holds_code([pairs, own]):
            return join_dict(DICTS[kind], factory, pairs, own)
        case "objects", [shape, [*items]] if not _holds_code(items):
            array = np.empty(len(items), object)
            OBJECTS.write(array, (OBJECTS.read(array)[0], *items))
            return array.reshape(shape)
    raise ValueError(name)


def _holds_code(value: Any) -> bool:
    return any(isinstance(part, CODE) for part in _list_deep(value))


class _Digest(str):
    """The digest of a value that has no plain form, which the program must restore itself."""

    __slots__ = ()


def _find_own_form(value: Any) -> tuple[str, Any] | None:
    """Return the form of an object that is not plain data, and of which a new one can be made."""
    if find_kind(value) is GENERATOR:
        return "generator", [_name_generator(value), GENERATOR.read(value)]
    if isinstance(value, enum.Enum):
        return "enum", [[type(value).__module__, type(value).__qualname__], value.name]
    kind, read = _MADE_OF.get(type(value).__name__, (None, iter))
    if kind is type(value):
        return "value", [kind.__name__, [*read(value)]]
    if find_kind(value) is OBJECTS and value.dtype == object:
        if _holds_code(list_items(value)):
            raise TypeError(value)
        return "objects", [[*value.shape], list_items(value)]
    return ("digest", f"{value}") if isinstance(value, _Digest) else None


def _list_in_order(own: frozenset[Any]) -> list[Any]:
    """Return the items, if a new set of them is iterated in the same order.

    Raises:
        TypeError: If it is not.
    """
    if [*frozenset([*own])] != [*own] or not all(map(_is_item, own)):
        raise TypeError(own)
    return [*own]


def _list_parts(container: Any) -> Collection[Any]:
    if isinstance(container, list | tuple | dict | set | frozenset | deque | np.ndarray):
        return list_items(container)
    return [getattr(container, name) for name in list_fields(type(container)) or ()]


def _list_identities(node: Node, key: Collection[Any]) -> set[int]:
    """Return the identities of what a list or dict held at first, if it is written as a whole."""
    whole = isinstance(node.kind, Holder) and not key
    return {*map(id, _list_parts(node.content))} if whole else set()


def _list_deep(value: Any) -> Iterator[Any]:
    """Yield a value and all parts of the builtin containers and arrays in it, each one once."""
    pending, seen = [value], set[int]()
    while pending:
        yield (part := pending.pop())
        holds = type(part) in _CONTAINERS or (type(part) is np.ndarray and part.dtype.hasobject)
        if holds and id(part) not in seen:
            seen.add(id(part))
            pending += _list_parts(part)


def _is_kept(part: Any) -> bool:
    return type(part) not in (float, complex)


def _is_item(part: Any) -> bool:
    return type(part) in (*PLAIN_TYPES, tuple) or isinstance(part, np.generic)


def _have_same_form(owner: Any, made: Any) -> bool:
    """Return whether one object can take what the other holds, which may be of a base class."""
    return made is not MISSING and isinstance(owner, type(made)) and find_kind(made) in _HELD


def _find_enum(module: str, name: str) -> Any:
    """Return the enum of a name, among all that there are: no name is looked up in a module."""
    kinds = [enum.Enum]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    # The last one, as a notebook defines it again.
    return [own for own in kinds if (own.__module__, own.__qualname__) == (module, name)][-1]


# Data of which a digest is kept, so that they cannot be put back; what is left out; and an
# optimizer in another one, which should save its state and load it.
_DIGESTED = Kind(digest_data, compare=are_same)
_IGNORED = Kind(lambda _: None, compare=lambda _now, _content: True)
_SAVED = Kind(lambda own: digest_saved(own) or Unreadable())


def describe_unsaved(paths: Iterable[str]) -> list[str]:
    """Return why a checkpoint that lacks changes at these paths cannot be resumed exactly."""
    return [
        f"{path} changes in the fit, or may change unseen, and has no form that a checkpoint could "
        f"keep, or more than {_MOST_BYTES} bytes: keep numbers, texts, tensors, arrays, and "
        "containers of these (of hooks, which are code, a flag that they read), or return it from "
        "state_dict() of the callback, the module or the optimizer."
        for path in paths
    ]


def _is_long(value: Any) -> bool:
    """Return whether a container holds so many objects that they have no node each."""
    kind = find_kind(value)
    if kind is OBJECTS:
        return value.size > _MOST_NODES and holds_objects(value.flat)
    return kind in (ITEMS, DICT, LONG) and len(value) > _MOST_NODES and holds_objects(value)


def _is_unreadable(change: Change) -> bool:
    """Return whether nothing tells if an object has changed.

    That is also so of an iterator that the fit has made: it may be made again before it is used.
    """
    value = change.value
    if find_kind(value) is not OPAQUE or (change.key and hasattr(type(value), "__next__")):
        return find_kind(value) is OPAQUE or isinstance(value, Unreadable)
    found = OPAQUE.read(value)
    known = [
        [own for own in content.values() if not isinstance(own, Unreadable)]
        for content in (found, change.node.content if change.node.kind is OPAQUE else found)
    ]
    return len(known[0]) < len(found) and are_same(*map(tuple, known))


def _is_filled(change: Change) -> bool:
    """Return whether a value was put in a place that was empty, as a cache does."""
    kind = find_kind(change.value)
    if change.key:
        was_empty = change.first is None or change.first is MISSING
        return was_empty and change.value is not MISSING
    if kind not in (ITEMS, LONG, OBJECTS) or isinstance(change.value, dict):
        return False
    first, now = change.node.content, change.value
    if kind is OBJECTS:
        now = OBJECTS.read(now)  # its shape, too
    return len(first) == len(now) and all(
        one is other or one is None for one, other in zip(first, now, strict=True)
    )


def _fits(value: Any, most: int) -> bool:
    """Return whether a value has at most so many bytes."""
    sizes = (
        sum(own.nbytes for own in read_memory(part))
        if find_kind(part) in (TENSOR, ARRAY)
        else sys.getsizeof(part)
        for part in _list_deep(value)
    )
    return all(size <= most for size in accumulate(sizes))


def _name_generator(generator: Any) -> list[str]:
    if isinstance(generator, torch.Generator):
        return ["torch", str(generator.device)]
    if isinstance(generator, np.random.Generator):
        return ["numpy", type(generator.bit_generator).__name__]
    return ["legacy" if isinstance(generator, np.random.RandomState) else "python", ""]


def _make_generator(kind: str, name: str) -> Any:
    if kind == "torch":
        return torch.Generator(torch.device(name))
    if kind == "numpy":
        return np.random.Generator(_BIT_GENERATORS[name]())
    return np.random.RandomState() if kind == "legacy" else random.Random()  # noqa: S311 - its state is set
