"""State of the objects that load data: what reading samples, or a hook, changes in them.

That is a count of epochs, by which WebDataset's ``detshuffle`` seeds its order, a list that is
shuffled in place, a generator, or a number that a callback sets. A resumed run starts with new
objects, which hold their first values.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_d9m.engine.control.data.resumable_sampler import list_controlled
from lightning_d9m.engine.state.changes import Changes, describe_unsaved
from lightning_d9m.engine.state.parts import is_of_lightning, is_of_program
from lightning_d9m.engine.state.plain_data import pack_bytes, unpack_bytes
from lightning_d9m.engine.state.state import find_generators, search

VALUES, UNSAVED, LOGGED, UNKNOWN = "values", "unsaved", "logged", "unknown"
"""The keys of the state of an object: what has changed, encoded, by path; and the paths of what a
checkpoint cannot hold, of what only the log names (the same in a loader itself, and caches that
were filled), and of what nothing can read, such as an open database."""

LOADER = "loader"
"""The name of a loader among the objects."""

# Names of samplers begin with it; those of the generators of an object end with the other one.
_SAMPLER, _GENERATORS = "sampler", ".generators"
_DEPTH = 4  # loader -> dataset -> list of stages -> stage
_MOST_PARTS = 10_000
_CODE = (type, FunctionType, ModuleType)
# In a worker each of the first batches is followed by a check, and later those numbered by powers
# of two.
_CHECKED_BATCHES = 16


class DataState:
    """The state of the objects that load data, and of all in them, relative to their first one.

    Of an object with a ``state_dict``, which says itself where it is, and of a library's loader,
    only the generators count.

    Args:
        owners: The objects by name.
        samplers: The samplers of the loader.
        earlier: The states of other loaders. An object that one of them has, too, is compared with
            its first state there.

    Attributes:
        parts: The objects and what has changed in them, by name.
    """

    def __init__(
        self,
        owners: Mapping[str, object],
        samplers: Sequence[object] = (),
        earlier: Iterable["DataState"] = (),
    ) -> None:
        # Training and validation may read one dataset: a second watch would take what the first
        # epoch has changed as held at first.
        pairs = [pair for state in earlier for pair in state.parts.values()]
        known = {id(own): changes for own, changes in pairs}
        named = {f"{_SAMPLER}{number}": own for number, own in enumerate(samplers)} | {**owners}
        others = {*map(id, named.values())}
        self.parts: dict[str, tuple[object, Changes]] = {}
        for name, own in named.items():
            # Restoring what a library keeps of its position, or what loads it itself, would be
            # restoring it twice.
            says = hasattr(own, "load_state_dict") and not is_of_sampler(name)
            says |= name == LOADER and not is_of_program(type(own))
            part = name + _GENERATORS * says
            changes = known.get(id(own)) or _watch(part, own, others)
            if not says or changes.list_generators():
                self.parts[part] = own, changes

    def capture(self) -> dict[str, dict[str, Any]]:
        """Return what has changed, for ``restore``, and the paths of what cannot be saved."""
        states = {}
        for name, (_, changes) in self.parts.items():
            found, unsaved = changes.capture()
            # A dataset may be without a cache, and most loaders begin again when they are iterated,
            # while an order depends on all that a sampler holds.
            caches = {*unsaved} if name == LOADER else {*changes.filled}
            caches = set() if is_of_sampler(name) else caches
            own = {
                VALUES: {path: pack_bytes(own) for path, own in found.items()},
                UNSAVED: [path for path in unsaved if path not in caches],
                LOGGED: [path for path in unsaved if path in caches],
                UNKNOWN: changes.unknown,
            }
            states[name] = {key: part for key, part in own.items() if part}
        return {name: own for name, own in states.items() if own}

    def restore(self, states: Mapping[str, Any], *, samplers: bool = True) -> list[str]:
        """Write what ``capture`` returned into the objects, also into the samplers or without them.

        Returns:
            The paths of what the objects lack; with ``samplers`` also of generators that only this
            run has.
        """
        # A part without any object, as of a dataset that has no generator now, is lost as a whole.
        lost = [path for name in states.keys() - self.parts for path in _unpack(states, name)]
        for name, (_, changes) in self.parts.items():
            if samplers or not is_of_sampler(name):
                values = _unpack(states, name)
                lost += changes.restore(values, torch.device("cpu"))
                # Generators count as changed: a state without one is of a run without it.
                if samplers:
                    lost += changes.list_generators() - {path.rstrip("'") for path in values}
        return lost

    def undo(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Restore what differs in samplers between two captures and has not changed since."""
        for name, (_, changes) in self.parts.items():
            if is_of_sampler(name):
                changes.undo(_unpack(before, name), _unpack(after, name))

    def settle(self) -> None:
        """Take objects that the first batch has made, such as an open file, as held at first."""
        for name, (_, changes) in self.parts.items():
            if not is_of_sampler(name):
                changes.settle()


def is_of_sampler(name: str) -> bool:
    """Return whether a part is a sampler, whose order is drawn when an epoch starts."""
    return name.startswith(_SAMPLER)


def is_read(name: str) -> bool:
    """Return whether a part is all that is read: not a sampler, the loader, or a generator."""
    return not is_of_sampler(name) and name != LOADER and not name.endswith(_GENERATORS)


def _unpack(states: Mapping[str, Any], name: str) -> dict[str, bytes]:
    values = states.get(name, {}).get(VALUES, {})
    return {path: unpack_bytes(data) for path, data in values.items()}


def list_paths(captured: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """Return the paths under a key of the captured states, with the keys of the loaders."""
    found = (
        f"{loader}.{path}"
        for loader, times in captured.items()
        for states in times.values()
        for own in states.values()
        for path in own.get(key, ())
    )
    return [*dict.fromkeys(found)]


def list_unsaved(captured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why the captured states of loaders cannot be restored."""
    return describe_unsaved(list_paths(captured, UNSAVED))


class WorkerWatch:
    """Reports, in a worker, what reading samples changes in its copies of the objects.

    Args:
        owners: The objects by name.
        report: Called with the path of the first change.
    """

    def __init__(self, owners: Mapping[str, object], report: Callable[[str], object]) -> None:
        self._state = DataState(owners)
        self._report = report
        self._batches = 0

    def end_batch(self, *, last: bool = False) -> None:
        """Look for changes, if it is time to; called after each batch."""
        self._batches += 1
        if self._batches > _CHECKED_BATCHES and self._batches.bit_count() > 1 and not last:
            return
        if self._batches == 1:
            self._state.settle()
        # But of an empty place that was filled once.
        found = (changes.find_first() for _, changes in self._state.parts.values())
        if (path := next(filter(None, found), None)) is not None:
            self._report(path)

    def watch(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the samples of an iterable dataset; look after the first and after the last."""
        for number, sample in enumerate(samples):
            if number == 0:
                self.end_batch()
            yield sample
        self.end_batch(last=True)


def _watch(name: str, owner: Any, others: Collection[int]) -> Changes:
    """Watch an object that loads data."""
    is_sampler = is_of_sampler(name)
    # torch and the loop that iterates set these, the generators among them; the program sets data.
    controls = is_sampler or isinstance(owner, DataLoader)
    hidden = list_controlled(owner) if controls else set()
    own = getattr(owner, "__dict__", {})
    if name.endswith(_GENERATORS):
        base = name.removesuffix(_GENERATORS)
        # In the order of attributes, as one generator may be in several. The loader's dataset and
        # samplers are parts themselves.
        held = {key: part for key, part in own.items() if id(part) not in others}
        kept = {f"{base}.{key}": held[key] for key in held if key not in hidden}
        return Changes(find_generators(kept), leave_out=lambda *_: False)
    left_out = {*others, *(id(own[key]) for key in hidden & own.keys())}

    def leave_out(path: str, value: object) -> bool:
        return value is not owner and (
            id(value) in left_out
            or (is_sampler and isinstance(value, Dataset))
            or _leave_out(path, value)
        )

    owners: dict[str, object] = {_SAMPLER if is_sampler else name: owner}
    if is_read(name):  # the objects with attributes in it, those of libraries too
        owners = {
            path: value
            for path, value in search(owners, depth=_DEPTH, most=_MOST_PARTS)
            if hasattr(value, "__dict__")
            and not isinstance(value, _CODE)
            and not _leave_out(path, value)
        }
    return Changes(
        owners,
        leave_out=leave_out,
        hide=lambda each: hidden if each is owner else (),
        # Of samplers ``undo`` restores values in place. Copies of data could fill the memory.
        copies=is_sampler,
        # A dataset may be defined in a file that the module does not reach, and workers get copies
        # of variables. What samplers read of them is in the state of the dataset or the program.
        namespaces=not is_sampler,
    )


def _leave_out(_path: str, value: Any) -> bool:
    if isinstance(value, DataLoader | Sampler):  # which have a state themselves
        return True
    # Weights of a network that transforms samples are in Lightning's checkpoint if they train.
    if isinstance(value, nn.Parameter) and value.requires_grad:
        return True
    # Such as the module and the datamodule, which are in the state of the program.
    return any(map(is_of_lightning, type(value).__mro__))
