"""Numbers of a dataset that change in a run, such as a count of its epochs.

WebDataset's ``detshuffle`` seeds its order by such a number, and a callback may set one. A resumed
run starts with a new dataset, which has the first values.
"""

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


def write_numbers(dataset: object, numbers: Mapping[str, Mapping[str, float]]) -> None:
    """Set attributes of a dataset and of the objects in it, if they or their classes have them."""
    owners = _find_owners(dataset) if numbers else {}
    for path, values in numbers.items():
        if (owner := owners.get(path)) is not None:
            own, kind = vars(owner), type(owner)
            own.update({n: v for n, v in values.items() if n in own or hasattr(kind, n)})


class WatchedIterator:
    """An iterator over a dataset in a worker, which reports if iterating changes its numbers.

    ``before`` has the numbers of the dataset before its ``__iter__`` returned the iterator;
    ``report`` is called when they have changed.
    """

    def __init__(
        self,
        dataset: object,
        iterator: Iterator[Any],
        before: Numbers,
        report: Callable[[], object],
    ) -> None:
        self._parts = dataset, iterator, before, report
        self._checked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parts[1], name)

    def __iter__(self) -> "WatchedIterator":
        return self

    def __next__(self) -> Any:
        """Return the next sample; compare the numbers after the first and after the last."""
        try:
            sample = next(self._parts[1])
        except StopIteration:
            self._compare()
            raise
        if not self._checked:
            self._checked = True
            self._compare()
        return sample

    def _compare(self) -> None:
        dataset, _, before, report = self._parts
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
