"""State of the objects that load data: what reading samples, or a hook, changes in them.

That is a count of epochs, by which WebDataset's ``detshuffle`` seeds its order, a list that is
shuffled in place, or a number that a callback sets. A resumed run starts with new objects, which
hold their first values.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_d9m.engine.control.data.resumable_sampler import (
    list_controlled,
    list_loader_attributes,
)
from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.engine.state.changes import Changes, describe_unsaved
from lightning_d9m.engine.state.parts import is_of_lightning
from lightning_d9m.engine.state.plain_data import pack_bytes, unpack_bytes
from lightning_d9m.engine.state.state import find_generators, search

# The keys of a captured state. What samplers have changed, encoded, by path; and the paths of what
# they have changed and a checkpoint cannot hold.
CHANGES, UNSAVED = "sampler", "unsaved"
# The same of a loader's dataset and functions; and the paths of what only the log names: caches
# that were filled, and what changes in a loader itself.
DATA, UNSAVED_DATA, LOGGED_DATA = "data", "unsaved data", "logged data"
# How many batches of the epoch were drawn, and the digest of what samplers had changed then.
DRAWN = "drawn"
# The paths of what nothing can read, such as an open database.
UNKNOWN_DATA = "unknown"

LOADER, ADDED = "loader", "loader.__dict__"
"""The names, among the objects, of a loader of the program, and of the attributes of torch's."""
_SAMPLER = "sampler"  # begins the names of samplers

# A dataset of a library holds tables, schemas and locks, and their parts do not change the order.
_DEPTH = 4  # loader -> dataset -> list of stages -> stage
_MOST_PARTS = 10_000
_CODE = (type, FunctionType, ModuleType)
_Watched: TypeAlias = dict[str, tuple[object, Changes]]
# In a worker each of the first batches is followed by a check, and later those numbered by powers
# of two.
_CHECKED_BATCHES = 16


class DataState:
    """The state of the objects that load data, and of all in them, relative to their first one.

    An object with a ``state_dict`` says itself where it is, and has none here. Generators that
    ``capture_generators`` finds have a state of their own.

    Args:
        owners: The objects by name. What changes in a loader of the program is never saved, as
            Lightning iterates it when it is loaded, and again when an epoch starts; most loaders
            then begin again.
        samplers: The samplers of the loader.
        earlier: The states of other loaders. An object that one of them has, too, is compared with
            its first state there.
    """

    def __init__(
        self,
        owners: Mapping[str, object],
        samplers: Sequence[object] = (),
        earlier: Iterable["DataState"] = (),
    ) -> None:
        watched = {
            id(own): changes
            for state in earlier
            for own, changes in (*state.data.values(), *state.samplers.values())
        }
        others = {*map(id, owners.values()), *map(id, samplers)}

        def watch(named: Mapping[str, object]) -> _Watched:
            return {
                name: (own, watched.get(id(own)) or _watch(name, own, others))
                for name, own in named.items()
            }

        says = {name for name, own in owners.items() if hasattr(own, "load_state_dict")}
        self.data: _Watched = watch({name: own for name, own in owners.items() if name not in says})
        self.samplers: _Watched = watch(
            {f"{_SAMPLER}{n or ''}": own for n, own in enumerate(samplers)}
        )

    def capture(self) -> dict[str, Any]:
        """Return what has changed, for ``restore``, and the paths of what cannot be saved."""
        states: dict[str, Any] = {CHANGES: {}, UNSAVED: [], UNKNOWN_DATA: []}
        states |= {DATA: {}, UNSAVED_DATA: [], LOGGED_DATA: []}
        for name, (_, changes) in (self.samplers | self.data).items():
            is_data = name in self.data
            found, unsaved = changes.capture()
            states[UNKNOWN_DATA] += changes.unknown
            if name == LOADER:
                states[LOGGED_DATA] += [*found, *unsaved]
                continue
            # A sampler that loaders share has the path that it has in the first of them.
            prefix = "" if is_data else f"{name} "
            packed = {f"{prefix}{path}": pack_bytes(own) for path, own in found.items()}
            states[DATA if is_data else CHANGES] |= packed
            for path in unsaved:
                key = UNSAVED_DATA if is_data else UNSAVED
                states[LOGGED_DATA if is_data and path in changes.filled else key].append(path)
        return {key: own for key, own in states.items() if own}

    def digest_samplers(self) -> str:
        """Return the digest of what has changed in samplers; empty if nothing has."""
        found = {
            f"{name} {path}": own
            for name, (_, each) in self.samplers.items()
            for path, own in each.capture()[0].items()
        }
        return digest_value(found) if found else ""

    def restore(self, states: Mapping[str, Any], key: str) -> None:
        """Write what ``capture`` returned into the samplers (``CHANGES``) or the others (``DATA``).

        A warning names what they do not take.
        """
        cpu, lost = torch.device("cpu"), set[str]()
        for name, (_, changes) in self.samplers.items() if key == CHANGES else ():
            lost |= {*changes.restore(_unpack(states, key, f"{name} "), cpu)}
        plain = _unpack(states, key) if key == DATA else {}
        lost |= {path.rstrip("'") for path in plain}
        for _, changes in self.data.values() if key == DATA else ():
            lost = set(changes.restore(plain, cpu))
            plain = {path: own for path, own in plain.items() if path.rstrip("'") in lost}
        if lost:
            warnings.warn(
                "The checkpoint holds values that a sampler or dataset lacks, or takes others for: "
                f"{', '.join(sorted(lost))}. Batches may differ from those of an uninterrupted "
                "run: make both as in the run that saved it.",
                stacklevel=2,
            )

    def undo(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Restore what differs in samplers between two captures and has not changed since."""
        for name, (_, changes) in self.samplers.items():
            changes.undo(*(_unpack(own, CHANGES, f"{name} ") for own in (before, after)))

    def settle(self) -> None:
        """Take objects that the first batch has made, such as an open file, as held at first."""
        for _, changes in self.data.values():
            changes.settle()


def _unpack(states: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, bytes]:
    return {
        path.removeprefix(prefix): unpack_bytes(data)
        for path, data in states.get(key, {}).items()
        if path.startswith(prefix)
    }


def list_unsaved(samplers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why the captured states of loaders cannot be restored, by number of the loader."""
    return describe_unsaved([*list_paths(samplers, UNSAVED), *list_paths(samplers, UNSAVED_DATA)])


def list_paths(samplers: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """Return the paths under a key of the captured states, with the number of the loader."""
    return [f"{number}.{path}" for number, own in samplers.items() for path in own.get(key, ())]


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
        found = (changes.find_first() for _, changes in self._state.data.values())
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
    """Watch an object that loads data, or a sampler."""
    is_sampler, is_data = name.startswith(_SAMPLER), not name.startswith((_SAMPLER, LOADER))
    # Samplers get their epoch from the loop that iterates them, data from the program.
    hidden = list_controlled(owner) - ({"epoch"} if is_data else set())
    own: Any = owner if name == ADDED else getattr(owner, "__dict__", {})
    hidden |= list_loader_attributes() if name == ADDED else set()
    left_out = {*others, *(id(own[key]) for key in hidden & own.keys())}
    if not is_sampler:
        left_out |= {*map(id, find_generators({name: owner}).values())}
    of_others = Dataset if is_sampler else ()

    def leave_out(_path: str, value: object) -> bool:
        return value is not owner and (
            id(value) in left_out or isinstance(value, of_others) or _leave_out(value)
        )

    owners: dict[str, object] = {name: owner}
    if is_data:  # the objects with attributes in it, those of libraries too
        owners = {
            path: value
            for path, value in search(owners, depth=_DEPTH, most=_MOST_PARTS)
            if hasattr(value, "__dict__") and not isinstance(value, _CODE) and not _leave_out(value)
        }
    return Changes(
        owners,
        leave_out=leave_out,
        hide=lambda each: hidden if each is owner else (),
        copies=is_sampler,
        namespaces=not is_sampler,
    )


def _leave_out(value: Any) -> bool:
    if isinstance(value, DataLoader | Sampler):
        return True
    if isinstance(value, nn.Parameter) and value.requires_grad:
        return True
    # Such as the module and the datamodule, which are in the state of the program.
    return any(map(is_of_lightning, type(value).__mro__))
