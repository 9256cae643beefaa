"""Changes by the step of a logical rank: put back before the next one, merged at the end."""

import math
import operator
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

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
    holds_objects,
)
from lightning_d9m.engine.state.plain_data import encode_plain
from lightning_d9m.engine.state.state import VERSIONED, LeaveOut, Node, Watch
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.strategies.sums.collectives import send_tensors
from lightning_d9m.program import is_of_framework

# The steps in which trained weights are compared by value; later a version tells.
# A comparison reads and copies all weights, which would cost too much in each step. A program that
# changes trained weights in its steps does so from the first ones on; a first change later is an
# error, since the value before is not known.
_COMPARED_STEPS = 2
_NUMBERS = (int, float, complex)
# What a change is, by which those that differ are merged.
_ADDED, _BUFFER, _ELEMENTS, _ENTRY, _VALUE = "added", "buffer", "elements", "entry", "value"
# What logical ranks add to containers of these is merged, whatever holds them.
_CONTAINERS: tuple[Any, ...] = (dict, set, (list, deque))
# Of data outside the module only a step that has written to them is looked at closely.
_WRITTEN = replace(TENSOR, sign=VERSIONED.sign)
# What others keep, or no program changes.
_LEFT_OUT = Kind(lambda _: None, sign=lambda _: 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """A value that a step has replaced, or a container to which it has added.

    Attributes:
        node: The holder of a part, or the object that has changed as a whole.
        key: The key of the part; empty for a whole.
        value: What is there now; ``MISSING`` if the part is gone.
        token: The form, by which changes that differ are merged, and what was added to a container,
            or what is equal if logical ranks make the same change. Only this is sent at first.
    """

    node: Node
    key: tuple[Any, ...]
    value: Any
    token: tuple[str, Any]

    def put_back(self) -> None:
        """Restore the value at the start of the step."""
        node = self.node
        self._set(node.content.get(self.key[0], MISSING) if self.key else node.content)

    def apply(self) -> None:
        """Set the changed value."""
        self._set(self.value)

    def _set(self, value: Any) -> None:
        if self.key:
            self.node.set_part(self.key[0], value)
        else:
            self.node.kind.write(self.node.owner, value)


# The changes of a logical rank by path, and whether a part of a holder has changed there: an object
# that has changed has the path of one that replaces it.
_Place: TypeAlias = tuple[str, bool]
_Record: TypeAlias = dict[_Place, _Change]


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
        record = self._records[rank] = {}
        for node in self._watch.find_changed():
            self._note(node, record)
        if not last:
            _put_back(record)

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
            if holds_objects(value):
                return self._together
            kind = DICT if isinstance(value, dict) else ITEMS
        return _BOUNDED if kind is ITEMS and getattr(value, "maxlen", None) else kind

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
        added: Any = {}
        if isinstance(kind, Dict):
            for path, key, first, part in node.find_parts():
                if key in self._hide(owner):
                    continue
                if first is MISSING and kind is DICT:
                    added[key] = part
                else:
                    record[path, True] = self._make_change(node, (key,), part)
        elif (added := _find_added(node)) is None:
            if kind in (TENSOR, VERSIONED):
                self._changing.add(id(owner))
                kind = TENSOR
            record[node.path, False] = self._make_change(node, (), kind.read(owner))
        if added or kind is DICT:  # which is put back as a whole, with the order of its keys
            record[node.path, False] = _Change(node, (), MISSING, (_ADDED, added))

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

    def _make_change(self, node: Node, key: tuple[Any, ...], value: Any) -> _Change:
        if node.kind is TABLE:
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        else:
            self._buffers = self._buffers or set(map(id, self._module.buffers()))
            is_buffer = id(node.owner) in self._buffers
        if is_buffer:
            # Not by its values: DDP takes the buffers of process 0, whatever those of others are.
            kind = f"{getattr(value, 'shape', None)} {getattr(value, 'dtype', None)}"
            return _Change(node, key, value, (_BUFFER, kind))
        form = _ENTRY if node.kind is DICT else _VALUE
        if not key and _has_elements(node, value):
            form = _ELEMENTS
        removed = "removed" if value is MISSING else None
        digest = removed or digest_saved(value) or type(value).__qualname__
        return _Change(node, key, value, (form, digest))

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
                for (path, _), change in record.items():
                    if change.token[0] == _ADDED and change.token[1]:
                        raise SettingError(
                            f"predict_step adds to {path!r}, and processes may predict different "
                            "numbers of batches: return the value from predict_step, or write it "
                            "in a callback."
                        )
                _put_back(record)
            return [extra]
        if self._watch is None:
            return [extra]
        tokens = {
            rank: {place: change.token for place, change in record.items()}
            for rank, record in records.items()
        }
        parts = self._gather([tokens, extra])
        self._merge(records, _turn(part[0] for part in parts), stage)
        return [part[-1] for part in parts]

    def _gather(self, values: Any) -> list[Any]:
        return self._processes.gather_values(values) if self._shared else [values]

    def _merge(
        self, records: dict[int, _Record], tokens: dict[_Place, dict[int, Any]], stage: str
    ) -> None:
        # From here on all processes have the same facts, so they decide alike and in one order.
        for record in records.values():
            _put_back(record)
        differing, added, buffers = dict[_Place, Any](), dict[str, Any](), []
        for place, tokens_of in tokens.items():
            found = {rank: token for rank, token in tokens_of.items() if token[0] != _ADDED}
            if len(found) < len(tokens_of):
                added[place[0]] = {r: own for r, (_, own) in tokens_of.items() if r not in found}
            if found and (len(found) < self._ranks or len({*found.values()}) > 1):
                differing[place] = found
            elif found:
                change = records[self._block.start][place]
                change.apply()
                if change.token[0] == _BUFFER:
                    owner = change.node.owner
                    buffers.append(owner[change.key[0]] if change.key else owner)
        if differing:
            self._settle(records, differing, stage)
        if self._shared:
            # Their tokens have no digest of values, so buffers that differ were not found above.
            send_tensors(buffers, self._processes)
        for path, by_rank in added.items():
            self._add_all(path, by_rank, stage)

    def _settle(
        self, records: dict[int, _Record], differing: dict[_Place, dict[int, Any]], stage: str
    ) -> None:
        """Merge changes that differ, alike on all processes.

        Elements of tensors, and entries of dicts, that one logical rank has written are kept. Of
        anything else it is the value of logical rank 0, or that before the step.

        Raises:
            SettingError: If that cannot be sent.
        """
        forms = {place: {form for form, _ in found.values()} for place, found in differing.items()}
        # An entry is that of the weights of samples, by the number of the sample. Equal values of
        # several ranks may be those of a counter, to which each has added.
        merged = {
            place
            for place, found in differing.items()
            if forms[place] == {_ELEMENTS} or (forms[place] == {_ENTRY} and len(found) == 1)
        }
        here = {
            rank: {
                place: _offer(change)
                for place, change in record.items()
                if rank in differing.get(place, ()) and (place in merged or rank == 0)
            }
            for rank, record in records.items()
        }
        offers = _turn(self._gather(here))
        for place, found in differing.items():
            path, given = place[0], offers.get(place, {})
            if given.get(0, ...) is None:
                raise SettingError(
                    f"A step changes {path!r}, and not alike on all logical ranks, so its value is "
                    "sent to the other processes, but it is none of the numbers, strings, tensors, "
                    "arrays and containers of these that can be sent: keep the parts of the object."
                )
            if forms[place] != {_BUFFER} and (place not in merged or None in given.values()):
                changes = [record[place] for record in records.values() if place in record]
                self._report(path, changes[0].value if changes else None, stage)
            if given and found[min(given)][0] == _ELEMENTS:
                self._write(path, given)
                continue
            for rank, offer in given.items():
                if offer is not None and rank in records:
                    records[rank][place].apply()
                elif offer is not None:
                    holder, key, *value = offer
                    made = value[0] if value else MISSING
                    _Change(self._watch.paths[holder], key, made, found[rank]).apply()

    def _write(self, path: str, by_rank: dict[int, list[Any]]) -> None:
        """Write to a tensor or an array what each logical rank wrote to it.

        Raises:
            SettingError: If logical ranks wrote different values to an element.
        """
        node = self._watch.paths[path]
        # From the value before the step, which each logical rank started from.
        merged: Any = _read_elements(node.content).clone()
        taken = torch.zeros(len(merged), dtype=torch.bool, device=merged.device)
        for rank in sorted(by_rank):
            places, rows = by_rank[rank]
            again = taken[places]
            # Two ranks may write one element if they write the same: then their order has no
            # effect.
            if not torch.equal(merged[places][again], rows[again]):
                _refuse_elements(path)
            merged[places], taken[places] = rows, True
        made = merged.numpy() if isinstance(node.content, np.ndarray) else merged
        node.kind.write(node.owner, made.view(node.content.dtype).reshape(node.content.shape))

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

    def _add_all(self, path: str, by_rank: dict[int, Any], stage: str) -> None:
        node = self._watch.paths[path]
        counts = {len(parts) for parts in by_rank.values()}
        if (len(by_rank) < self._ranks or len(counts) > 1) and _hides_added(node):
            self._report(path, node.owner, stage)
            by_rank = {0: by_rank.get(0, [])}
        self._add(path, node.owner, [by_rank[rank] for rank in sorted(by_rank)], stage)

    def _add(self, path: str, owner: Any, parts: list[Any], stage: str) -> None:
        """Add to a container what logical ranks have added to it, in their order.

        What several add under one key of a dict is merged likewise.
        """
        if not isinstance(owner, dict):
            add = owner.update if isinstance(owner, set) else owner.extend
            for part in parts:
                add(part)
            return
        by_key: dict[Any, list[Any]] = {}
        for key, value in (entry for part in parts for entry in part.items()):
            by_key.setdefault(key, []).append(value)
        for key, values in by_key.items():
            first = owner.setdefault(key, values[0])  # of the first one that has added the key
            kinds = [each for each in _CONTAINERS if all(isinstance(v, each) for v in values)]
            if kinds and len(values) > 1:
                held = type(first).copy(first)
                first.clear()
                self._add(path, first, [held, *values[1:]], stage)
            # In a dict that counts, equal values are of several additions, unless all count alike.
            elif len({digest_saved(value) or type(value) for value in values}) > 1 or (
                isinstance(owner, Counter | defaultdict) and 1 < len(values) < self._ranks
            ):
                self._report(path, first, stage)


def _put_back(record: _Record) -> None:
    for change in record.values():
        change.put_back()


def _offer(change: _Change) -> list[Any] | None:
    """Return what other processes make of a change that differs; None if it cannot be sent.

    Of elements it is their places and bytes; otherwise the path of the holder, the key and the
    value, unless that was removed.
    """
    if change.token[0] == _ELEMENTS:
        if change.node.kind is VERSIONED:  # whose values before are not known
            _refuse_elements(change.node.path)
        now, before = map(_read_elements, (change.value, change.node.content))
        # By bytes: a NaN is equal to itself, and -0.0 is not 0.0.
        places = (now != before).any(1).nonzero().flatten()
        return [places, now[places]]
    value = [] if change.value is MISSING else [change.value]
    try:
        # Encoded to see whether it can be sent; for a tensor that would only copy it.
        if not isinstance(change.value, Tensor):
            encode_plain(value)
    except SettingError:
        return None
    return [change.node.path, change.key, *value]


def _refuse_elements(path: str) -> NoReturn:
    raise SettingError(
        f"The logical ranks write different values to the same elements of {path!r}, of which each "
        "process of DDP has its own: register it as a buffer, which is that of logical rank 0, "
        "append to a list, which gets the values of all, or train without logical_ranks."
    )


def _has_elements(node: Node, value: Any) -> bool:
    """Return whether a tensor or an array has the type and shape that it had before.

    A single number may be a counter, to which each logical rank has added.
    """
    before = node.owner if node.kind is VERSIONED else node.content
    dense = getattr(value, "layout", torch.strided) is torch.strided
    if not (node.kind.copies or node.kind is VERSIONED) or not dense or value.nbytes == 0:
        return False
    same = (value.shape, value.dtype) == (before.shape, before.dtype)
    return same and math.prod(value.shape) > 1 and not getattr(value, "is_quantized", False)


def _read_elements(value: Any) -> Tensor:
    """Return the bytes of a dense tensor or an array, with a row for each element."""
    if isinstance(value, Tensor):
        return value.reshape(-1, 1).view(torch.uint8)
    return torch.from_numpy(np.ascontiguousarray(value).reshape(-1, 1).view(np.uint8))


def _turn(parts: Iterable[dict[int, dict[_Place, Any]]]) -> dict[_Place, dict[int, Any]]:
    """Return values by place and logical rank, given those of each process by rank and place."""
    turned: dict[_Place, dict[int, Any]] = {}
    for rank, places in (entry for part in parts for entry in part.items()):
        for place, value in places.items():
            turned.setdefault(place, {})[rank] = value
    return turned


def _find_added(node: Node) -> Any:
    """Return what was appended to a list or added to a set; None if it was changed otherwise."""
    owner, before = node.owner, node.content
    if node.kind is SET:
        # By their texts: elements of two types have no order, and that of a set depends on hashes.
        return sorted(owner - before, key=repr) if before <= owner else None
    if not isinstance(owner, list | deque):
        return None
    now = tuple(owner)
    # A full deque drops its first items.
    most = len(before) * (len(now) == getattr(owner, "maxlen", None))
    shift = next(_list_shifts(node, now, most), None)
    return None if shift is None else [*now[len(before) - shift :]]


def _hides_added(node: Node) -> bool:
    """Return whether a full deque can look the same after items were appended, as one of zeros."""
    before = node.content
    if getattr(node.owner, "maxlen", None) != len(before):
        return False
    # Nothing is left of all items, but a single one may be the same again.
    return any(_list_shifts(node, before, max(len(before) - 1, 1)))


def _list_shifts(node: Node, now: tuple[Any, ...], most: int) -> Iterator[int]:
    """Yield how many first items may have been dropped, if the others are now the first."""
    before, are_alike = node.content, node.kind.compare
    for shift in range(most + 1):
        # The first item alone first: to compare all of them each time takes quadratic time.
        kept = (before[shift : shift + length] for length in (1, len(before)))
        if all(are_alike(now[: len(part)], part) for part in kept):
            yield shift


def _are_identical(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


# By identity: what was dropped from a full deque may be equal to what is left.
_BOUNDED = replace(ITEMS, compare=_are_identical)
