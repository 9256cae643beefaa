"""Changes of a state from one moment to the next, found without copying what stays."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_d9m.state.parts import OPAQUE, TABLE, Holder, Kind, find_kind
from lightning_d9m.state.state import Node, find_data, name_part, walk

LeaveOut = Callable[[str, object], bool]


class _Versioned(Kind):
    """A tensor whose values are not copied, so that it cannot be put back.

    A change is found by torch's version and the place of the memory, as optimizers change it.
    """

    def read(self, owner: Tensor) -> Any:
        return self.sign(owner)

    def sign(self, owner: Tensor) -> Any:
        return owner._version, owner.data_ptr()  # noqa: SLF001 - torch has no public counter


VERSIONED = _Versioned()


class Watch:
    """Everything that the owners hold, brought up to date by ``refresh``.

    Holders are compared by the identities of their parts, and data by its bits.

    Args:
        owners: Objects by name.
        leave_out: See ``walk``.
        choose: Called with the path, each object and its kind; returns the kind to use.
        enter_owners: See ``walk``.

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
        enter_owners: bool = False,
    ) -> None:
        self.nodes: dict[int, Node] = {}
        self.paths: dict[str, Node] = {}
        self._owners = owners
        self._leave_out = leave_out
        self._choose = choose
        self._enter_owners = enter_owners
        self._signs: dict[int, object] = {}
        self._walked = 0
        self._walk_all()

    def refresh(self) -> None:
        """Take what is held now as the state to which ``find_changed`` compares."""
        for node in self.find_changed():
            self._read(node)
            if isinstance(node.kind, Holder):
                self._enter(node)
        if len(self.nodes) > 2 * self._walked + 1000:
            self._walk_all()  # without the objects that are no longer held

    def find_changed(self) -> list[Node]:
        """Return the nodes whose objects hold something else now."""
        changed = []
        signs = self._signs
        for key, node in self.nodes.items():
            if node.kind is TABLE and not node.owner and not node.content.parts:
                continue  # two of three tables of modules are empty
            sign = node.kind.sign(node.owner)
            if sign is not None and sign == signs[key]:
                continue
            if node.kind.matches(node.owner, node.content):
                if sign is not None:  # other objects of the same values
                    self._read(node)
            else:
                changed.append(node)
        return changed

    def restore(self) -> None:
        """Put everything back; the objects stay the same ones, as others may hold them too."""
        for node in self.nodes.values():
            node.kind.write(node.owner, node.content)

    def add_data(self) -> None:
        """Add the data that objects of libraries have got since."""
        nodes = self.nodes.values()
        self._add(dict(find_data({own.path: own.owner for own in nodes if own.kind is OPAQUE})))

    def set_content(self, node: Node, content: Any) -> None:
        """Set what counts as held by an object, and enter what is new in it."""
        node.content = content
        self._signs[id(node.owner)] = None
        if isinstance(node.kind, Holder):
            self._enter(node)

    def _read(self, node: Node) -> None:
        node.content = node.kind.read(node.owner)
        self._signs[id(node.owner)] = node.kind.sign(node.owner)

    def _walk_all(self) -> None:
        self.nodes.clear()
        self.paths.clear()
        self._signs.clear()
        self._add(self._owners, enter_owners=self._enter_owners)
        self._walked = len(self.nodes)

    def _enter(self, holder: Node) -> None:
        """Add the objects that a holder holds since it was read last."""
        content = holder.content
        kind: Any = holder.kind
        for place, part in enumerate(content.parts):
            if id(part) not in self.nodes and find_kind(part) is not None:
                self._add({name_part(holder.path, kind, content, place): part})

    def _add(self, owners: Mapping[str, object], *, enter_owners: bool = False) -> None:
        words: dict[str, Any] = {"leave_out": self._leave_out, "known": self.nodes}
        for path, value, kind in walk(owners, **words, enter_owners=enter_owners):
            if kind is not None:
                chosen = self._choose(path, value, kind)
                node = self.nodes[id(value)] = Node(path, value, chosen, None)
                self.paths[path] = node
                self._read(node)
