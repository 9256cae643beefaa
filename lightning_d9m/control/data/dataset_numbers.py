"""Numbers of a dataset that change in a run, such as a count of its epochs.

WebDataset's ``detshuffle`` seeds its order by such a number, and a callback may set one. A resumed
run starts with a new dataset, which has the first values.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from lightning_d9m.state.search import search

Numbers = dict[str, dict[str, float]]
"""Numbers by the name of the attribute, by the path of the object that has it."""

NUMBERS = "dataset numbers"
"""The key of the numbers of a loader's dataset, beside the states of its samplers' generators."""

_DEPTH = 4  # loader -> dataset -> list of stages -> stage
_MOST_VISITED = 1000
# Checkpoints hold integers of 64 bits.
_LARGEST = 2**63


def read_first_numbers(dataset: object) -> Numbers:
    """Return the attributes that are numbers, of a dataset and of the objects in it.

    They include numbers of classes, which an object may replace later.
    """
    found: Numbers = {}
    of_classes: dict[type, dict[str, float]] = {}
    for path, owner in _find_owners(dataset).items():
        kind, own = type(owner), vars(owner)
        if kind not in of_classes:
            merged = {name: v for base in reversed(kind.__mro__) for name, v in vars(base).items()}
            of_classes[kind] = _keep_numbers(merged)
        inherited = {name: v for name, v in of_classes[kind].items() if name not in own}
        found[path] = inherited | _keep_numbers(own)
    return found


def _keep_numbers(attributes: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in attributes.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return type(value) in (bool, float) or (type(value) is int and abs(value) < _LARGEST)


def find_changed_numbers(first: Numbers, dataset: object) -> Numbers:
    """Return the numbers that are not as they were first, and not of another type."""
    found: Numbers = {}
    for path, owner in _find_owners(dataset).items():
        own = vars(owner)
        for name, old in first.get(path, {}).items():
            value = own.get(name)
            if type(value) is type(old) and value != old and _is_number(value):
                found.setdefault(path, {})[name] = value
    return found


class DatasetNumbers:
    """The numbers of a dataset, relative to those before it was first iterated.

    A dataset with a ``state_dict`` says itself where it is, and has none here.
    """

    def __init__(self, dataset: object) -> None:
        tracked = hasattr(dataset, "__dict__") and not hasattr(dataset, "load_state_dict")
        self.dataset = weakref.ref(dataset) if tracked else lambda: None
        self._first = read_first_numbers(dataset) if tracked else {}

    def capture(self) -> dict[str, Numbers]:
        """Return what has changed, for ``restore``."""
        dataset = self.dataset()
        changed = {} if dataset is None else find_changed_numbers(self._first, dataset)
        return {NUMBERS: changed} if changed else {}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set attributes of the dataset and of objects in it, if they or their classes have them.

        Args:
            states: What ``capture`` returned, among the states of a loader.
        """
        numbers = states.get(NUMBERS)
        owners = _find_owners(self.dataset()) if numbers else {}
        for path, values in (numbers or {}).items():
            if (owner := owners.get(path)) is not None:
                own, kind = vars(owner), type(owner)
                own.update({n: v for n, v in values.items() if n in own or hasattr(kind, n)})


def watch_iterator(
    dataset: object, iterator: Iterator[Any], before: Numbers, report: Callable[[], object]
) -> Iterator[Any]:
    """Yield the samples of a dataset in a worker, and report if that changes its numbers.

    ``before`` has the numbers before ``__iter__`` returned the iterator. They are compared after
    the first sample and after the last.
    """
    for number, sample in enumerate(iterator):
        if number == 0 and find_changed_numbers(before, dataset):
            report()
        yield sample
    if find_changed_numbers(before, dataset):
        report()


def _find_owners(dataset: object) -> dict[str, Any]:
    """Return the dataset and the objects in it that have attributes, by path."""
    found = search({"dataset": dataset}, depth=_DEPTH, most=_MOST_VISITED)
    return {
        path: value
        for path, value in found
        if getattr(value, "__dict__", None) and not isinstance(value, nn.Module | ModuleType)
    }
