"""State of the objects that load data: what reading samples, or a hook, changes in them.

That is a count of epochs, by which WebDataset's ``detshuffle`` seeds its order, a list that is
shuffled in place, or a number that a callback sets. A resumed run starts with new objects, which
hold their first values.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_d9m.engine.control.data.resumable_sampler import list_controlled
from lightning_d9m.engine.state.changes import Changes, describe_unsaved
from lightning_d9m.engine.state.parts import GENERATOR, find_kind, is_of_lightning
from lightning_d9m.engine.state.plain_data import pack_bytes, unpack_bytes
from lightning_d9m.engine.state.state import search

# The keys of a captured state. What samplers have changed, encoded, by number of the sampler and
# path; and the paths of what they have changed and a checkpoint cannot hold.
CHANGES, UNSAVED = "sampler", "unsaved"
# The same of a loader's dataset and functions; and the paths of what only the log names: caches
# that were filled, and what changes in a loader itself.
DATA, UNSAVED_DATA, LOGGED_DATA = "data", "unsaved data", "logged data"
# The paths of what nothing can read, such as an open database.
UNKNOWN_DATA = "unknown"

LOADER = "loader"
"""The name of a loader among the objects."""

# A dataset of a library holds tables, schemas and locks, and their parts do not change the order.
_DEPTH = 4  # loader -> dataset -> list of stages -> stage
_MOST_PARTS = 10_000
_CODE = (type, FunctionType, ModuleType)
# In a worker each of the first batches is followed by a check, and later those numbered by powers
# of two.
_CHECKED_BATCHES = 16


class DataState:
    """The state of the objects that load data, and of all in them, relative to their first one.

    Generators of datasets have a state of their own: see ``capture_generators``.

    Args:
        owners: The objects by name. What changes in a loader itself is never saved, as Lightning
            iterates it when it is loaded, and again when an epoch starts; most loaders then begin
            again.
        samplers: The samplers of the loader.
        earlier: The states of other loaders. An object that one of them has, too, is compared with
            its first state there.
        saved: The names of objects whose ``state_dict`` another part of a checkpoint has, if they
            have one. They have no state here.
    """

    def __init__(
        self,
        owners: Mapping[str, object],
        samplers: Sequence[object] = (),
        earlier: Iterable["DataState"] = (),
        saved: Collection[str] = (LOADER,),
    ) -> None:
        known = {
            id(own): changes
            for state in earlier
            for own, changes in (*state.data.values(), *state.samplers.values())
        }
        others = {*map(id, owners.values()), *map(id, samplers)}
        self.data: dict[str, tuple[object, Changes]] = {
            name: (own, known.get(id(own)) or _watch(name, own, others))
            for name, own in owners.items()
            if not (name in saved and hasattr(own, "load_state_dict"))
        }
        self.samplers: dict[str, tuple[object, Changes]] = {
            str(number): (sampler, known.get(id(sampler)) or _watch("", sampler, others))
            for number, sampler in enumerate(samplers)
        }

    def capture(self) -> dict[str, Any]:
        """Return what has changed, for ``restore``, and the paths of what cannot be saved."""
        states: dict[str, Any] = {DATA: {}, UNSAVED_DATA: [], LOGGED_DATA: []}
        states |= {CHANGES: {}, UNSAVED: [], UNKNOWN_DATA: []}
        for number, (_, changes) in self.samplers.items():
            found, unknown = changes.capture()
            states[CHANGES] |= {f"{number}.{path}": pack_bytes(own) for path, own in found.items()}
            states[UNSAVED] += [f"{number}.{path}" for path in unknown]
            states[UNKNOWN_DATA] += [f"sampler.{path}" for path in changes.unknown]
        for name, (_, changes) in self.data.items():
            found, unknown = changes.capture()
            states[UNKNOWN_DATA] += changes.unknown
            states[LOGGED_DATA] += changes.expected
            if name == LOADER:
                states[LOGGED_DATA] += [*found, *unknown]
                continue
            states[DATA] |= {path: pack_bytes(own) for path, own in found.items()}
            for path in unknown:
                states[LOGGED_DATA if path in changes.filled else UNSAVED_DATA].append(path)
        return {key: own for key, own in states.items() if own}

    def restore_samplers(self, states: Mapping[str, Any]) -> None:
        """Write what ``capture`` returned into the samplers; warn of what they do not take."""
        for number, (_, changes) in self.samplers.items():
            lost = changes.restore(_select(states, number), torch.device("cpu"))
            _warn_of_lost([f"sampler.{path}" for path in lost])

    def restore_data(self, states: Mapping[str, Any]) -> None:
        """Write what ``capture`` returned into the others; warn of what they do not take."""
        plain = {path: unpack_bytes(data) for path, data in states.get(DATA, {}).items()}
        lost = {path.rstrip("'") for path in plain}
        for _, changes in self.data.values():
            lost = set(changes.restore(plain, torch.device("cpu")))
            plain = {path: own for path, own in plain.items() if path.rstrip("'") in lost}
        _warn_of_lost(lost)

    def undo(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Restore what differs in samplers between two captures and has not changed since."""
        for number, (_, changes) in self.samplers.items():
            changes.undo(_select(before, number), _select(after, number))

    def settle(self) -> None:
        """Take objects that the first batch has made, such as an open file, as held at first."""
        for _, changes in self.data.values():
            changes.settle()


def _select(states: Mapping[str, Any], number: str) -> dict[str, bytes]:
    """Return the encoded values of one sampler."""
    found = {path.partition("."): data for path, data in states.get(CHANGES, {}).items()}
    return {path: unpack_bytes(data) for (own, _, path), data in found.items() if own == number}


def _warn_of_lost(paths: Collection[str]) -> None:
    if paths:
        warnings.warn(
            "The checkpoint holds values that a sampler or dataset lacks, or takes others for: "
            f"{', '.join(sorted(paths))}. Batches may differ from those of an uninterrupted run: "
            "make both as in the run that saved it.",
            stacklevel=3,
        )


def list_unsaved(samplers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why the captured states of loaders cannot be restored, by number of the loader."""
    in_samplers = (
        f"{number}.sampler.{path.partition('.')[2]}"
        for number, states in samplers.items()
        for path in states.get(UNSAVED, ())
    )
    return describe_unsaved([*in_samplers, *list_paths(samplers, UNSAVED_DATA)])


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
    """Watch an object that loads data, or a sampler, which has no name."""
    # Samplers get their epoch from the loop that iterates them, data from the program.
    hidden = list_controlled(owner) - ({"epoch"} if name not in ("", LOADER) else set())
    own = getattr(owner, "__dict__", {})
    left_out = {*others, *(id(own[key]) for key in hidden & own.keys())}
    of_others = Dataset if not name else ()

    def leave_out(path: str, value: object) -> bool:
        return value is not owner and (
            id(value) in left_out
            or isinstance(value, of_others)
            or _leave_out(path, value, generators=bool(name))
        )

    owners: dict[str, object] = {name: owner}
    if name not in ("", LOADER):  # the objects with attributes in it, those of libraries too
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
        copies=not name,
        namespaces=bool(name),
    )


def _leave_out(_path: str, value: Any, *, generators: bool = True) -> bool:
    if isinstance(value, DataLoader | Sampler):
        return True
    if generators and find_kind(value) is GENERATOR:
        return True
    if isinstance(value, nn.Parameter) and value.requires_grad:
        return True
    # Such as the module and the datamodule, which are in the state of the program.
    return any(map(is_of_lightning, type(value).__mro__))
