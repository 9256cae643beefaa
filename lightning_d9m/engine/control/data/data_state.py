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
from lightning_d9m.engine.state.parts import (
    GENERATOR,
    find_kind,
    is_of_lightning,
    name_by_class,
)
from lightning_d9m.engine.state.plain_data import pack_bytes, unpack_bytes
from lightning_d9m.engine.state.state import search

SAMPLERS, DATA = "samplers", "data"
"""The halves of a captured state: of samplers, and of a loader's dataset and functions."""
# The keys of a half: what has changed, encoded, by path; and the paths of what has changed and a
# checkpoint cannot hold, of caches that were filled, which only the log names, and of what nothing
# can read, such as an open database.
CHANGED, UNSAVED, LOGGED, UNKNOWN_DATA = "changed", "unsaved", "logged", "unknown"

_DEPTH = 4  # loader -> dataset -> list of stages -> stage
# A table of samples may have millions of objects, each of which would be compared at every save.
_MOST_PARTS = 10_000
_CODE = (type, FunctionType, ModuleType)
# In a worker each of the first batches is followed by a check, and later those numbered by powers
# of two.
_CHECKED_BATCHES = 16


class DataState:
    """The state of the objects that load data, and of all in them, relative to their first one.

    An object with a ``state_dict`` says itself where it is, and has none here. Generators of
    datasets have a state of their own: see ``capture_generators``. What changes in a loader itself
    is not watched, as Lightning iterates it when it is loaded, and again when an epoch starts; most
    loaders then begin again.

    Args:
        owners: The dataset and the functions of a loader, by name.
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
        known = {
            id(own): changes
            for state in earlier
            for half in state.halves.values()
            for own, changes in half.values()
        }
        data = {n: own for n, own in owners.items() if not hasattr(own, "load_state_dict")}
        # By class, and not by number: two loaders may have the same sampler at different places,
        # and a resumed run, which skips the sanity check, may load them in another order.
        halves = {SAMPLERS: name_by_class("sampler", samplers), DATA: data}
        others = {*map(id, owners.values()), *map(id, samplers)}
        self.halves: dict[str, dict[str, tuple[object, Changes]]] = {
            half: {
                name: (own, known.get(id(own)) or _watch(half, name, own, others))
                for name, own in named.items()
            }
            for half, named in halves.items()
        }

    def capture(self) -> dict[str, Any]:
        """Return what has changed, for ``restore``, and the paths of what cannot be saved."""
        found: dict[str, Any] = {}
        for half, watched in self.halves.items():
            states: dict[str, Any] = {CHANGED: {}, UNSAVED: [], LOGGED: [], UNKNOWN_DATA: []}
            for _, changes in watched.values():
                saved, unsaved = changes.capture()
                states[CHANGED] |= {path: pack_bytes(own) for path, own in saved.items()}
                states[UNKNOWN_DATA] += changes.unknown
                for path in unsaved:
                    # Samples that a dataset keeps do not matter; what a sampler keeps decides the
                    # order.
                    is_cache = half == DATA and path in changes.filled
                    states[LOGGED if is_cache else UNSAVED].append(path)
            found[half] = {key: own for key, own in states.items() if own}
        return {half: states for half, states in found.items() if states}

    def restore(self, states: Mapping[str, Any], half: str) -> None:
        """Write a half of what ``capture`` returned; warn of what the objects do not take."""
        changed = states.get(half, {}).get(CHANGED, {})
        plain = {path: unpack_bytes(data) for path, data in changed.items()}
        lost = {path.rstrip("'") for path in plain}
        for _, changes in self.halves[half].values():
            lost = set(changes.restore(plain, torch.device("cpu")))
            plain = {path: own for path, own in plain.items() if path.rstrip("'") in lost}
        if lost:
            warnings.warn(
                "The checkpoint holds values that a sampler or dataset lacks, or takes others for: "
                f"{', '.join(sorted(lost))}. Batches may differ from those of an uninterrupted "
                "run: make both as in the run that saved it.",
                stacklevel=2,
            )

    def settle(self) -> None:
        """Take objects that the first batch has made, such as an open file, as held at first."""
        for _, changes in self.halves[DATA].values():
            changes.settle()


def list_unsaved(loaders: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why the captured states of loaders cannot be restored, by number of the loader."""
    return describe_unsaved(list_paths(loaders, UNSAVED))


def list_paths(loaders: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """Return the paths under a key of the captured states, with the number of the loader."""
    halves = ((number, half) for number, states in loaders.items() for half in states.values())
    paths = ((number, path.rstrip("'")) for number, half in halves for path in half.get(key, ()))
    return [f"{number}.{path}" for number, path in paths]


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
        found = (changes.find_first() for _, changes in self._state.halves[DATA].values())
        if (path := next(filter(None, found), None)) is not None:
            self._report(path)

    def watch(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the samples of an iterable dataset; look after the first and after the last."""
        for number, sample in enumerate(samples):
            if number == 0:
                self.end_batch()
            yield sample
        self.end_batch(last=True)


def _watch(half: str, name: str, owner: Any, others: Collection[int]) -> Changes:
    """Watch an object that loads data."""
    is_sampler = half == SAMPLERS
    # Samplers get their epoch from the loop that iterates them, data from the program.
    hidden = list_controlled(owner) - (set() if is_sampler else {"epoch"})
    own = getattr(owner, "__dict__", {})
    left_out = {*others, *(id(own[key]) for key in hidden & own.keys())}
    of_others = Dataset if is_sampler else ()

    def leave_out(path: str, value: object) -> bool:
        return value is not owner and (
            id(value) in left_out
            or isinstance(value, of_others)
            or _leave_out(path, value, generators=not is_sampler)
        )

    owners: dict[str, object] = {name: owner}
    if not is_sampler:  # the objects with attributes in it, those of libraries too
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
        unlimited=is_sampler,
        namespaces=not is_sampler,
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
