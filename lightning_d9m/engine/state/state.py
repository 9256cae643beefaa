"""A walk through all that objects hold, its digest, and its changes, found without copies."""

import gc
import types
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from lightning_d9m.engine.state.parts import (
    ARRAY,
    ATTRIBUTES,
    DICT,
    FUNCTION,
    GENERATOR,
    ITEMS,
    MISSING,
    OBJECTS,
    OPAQUE,
    PARTIAL,
    PLAIN_TYPES,
    SET,
    TABLE,
    TABLES,
    TENSOR,
    VARIABLES,
    Dict,
    Holder,
    Kind,
    are_equal,
    find_kind,
    find_owner,
    has_memory,
    has_writable_bytes,
    holds_objects,
    list_hooks,
    list_items,
    name_namespace,
    name_namespaces,
    read_memory_of,
)
from lightning_d9m.program import LIGHTNING

LeaveOut = Callable[[str, object], bool]


@dataclass(slots=True, eq=False)
class Node:
    """An object that can change, where it was found first, and what it held.

    Attributes:
        path: The names on the way to it, as a program writes them.
        owner: The object.
        kind: How it is read and put back.
        content: What it held; a copy for data.
        sign: The sign of its kind when it held that.
    """

    path: str
    owner: Any
    kind: Kind
    content: Any = None
    sign: object = None

    def set_part(self, key: Any, value: Any) -> None:
        """Set what a dict or an object holds under a key now; ``MISSING`` removes it."""
        kind: Any = self.kind
        if value is not MISSING or key in kind.read(self.owner):
            kind.set_part(self.owner, key, value)

    def find_parts(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield path, key, first and present value of each part that is another one now."""
        kind: Any = self.kind
        before, now = self.content, kind.read(self.owner)
        new = ((place, key) for place, key in enumerate(now) if key not in before)
        for place, key in (*enumerate(before), *new):
            part, first = now.get(key, MISSING), before.get(key, MISSING)
            # A method of the class, which a wrapper has put back.
            own = isinstance(part, MethodType) and part.__self__ is self.owner and first is MISSING
            if part is first or (own and part.__func__ is getattr(type(self.owner), key, None)):
                continue
            if find_kind(part) is not None or not are_equal(part, first):
                yield name_part(self.path, kind, key, place), key, first, part


def walk(  # noqa: C901 - one loop, and what it keeps
    owners: Mapping[str, object],
    leave_out: LeaveOut | None = None,
    *,
    known: Container[int] = (),
    enter_owners: bool = False,
    namespaces: bool = False,
) -> Iterator[tuple[str, object, Kind | None]]:
    """Yield every object that can be reached from the owners: its path, itself and its kind.

    An object that is reached by several paths is entered at the first. The kind is None for a
    value that is only replaced as a whole, and for an object that was yielded before. Objects of
    libraries are yielded as opaque, as is what ``leave_out`` returns True for; of what those of
    libraries hold, only data are yielded, after all else (see ``find_data``).

    Args:
        owners: Objects by name; of a class or a source file its variables.
        leave_out: Called with the path and each object that can change.
        known: The identities of objects that are not entered again.
        enter_owners: Enter the owners themselves whatever their type.
        namespaces: Enter the classes of objects, and the files of classes and functions, too.
    """
    # A stack, not recursion: a linked list of a program is deeper than Python's stack.
    seen: dict[int, object] = {}  # the id of a freed object may become that of another
    entered = set(map(id, owners.values())) if enter_owners else ()
    stack: list[tuple[str, Any, Kind | None]] = [
        (name, owner, VARIABLES if isinstance(owner, type | types.ModuleType) else None)
        for name, owner in reversed(list(owners.items()))
    ]
    closed: dict[str, object] = {}
    used: dict[str, Any] = {}
    while stack or closed or used:
        if not stack:
            stack, used = [(name, own, VARIABLES) for name, own in reversed(used.items())], {}
        if not stack:
            # Last, so that data which the program holds, too, has the program's path.
            found, closed = dict(find_data(closed)), {}
            new = ((path, own) for path, own in found.items() if id(own) not in known)
            stack += [(path, own, None) for path, own in new if id(own) not in seen]
            continue
        path, value, kind = stack.pop()
        if type(value) in PLAIN_TYPES:  # most of what is found: a list of indices has a thousand
            yield path, value, None
            continue
        kind = kind or find_kind(value)
        if kind is VARIABLES and path not in owners:
            path = name_namespace(value)
        if kind is OPAQUE and id(value) in entered:
            kind = ATTRIBUTES
        elsewhere = id(value) in entered and path not in owners  # it is entered by its own name
        if kind is None or elsewhere or id(value) in seen or id(value) in known:
            yield path, value, None
            if find_owner(value) is not None and id(value) not in seen:
                seen[id(value)] = value
                stack += _list_held(path, value, kind)
            continue
        seen[id(value)] = value
        if leave_out is not None and leave_out(path, value):
            yield path, value, OPAQUE
            if isinstance(value, Tensor):  # whose values another state has, and not its attributes
                stack.append((f"{path}.__dict__", vars(value), TABLE))
            continue
        yield path, value, kind
        if kind is OPAQUE:
            closed[path] = value
        elif namespaces and kind in (ATTRIBUTES, FUNCTION, VARIABLES):
            found = name_namespaces(value)
            used |= {name: own for name, own in found.items() if id(own) not in seen}
        stack += _list_held(path, value, kind)


def _list_held(
    path: str, value: Any, kind: Kind | None
) -> Iterator[tuple[str, object, Kind | None]]:
    """Yield path, object and kind of what an object holds, the last first; None is found later."""
    # Of a subclass of a container, or of a tensor.
    if kind in (ITEMS, DICT, SET, TENSOR) and hasattr(value, "__dict__"):
        yield f"{path}.__dict__", vars(value), TABLE
    if isinstance(value, nn.Module):  # what their code keeps
        hooks = [hook for table in list_hooks(value) for hook in table.values()]
        for place, hook in enumerate(hooks):
            yield f"{path}.hooks()[{place}]", hook, None
    if isinstance(kind, Holder):
        for place, (key, part) in reversed([*enumerate(_list_pairs(kind.read(value)))]):
            is_table = key in TABLES and isinstance(value, nn.Module)
            table = TABLE if is_table and isinstance(part, dict) else None
            yield name_part(path, kind, key, place), part, table
    elif find_owner(value) is not None:
        yield f"{path}.__self__", find_owner(value), None
        yield f"{path}.__func__", getattr(value, "__func__", None), None
    elif kind is OPAQUE:
        yield from _list_closed(path, value)


def _list_closed(path: str, value: Any) -> Iterator[tuple[str, object, Kind | None]]:
    """Yield the program's functions in an object of a library, and its objects in one in C."""
    entered: list[Kind] = [ATTRIBUTES, FUNCTION, PARTIAL]
    # The program's functions in objects of libraries, such as that of an `lru_cache`.
    for name, part in getattr(value, "__dict__", {}).items():
        if find_kind(part) in (FUNCTION, PARTIAL):
            yield f"{path}.{name}", part, None
    if not has_memory(value.__class__):
        return
    held = [*read_memory_of(value)]
    if type(value).__module__ == "builtins":  # these hold what the program has given them
        entered += ITEMS, DICT, SET, OBJECTS, TENSOR, ARRAY, GENERATOR
        # A dict of a class holds code, too.
        parts = gc.get_referents(value)
        held += [own for own in parts if type(own) is not dict or "__module__" not in own]
    for place, part in enumerate(held):
        if find_kind(part) in entered or find_owner(part) is not None:
            yield f"{path}[{place}]", part, None


def _list_pairs(content: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys or places and the parts of a holder."""
    return content.items() if isinstance(content, dict) else enumerate(content)


def name_part(path: str, kind: Holder, key: Any, place: int) -> str:
    """Return the path of a part of a holder; a module's parameters are named as its attributes."""
    if kind is TABLE:
        path = path.rpartition(".")[0]
    return (path + kind.name(key, place)).removeprefix(".")


# Objects of these packages have parts only if they are owners. Those of pandas hold data: a dozen
# objects for each table, which a logger or a dataset may have dozens of.
_FOREIGN = {*LIGHTNING, "pandas"}
_DATA = (TENSOR, ARRAY, OBJECTS)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_MOST_SEARCHED = 1000  # a longer list holds data


def search(
    owners: Mapping[str, object], *, depth: int = 8, most: int = 50_000
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the object of all that owners hold, each once, from the outside in.

    Generators, data, code and the modules in other objects are not entered.

    Args:
        owners: Objects by name.
        depth: The number of steps from an owner.
        most: The number of parts of objects that are looked at, besides those of owners.
    """
    seen: dict[int, object] = {}  # an object that was freed would give its id to another
    # From the outside in: a short path names an object better than a long one.
    waiting = deque((name, owner, 0) for name, owner in owners.items())
    while waiting and most > 0:
        path, value, level = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        parts = _list_parts(value, level) if level < depth else ()
        most -= len(parts) if level else 0
        held = ((f"{path}.{name}", part, level + 1) for name, part in parts)
        waiting.extend(own for own in held if find_kind(own[1]) is not None)


def find_generators(owners: Mapping[str, object]) -> dict[str, Any]:
    """Return the generators in attributes, lists and dicts of objects, by path."""
    found = search(owners)
    return {path: value for path, value in found if find_kind(value) is GENERATOR}


def find_data(closed: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the generators and data in objects of libraries, and their lists and dicts of data."""
    for path, value in search(closed):
        if find_kind(value) in (GENERATOR, *_DATA) or has_writable_bytes(value):
            yield path, value
    # A list of numbers or tensors has another kind than they have, so the loop above leaves it out.
    for path, owner in closed.items():
        for name, part in getattr(owner, "__dict__", {}).items():
            if isinstance(part, list | deque | dict) and holds_data(part):
                yield f"{path}.{name}", part


def holds_data(value: Any, depth: int = 4) -> bool:
    """Return whether a value is data, or a container of data, and of containers of them."""
    if find_kind(value) in (ITEMS, DICT) and depth:
        return all(holds_data(part, depth - 1) for part in list_items(value))
    return find_kind(value) in (None, *_DATA)


def _list_parts(value: Any, level: int) -> Collection[tuple[Any, Any]]:
    """Return the names and the parts of an object."""
    kind = find_kind(value)
    if kind in (ITEMS, DICT):
        is_data = len(value) > _MOST_SEARCHED or not holds_objects(value)
        return () if is_data else [*_list_pairs(value)]
    package = str(getattr(type(value), "__module__", "")).partition(".")[0]
    if kind not in (ATTRIBUTES, OPAQUE, PARTIAL, FUNCTION) or (package in _FOREIGN and level):
        return ()
    hidden = _MODULE_ATTRIBUTES if isinstance(value, nn.Module) else ()
    return [part for part in getattr(value, "__dict__", {}).items() if part[0] not in hidden]


def _read_version(owner: Tensor) -> object:
    return owner._version, owner.data_ptr()  # noqa: SLF001 - torch has no public counter


VERSIONED = Kind(_read_version, sign=_read_version)
"""A tensor whose values are not copied, so that it cannot be put back.

A change is found by torch's version and the place of the memory, as optimizers change it.
"""


class Watch:
    """Everything that the owners hold, brought up to date by ``refresh``.

    Holders are compared by the identities of their parts, and data by its bits.

    Args:
        owners: Objects by name, which are entered whatever their type.
        leave_out: See ``walk``.
        choose: Called with the path, each object and its kind; returns the kind to use.
        namespaces: See ``walk``.

    Attributes:
        nodes: Each object that can change, and what it held, by its identity.
        paths: The node that was found last at each path.
    """

    def __init__(
        self,
        owners: Mapping[str, object],
        *,
        leave_out: LeaveOut | None = None,
        choose: Callable[[str, Any, Kind], Kind] = lambda _path, _value, kind: kind,
        namespaces: bool = False,
    ) -> None:
        self.nodes: dict[int, Node] = {}
        self.paths: dict[str, Node] = {}
        self._owners = owners
        self._leave_out = leave_out
        self._choose = choose
        self._namespaces = namespaces
        self._walked = 0
        self._walk_all()

    def refresh(self, changed: Iterable[Node]) -> None:
        """Take what is held now as the state to which ``find_changed`` compares.

        ``changed`` is what that has just returned.
        """
        for node in changed:
            self._read(node)
            if isinstance(node.kind, Holder):
                self._enter(node)
        # As much again as was found: all walks together then take no longer than the additions.
        if len(self.nodes) > 2 * self._walked + 1000:
            self._walk_all()  # this drops objects that nothing holds any more

    def find_changed(self) -> list[Node]:
        """Return the nodes whose objects hold something else now."""
        changed = []
        for node in self.nodes.values():
            if node.kind is TABLE and not node.owner and not node.content:
                continue  # two of three tables of modules are empty
            # A sign is cheap to take and equal if nothing has changed; the content is only
            # compared otherwise.
            sign = node.kind.sign(node.owner)
            if sign is not None and sign == node.sign:
                continue
            if node.kind.matches(node.owner, node.content):
                if sign is not None:  # other objects of the same values
                    self._read(node)
            else:
                changed.append(node)
        return changed

    def add_data(self) -> None:
        """Add the data that objects of libraries have got since."""
        nodes = self.nodes.values()
        self._add(dict(find_data({own.path: own.owner for own in nodes if own.kind is OPAQUE})))

    def set_content(self, node: Node, content: Any) -> None:
        """Set what counts as held by an object, and enter what is new in it."""
        node.content, node.sign = content, None
        if isinstance(node.kind, Holder):
            self._enter(node)

    def list_reached(self) -> set[int]:
        """Return the identities of all objects that the owners lead to now."""
        found = walk(self._owners, self._leave_out, enter_owners=True, namespaces=self._namespaces)
        return {id(value) for _, value, _ in found}

    def replace(self, successors: Mapping[int, Any]) -> None:
        """Take other objects for those that were there at first, by the identities of these."""
        for node in [*self.nodes.values()]:
            if (owner := successors.get(id(node.owner))) is not None:
                self.nodes[id(owner)] = self.nodes.pop(id(node.owner))
                node.owner, node.sign = owner, None
            if isinstance(node.kind, Dict):
                pairs = node.content.items()
                node.content = {key: successors.get(id(own), own) for key, own in pairs}

    def _read(self, node: Node) -> None:
        node.content = node.kind.read(node.owner)
        node.sign = node.kind.sign(node.owner)

    def _walk_all(self) -> None:
        self.nodes.clear()
        self.paths.clear()
        self._add(self._owners, enter_owners=True)
        self._walked = len(self.nodes)

    def _enter(self, holder: Node) -> None:
        """Add the objects that a holder holds since it was read last."""
        kind: Any = holder.kind
        for place, (key, part) in enumerate(_list_pairs(holder.content)):
            enters = find_kind(part) is not None or find_owner(part) is not None
            if id(part) not in self.nodes and enters:
                self._add({name_part(holder.path, kind, key, place): part})

    def _add(self, owners: Mapping[str, object], *, enter_owners: bool = False) -> None:
        words = {"enter_owners": enter_owners, "namespaces": self._namespaces}
        found = walk(owners, self._leave_out, known=self.nodes, **words)
        for path, value, kind in found:
            if kind is not None:
                chosen = self._choose(path, value, kind)
                node = self.nodes[id(value)] = Node(path, value, chosen)
                self.paths[path] = node
                self._read(node)
