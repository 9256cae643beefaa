"""State of the objects that load data: what reading samples, or a hook, changes in them.

That is a count of epochs, by which WebDataset's ``detshuffle`` seeds its order, a list that is
shuffled in place, or a number that a callback sets. A resumed run starts with new objects, which
hold their first values.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_d9m.engine.control.data.resumable_sampler import list_controlled
from lightning_d9m.engine.state.changes import Changes, describe_unsaved
from lightning_d9m.engine.state.parts import GENERATOR, find_kind, is_of_lightning
from lightning_d9m.engine.state.plain_data import pack_bytes, unpack_bytes
from lightning_d9m.engine.state.state import find_generators, search

UNSAVED, LOGGED, UNKNOWN = "unsaved", "logged", "unknown"
"""What a captured state has instead of bytes: of what a checkpoint cannot hold; of what only the
log names, caches that were filled and what changes in a loader itself; and of what nothing can
read, such as an open database."""

LOADER = "loader"
"""The name of a loader among the objects."""

# The names of samplers, and the paths of what is in them, begin with it: one dict by path has both,
# of which a checkpoint within an epoch takes samplers from its start, and data from now.
_SAMPLERS = "samplers["
_DEPTH = 4  # loader -> dataset -> list of stages -> stage
_MOST_PARTS = 10_000
_CODE = (type, FunctionType, ModuleType)
# In a worker each of the first batches is followed by a check, and later those numbered by powers
# of two.
_CHECKED_BATCHES = 16


class DataState:
    """The state of the objects that load data, and of all in them, relative to their first one.

    Of an object with a ``state_dict``, which says itself where it is, only generators count.

    Args:
        owners: The objects by name. What changes in a loader itself is never saved, but for its
            generators, as Lightning iterates it when it is loaded, and again when an epoch starts;
            most loaders then begin again.
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
        pairs = [pair for each in earlier for pair in each.parts.values()]
        known = {id(own): changes for own, changes in pairs if own is not None}
        named = {f"{_SAMPLERS}{number}]": own for number, own in enumerate(samplers)} | {**owners}
        others = {*map(id, named.values())}
        self.parts: dict[str, tuple[object, Changes]] = {}
        for name, own in named.items():
            if is_of_sampler(name) or not hasattr(own, "load_state_dict"):
                self.parts[name] = own, known.get(id(own)) or _watch(name, own, others)
            if name == LOADER or name not in self.parts:
                # A dataset may forget its generator in its state. Attributes that torch's loader
                # has are left out: their generators are seeded in each epoch.
                hidden = list_controlled(own) if isinstance(own, DataLoader) else set()
                held = getattr(own, "__dict__", {})
                held = {f"{name}.{key}": held[key] for key in held.keys() - hidden}
                if found := find_generators(held):
                    self.parts[f"{name}.generators"] = None, Changes(found, leave_out=_leave_out)

    def capture(self) -> dict[str, Any]:
        """Return what has changed by path, for ``restore``, or why a checkpoint does not have it.

        Generators count as changed.
        """
        states: dict[str, Any] = {}
        for name, (_, changes) in self.parts.items():
            found, unsaved = changes.capture()
            own = {path: LOGGED if name == LOADER else pack_bytes(found[path]) for path in found}
            # An order depends on what a sampler holds, while a cache of a dataset may be empty.
            cached = () if is_of_sampler(name) else unsaved if name == LOADER else changes.filled
            own |= {path: LOGGED if path in cached else UNSAVED for path in unsaved}
            own |= dict.fromkeys(changes.unknown, UNKNOWN)
            states |= {f"{_find_prefix(name)}{path}": state for path, state in own.items()}
        return states

    def restore(
        self, states: Mapping[str, Any], *, samplers: bool = True, data: bool = True
    ) -> list[str]:
        """Write what ``capture`` returned into the objects; return the paths that they lack."""
        lost = {
            path: unpack_bytes(own)
            for path, own in states.items()
            if isinstance(own, Tensor) and (samplers if is_of_sampler(path) else data)
        }
        for name, (_, changes) in self.parts.items():
            prefix = _find_prefix(name)
            own = _select(lost, prefix)
            missing = {f"{prefix}{path}" for path in changes.restore(own, torch.device("cpu"))}
            taken = {
                f"{prefix}{path}" for path in own if f"{prefix}{path}".rstrip("'") not in missing
            }
            lost = {path: data for path, data in lost.items() if path not in taken}
        return [path.rstrip("'") for path in lost]

    def undo(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Restore what differs in samplers between two captures and has not changed since."""
        captures = [
            {path: unpack_bytes(own) for path, own in each.items() if isinstance(own, Tensor)}
            for each in (before, after)
        ]
        for name, (_, changes) in self.parts.items():
            if is_of_sampler(name):
                changes.undo(*(_select(each, _find_prefix(name)) for each in captures))

    def settle(self) -> None:
        """Take objects that the first batch has made, such as an open file, as held at first."""
        for name, (_, changes) in self.parts.items():
            if not is_of_sampler(name):
                changes.settle()


def is_of_sampler(path: str) -> bool:
    """Return whether a captured state is that of a sampler."""
    return path.startswith(_SAMPLERS)


def _find_prefix(name: str) -> str:
    """Return what a captured state adds to the paths of a sampler, which another may have, too."""
    return f"{name}." if is_of_sampler(name) else ""


def _select(states: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    return {path.removeprefix(prefix): states[path] for path in states if path.startswith(prefix)}


def list_paths(samplers: Mapping[str, Mapping[str, Any]], state: str) -> list[str]:
    """Return the paths of the captured states of loaders that have this one instead of bytes."""
    pairs = ((f"{number}.{path}", own[path]) for number, own in samplers.items() for path in own)
    return [path for path, own in pairs if isinstance(own, str) and own == state]


def list_unsaved(samplers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why the captured states of loaders cannot be restored, by number of the loader."""
    return describe_unsaved(list_paths(samplers, UNSAVED))


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
    """Watch an object that loads data, or a sampler, whose paths have no name."""
    if is_of_sampler(name):
        name = ""
    # Samplers get their epoch from the loop that iterates them, data from the program.
    hidden = list_controlled(owner) - ({"epoch"} if name not in ("", LOADER) else set())
    own = getattr(owner, "__dict__", {})
    left_out = {*others, *(id(own[key]) for key in hidden & own.keys())}
    of_others = Dataset if not name else ()

    def leave_out(path: str, value: object) -> bool:
        return value is not owner and (
            id(value) in left_out
            or isinstance(value, of_others)
            or _leave_out(path, value)
            or (name == LOADER and find_kind(value) is GENERATOR)  # they have a part
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


def _leave_out(_path: str, value: Any) -> bool:
    if isinstance(value, DataLoader | Sampler):
        return True
    if isinstance(value, nn.Parameter) and value.requires_grad:
        return True
    # Such as the module and the datamodule, which are in the state of the program.
    return any(map(is_of_lightning, type(value).__mro__))
