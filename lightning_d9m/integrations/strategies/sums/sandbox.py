"""Changes by the step of a logical rank: put back before the next one, merged at the end."""

import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_d9m.engine.state.object_digest import digest_saved, digest_together
from lightning_d9m.engine.state.parts import (
    DICT,
    ITEMS,
    LONG,
    MISSING,
    OPAQUE,
    QUESTIONS,
    SET,
    TABLE,
    TENSOR,
    TOLD,
    Dict,
    Kind,
    are_same,
    equal_bits,
    holds_objects,
)
from lightning_d9m.engine.state.plain_data import encode_plain
from lightning_d9m.engine.state.state import VERSIONED, LeaveOut, Node, Watch
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.strategies.sums.collectives import move_tensors, send_tensors
from lightning_d9m.program import is_of_framework

# The steps in which trained weights are compared by value; later a version tells.
# A comparison reads and copies all weights, which would cost too much in each step. A program that
# changes trained weights in its steps does so from the first ones on; a first change later is an
# error, since the value before is not known.
_COMPARED_STEPS = 2
_NUMBERS = (int, float, complex)
_PAIR = 2
_LARGEST = 8  # bytes of a number that torch has, too: not those of np.longdouble
# Of data outside the module only a step that has written to them is looked at closely.
_WRITTEN = replace(TENSOR, sign=VERSIONED.sign)
# What others keep, or no program changes.
_LEFT_OUT = Kind(lambda _: None, sign=lambda _: 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """A value that a step has replaced: a part of a holder, or all that an object holds."""

    path: str
    node: Node
    key: Any
    value: Any
    token: str

    def put_back(self) -> None:
        """Restore the value at the start of the step."""
        node = self.node
        self._set(node.content if self.key is None else node.content.get(self.key[0], MISSING))

    def apply(self) -> None:
        """Set the changed value."""
        self._set(self.value)

    def _set(self, value: Any) -> None:
        if self.key is None:
            self.node.kind.write(self.node.owner, value)
        else:
            self.node.set_part(self.key[0], value)


@dataclass(slots=True, eq=False)
class _Record:
    """The changes of one logical rank.

    Attributes:
        changes: The replaced values by path.
        added: Each extended list, set or dict, and what was appended to it, by path.
    """

    changes: dict[str, _Change] = field(default_factory=dict)
    added: dict[str, tuple[Node, list[Any]]] = field(default_factory=dict)

    def put_back(self) -> None:
        """Restore the state at the start of the step."""
        for node, _ in self.added.values():
            node.kind.write(node.owner, node.content)
        for change in self.changes.values():
            change.put_back()


class Sandbox:
    """Lets each logical rank of a step start from the same state, and merges what they change.

    The rules do not depend on the number of processes:

    - What all logical ranks change alike (a momentum encoder, a counter) is kept.
    - What they append to lists and sets and add to dicts is gathered, in the order of ranks, and
      so is what they write to different keys of a dict, and to different elements of an array or
      of a tensor that is not a buffer.
    - Of anything else the value of logical rank 0 is kept, as DDP keeps the buffers of process 0.
      A warning names it, unless it is a buffer.

    Args:
        module: The user's module.
        processes: Those that have the logical ranks: the strategy, which has their ``blocks`` and
            the ``block`` of this one, gathers values, and broadcasts tensors.
        leave_out: Called with the path and each object that can change; returns whether others
            keep its state for each logical rank, or a step does not change it.
        hide: Returns the attributes of an object whose changes do not count.
        name_owners: Returns what a step may change besides the module, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        processes: Any,
        leave_out: LeaveOut,
        hide: Callable[[Any], Collection[str]] = lambda _: (),
        name_owners: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._module = module
        self._processes = processes
        self._block: range = processes.block
        self._ranks: int = processes.blocks.logical_ranks
        self._shared = len(self._block) < self._ranks  # whether other processes have some, too
        self._given_leave_out = leave_out
        self._left_out: set[int] = set()
        self._hide, self._name_owners = hide, name_owners
        self._outside: tuple[str, ...] = ()
        self._records: dict[int, _Record] = {}
        self._buffers: set[int] = set()
        self._watch: Any = None  # from the first step
        # For lists and dicts that are too long to enter: one digest of all that they hold.
        self._together = Kind(partial(digest_together, leave_out=self._leave_out), compare=are_same)
        self._versions: dict[str, Any] = {}
        self._changing: set[int] = set()
        self._steps: Counter[str] = Counter()  # of training and of each evaluation
        self._compares = False
        self._warned: set[str] = set()

    @_disable_current_modes()  # no operation of the training, which probes record
    def begin(self) -> None:
        """Take the state at the start of a step, see ``finish``."""
        self._records, self._buffers = {}, set()
        if self._ranks == 1:
            return
        compares = len(self._block) > 1 and self._steps["train"] < _COMPARED_STEPS
        if self._watch is None or compares is not self._compares:
            self._compares = compares
            others = self._name_owners()
            self._outside = tuple(f"{name}." for name in others)
            # Without a name, so that paths begin with the names that a user knows from
            # `named_parameters`.
            owners = {"": self._module, **others}
            self._watch = Watch(
                owners, leave_out=self._leave_out, choose=self._choose_kind, namespaces=True
            )
        else:
            # Between two steps the optimizer and hooks have changed the state; that is not a change
            # of a step.
            self._watch.refresh(self._watch.find_changed())

    def start_backward(self) -> None:
        """Take the versions of the weights, which no backward pass may change."""
        self._versions = self._read_versions()

    @_disable_current_modes()
    def end(self, rank: int, *, last: bool = False) -> None:
        """Note what a logical rank has changed, and put it back unless it is the last one here.

        Raises:
            SettingError: If it cannot be put back, or the backward pass has changed weights.
        """
        versions, self._versions = self._versions, {}
        now = self._read_versions() if versions else {}
        # By version: to compare the values would read all weights in each micro-batch.
        for name in now:
            if versions[name] != now[name]:
                raise SettingError(
                    f"The backward pass changes the parameter {name!r}, as an optimizer in a hook "
                    "of a gradient does, before the gradients of all logical ranks are summed: "
                    "return the optimizer from configure_optimizers, or train without "
                    "logical_ranks."
                )
        if self._watch is None:
            return
        record = self._records[rank] = _Record()
        for node in self._watch.find_changed():
            self._note(node, record)
        if not last:
            record.put_back()

    # The state

    def _leave_out(self, path: str, value: object) -> bool:
        is_left_out = self._given_leave_out(path, value)
        # The id of a freed object may be that of another now.
        (self._left_out.add if is_left_out else self._left_out.discard)(id(value))
        return is_left_out

    def _choose_kind(self, path: str, value: Any, kind: Kind) -> Kind:
        if id(value) in self._left_out:
            return _LEFT_OUT
        if kind is TENSOR and path.startswith(self._outside):
            return _WRITTEN
        trained = isinstance(value, nn.Parameter) and value.requires_grad
        if kind is TENSOR and trained and not self._compares and id(value) not in self._changing:
            return VERSIONED
        if kind is OPAQUE and any(hasattr(value.__class__, name) for name in QUESTIONS):
            return TOLD
        if kind is LONG:  # whose objects are not entered
            plain = DICT if isinstance(value, dict) else ITEMS
            return self._together if holds_objects(value) else plain
        return kind

    def _read_versions(self) -> dict[str, Any]:
        return {
            name: (parameter._version, parameter.data_ptr())  # noqa: SLF001 - torch has no public counter
            for name, parameter in self._module.named_parameters()
        }

    # Changes

    def _note(self, node: Node, record: _Record) -> None:
        owner, kind = node.owner, node.kind
        if kind in (OPAQUE, TOLD, self._together):
            self._note_opaque(node)
            return
        # An error and not a warning, because the next micro-batch would begin from the changed
        # value.
        if kind is VERSIONED and len(self._block) > 1:
            raise SettingError(
                f"training_step changes the trained parameter {node.path!r} for the first time "
                f"after step {_COMPARED_STEPS}, and its value is not known any more: change it in "
                "a hook such as on_train_batch_end, or in the first step already."
            )
        if isinstance(kind, Dict):
            for path, key, first, part in node.find_parts():
                if key in self._hide(owner):
                    continue
                if first is MISSING and kind is DICT:
                    record.added.setdefault(node.path, (node, []))[1].append((key, part))
                else:
                    record.changes[path] = self._make_change(path, node, (key,), part)
        elif (added := _find_added(node)) is not None:
            record.added[node.path] = node, added
        else:
            if kind in (TENSOR, VERSIONED):
                self._changing.add(id(owner))
                kind = TENSOR
            record.changes[node.path] = self._make_change(node.path, node, None, kind.read(owner))

    def _note_opaque(self, node: Node) -> None:
        package = type(node.owner).__module__.partition(".")[0]
        if not is_of_framework(package) and node.path not in self._warned:
            self._warned.add(node.path)
            warnings.warn(
                f"A step changes {node.path!r}, a {type(node.owner).__qualname__} of {package}, "
                "whose state is not known: the micro-batches of a process share it, so it may "
                "depend on the number of processes. Change it in a hook between steps.",
                stacklevel=2,
            )

    def _make_change(self, path: str, node: Node, key: Any, value: Any) -> _Change:
        if value is MISSING:
            return _Change(path, node, key, value, "removed")
        if node.kind is TABLE:
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        else:
            self._buffers = self._buffers or set(map(id, self._module.buffers()))
            is_buffer = id(node.owner) in self._buffers
        if is_buffer:
            # Not by its values: DDP takes the buffers of process 0, whatever those of others are.
            token = f"buffer {getattr(value, 'shape', None)} {getattr(value, 'dtype', None)}"
        else:
            # Only this is sent at first, and values only of changes that then differ.
            token = digest_saved(value) or type(value).__qualname__
        return _Change(path, node, key, value, token)

    # The merge

    def finish(self, stage: str, extra: Any = None) -> list[Any]:
        """Merge what the logical ranks of a step have changed.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
            extra: A plain value that is sent along.

        Returns:
            The extra values of all processes; of predictions, whose numbers may differ by process,
            only that of this one.

        Raises:
            SettingError: If a value cannot be merged.
        """
        records, self._records = self._records, {}
        self._steps[stage] += 1
        if stage == "predict":
            for record in records.values():
                for path in record.added:
                    raise SettingError(
                        f"predict_step adds to {path!r}, and processes may predict different "
                        "numbers of batches: return the value from predict_step, or write it in a "
                        "callback."
                    )
                record.put_back()
            return [extra]
        if self._watch is None:
            return [extra]
        tokens = {
            rank: {path: change.token for path, change in record.changes.items()}
            for rank, record in records.items()
        }
        added = {
            rank: {path: items for path, (_, items) in record.added.items()}
            for rank, record in records.items()
        }
        sent = [tokens, added, extra]
        parts = self._processes.gather_values(sent) if self._shared else [sent]
        self._merge(records, parts, stage)
        return [part[-1] for part in parts]

    def _merge(self, records: dict[int, _Record], parts: list[Any], stage: str) -> None:
        # From here on all processes have the same facts, so they decide alike and in one order.
        tokens, added = (_turn(part[place] for part in parts) for place in (0, 1))
        for record in records.values():
            record.put_back()
        for change in records[self._block.start].changes.values():
            change.apply()
        differing = [
            path
            for path, found in sorted(tokens.items())
            if len(found) < self._ranks or len(set(found.values())) > 1
        ]
        if differing:
            # Such as weights of samples, by the number of the sample. Equal values of several ranks
            # may be those of a counter, to which each has added.
            single = {path for path in differing if len(tokens[path]) == 1}
            self._settle(records, differing, single, stage)
        if self._shared:
            changes = records[self._block.start].changes
            # In the order of names: a broadcast must meet its counterpart in each process.
            alike = [changes[path] for path in sorted(changes.keys() - {*differing})]
            buffers = [
                change.node.owner if change.key is None else change.node.owner[change.key[0]]
                for change in alike
                if change.token.startswith("buffer")
            ]
            # Their tokens have no digest, so buffers that differ were not found above.
            send_tensors(buffers, self._processes)
        for path, by_rank in added.items():
            self._add_all(path, by_rank, stage)

    def _settle(
        self, records: dict[int, _Record], paths: list[str], single: set[str], stage: str
    ) -> None:
        """Merge values that differ, alike on all processes.

        Elements of tensors, and entries of dicts, that one logical rank has written are kept. Of
        anything else it is the value of logical rank 0, or that before the step.

        Raises:
            SettingError: If that cannot be sent.
        """
        here = {
            rank: {
                path: _offer(record.changes[path], first=rank == 0, single=path in single)
                for path in paths
                if path in record.changes
            }
            for rank, record in records.items()
        }
        offers = _turn(self._processes.gather_values(here) if self._shared else [here])
        changes = {
            path: change for record in records.values() for path, change in record.changes.items()
        }
        for path in paths:
            by_rank, change = offers[path], changes.get(path)
            forms, first = {offer[0] for offer in by_rank.values()}, by_rank.get(0, [""])
            if forms == {"entry"}:
                for offer in by_rank.values():
                    self._apply(path, offer)
            elif forms == {"written"}:
                self._write(path, by_rank)
            elif first[0] == "unknown":
                raise SettingError(
                    f"A step changes {path!r}, and not alike on all logical ranks, so its value is "
                    "sent to the other processes, but it is none of the numbers, strings, tensors, "
                    "arrays and containers of these that can be sent: keep the parts of the object."
                )
            else:
                if change is None or not change.token.startswith("buffer"):
                    self._report(path, None if change is None else change.value, stage)
                if first[0] == "written":
                    self._write(path, {0: first})
                elif first[0] and self._block.start:
                    self._apply(path, first)
                elif change is not None and self._block.start:
                    change.put_back()

    def _apply(self, path: str, offer: list[Any]) -> None:
        """Set a value that a logical rank has offered."""
        _, key, place, removed, value = offer
        made = MISSING if removed else move_tensors(value, self._module)
        _Change(path, self._watch.paths[place], key, made, "").apply()

    def _write(self, path: str, by_rank: dict[int, list[Any]]) -> None:
        """Write to a tensor what each logical rank wrote to it.

        Raises:
            SettingError: If logical ranks wrote different values to an element.
        """
        node = self._watch.paths[path]
        # From the value before the step, which each logical rank started from.
        merged = _find_tensor(node.content).flatten().clone()
        taken = torch.zeros(merged.shape, dtype=torch.bool, device=merged.device)
        for rank in sorted(by_rank):
            _, places, values = move_tensors(by_rank[rank], self._module)
            again = taken[places]
            # Two ranks may write one element if they write the same: then their order has no
            # effect.
            if not equal_bits(merged[places][again], values[again]):
                raise SettingError(
                    f"The logical ranks write different values to the same elements of "
                    f"{path!r}, of which each process of DDP has its own: register it as a "
                    "buffer, which is that of logical rank 0, append to a list, which gets "
                    "the values of all, or train without logical_ranks."
                )
            merged[places], taken[places] = values, True
        node.kind.write(node.owner, merged.reshape(node.content.shape))

    def _report(self, path: str, value: Any, stage: str) -> None:
        single = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, _NUMBERS)
        if stage != "train" and single:
            raise SettingError(
                f"The evaluation changes {path!r}, and not alike on all logical ranks, so it would "
                "count only some of them: keep the value in a torchmetrics metric, or append the "
                "value of each batch to a list, which then has those of all logical ranks."
            )
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(
                f"A step changes {path!r} of {type(self._module).__name__}, and not alike on all "
                "logical ranks: the value of logical rank 0 is kept, as of process 0 in DDP. To "
                "count all of them, use a torchmetrics metric, or append to a list.",
                stacklevel=2,
            )

    def _add_all(self, path: str, by_rank: dict[int, list[Any]], stage: str) -> None:
        node = self._watch.paths[path]
        counts = {len(items) for items in by_rank.values()}
        if (len(by_rank) < self._ranks or len(counts) > 1) and _hides_added(node):
            self._report(path, node.owner, stage)
            by_rank = {0: by_rank.get(0, [])}
        moved = move_tensors(by_rank, self._module)
        items = [item for rank in sorted(by_rank) for item in moved[rank]]
        if node.kind is SET:
            node.owner.update(items)
        elif node.kind is ITEMS:
            node.owner.extend(items)
        else:
            self._add_entries(path, node.owner, items, stage)

    def _add_entries(self, path: str, owner: dict[Any, Any], items: list[Any], stage: str) -> None:
        """Add keys and values to a dict, and merge what several logical ranks add under one."""
        by_key: dict[Any, list[Any]] = {}
        for key, value in items:
            by_key.setdefault(key, []).append(value)
        for key, values in by_key.items():
            # In the order of ranks, so the first one that has added a key decides.
            first, *others = values
            owner.setdefault(key, first)
            if not others:
                continue
            if all(isinstance(value, list | deque) for value in values):
                for other in others:
                    first.extend(other)
            elif all(isinstance(value, set) for value in values):
                first.update(*others)
            elif all(isinstance(value, dict) for value in values):
                entries = [entry for value in values for entry in value.items()]
                first.clear()
                self._add_entries(path, first, entries, stage)
            # In a dict that counts, equal values are of several additions, unless all count alike.
            elif len({digest_saved(value) or type(value) for value in values}) > 1 or (
                isinstance(owner, Counter | defaultdict) and len(values) < self._ranks
            ):
                self._report(path, first, stage)


def _offer(change: _Change, *, first: bool, single: bool) -> list[Any]:
    """Return what other processes may make of a change that differs.

    It begins with ``"written"``, and has the places and values that were written to a tensor; or
    with ``"entry"`` of a dict or the ``"first"`` value, that of logical rank 0, and has what
    ``_apply`` needs; with ``"unknown"`` if the latter cannot be sent; or with nothing.
    """
    if change.key is None and change.token[:6] != "buffer":
        found = map(_find_tensor, (change.value, change.node.content))
        both = [each for each in found if each is not None]
        forms = {
            (each.shape, each.dtype, each.layout is torch.strided or id(each)) for each in both
        }
        # A single number may be a counter, to which each has added.
        if len(both) * len(forms) == _PAIR and both[0].numel() > 1:
            flat = [each.flatten() for each in both]
            bits = [each.view(torch.uint8).reshape(len(each), -1) for each in flat]
            # By bytes: a NaN is equal to itself, and -0.0 is not 0.0.
            places = (bits[0] != bits[1]).any(1).nonzero().flatten()
            return ["written", places, flat[0][places]]
    is_entry = single and change.node.kind is DICT
    if not (is_entry or first):
        return [""]
    removed = change.value is MISSING
    plain = None if removed else change.value
    try:
        # Encoded to see whether it can be sent; for a tensor that would only copy it.
        if not isinstance(plain, Tensor):
            encode_plain(plain)
    except SettingError:
        return ["unknown" if first else ""]
    return ["entry" if is_entry else "first", change.key, change.node.path, removed, plain]


def _find_tensor(value: object) -> Any:
    """Return a tensor, or one with the bits of the numbers of an array, else None."""
    if not isinstance(value, np.ndarray):
        return value if isinstance(value, Tensor) else None
    kind = value.dtype
    if kind.kind not in "biuf" or not kind.isnative or kind.itemsize > _LARGEST:
        return None
    # Torch cannot write to elements of unsigned types, except uint8.
    return torch.from_numpy(np.ascontiguousarray(value).view(kind.str.replace("u", "i")))


def _turn(parts: Iterable[dict[int, dict[str, Any]]]) -> dict[str, dict[int, Any]]:
    """Return values by path and logical rank, given those of each process by rank and path."""
    turned: dict[str, dict[int, Any]] = {}
    for rank, paths in (entry for part in parts for entry in part.items()):
        for path, value in paths.items():
            turned.setdefault(path, {})[rank] = value
    return turned


def _find_added(node: Node) -> list[Any] | None:
    """Return what was appended to a list or set; None if it was changed otherwise."""
    owner = node.owner
    if node.kind is SET:
        # By their texts: elements of two types have no order, and that of a set depends on hashes.
        return sorted(owner - node.content, key=repr) if node.content <= owner else None
    if node.kind is not ITEMS:
        return None
    now, before = tuple(owner), node.content
    # A full deque drops its first items.
    full = len(now) == getattr(owner, "maxlen", None)
    for dropped in range(1 + len(before) * full):
        # The first item alone first: to compare all of them each time takes quadratic time.
        if dropped < len(before) and not are_same(now[:1], before[dropped : dropped + 1]):
            continue
        kept = before[dropped:]
        if len(now) > len(kept) and are_same(now[: len(kept)], kept):
            return list(now[len(kept) :])
    return None


def _hides_added(node: Node) -> bool:
    """Return whether a full deque can look the same after items were appended, as one of zeros."""
    before = node.content
    if node.kind is not ITEMS or getattr(node.owner, "maxlen", None) != len(before):
        return False
    for dropped in range(1, max(len(before), 2)):
        first = before[dropped : dropped + 1]
        kept = len(before) - dropped
        # The first item alone first, as above.
        if are_same(first, before[: len(first)]) and are_same(before[dropped:], before[:kept]):
            return True
    return False
