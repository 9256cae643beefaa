"""Numbers of a dataset that change in a run, such as a count of its epochs.

WebDataset's ``detshuffle`` seeds its order by such a number, and a callback may set one. A resumed
run starts with a new dataset, which has the first values.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_d9m.control.object_walk import (
    GENERATOR,
    IMPORTED,
    MODULE,
    ObjectWalk,
    Parts,
)

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
    for path, owner in _Walk().find_owners(dataset).items():
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
    for path, owner in _Walk().find_owners(dataset).items():
        own = vars(owner)
        for name, old in first.get(path, {}).items():
            value = own.get(name)
            if type(value) is type(old) and value != old and _is_number(value):
                found.setdefault(path, {})[name] = value
    return found


def write_numbers(dataset: object, numbers: Mapping[str, Mapping[str, float]]) -> None:
    """Set attributes of a dataset and of the objects in it, if they or their classes have them."""
    owners = _Walk().find_owners(dataset) if numbers else {}
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


class _Walk(ObjectWalk):
    """A walk from a dataset to the objects in its attributes, lists and dicts."""

    def __init__(self) -> None:
        super().__init__(
            depth=_DEPTH,
            most_visited=_MOST_VISITED,
            most_deep=_MOST_VISITED,
            ends=(GENERATOR, MODULE, IMPORTED),
        )

    def find_owners(self, dataset: object) -> dict[str, object]:
        """Return the objects with attributes by path."""
        found: dict[str, object] = {}
        # `name_path` would walk back to the dataset from each object, and nearly all are named.
        paths: dict[int, str] = {}
        for step in self.visit([("dataset", dataset)]):
            holder, name, value, kind, *_ = step
            path = paths[id(step)] = f"{name}" if holder is None else f"{paths[id(holder)]}.{name}"
            if kind not in (MODULE, IMPORTED) and getattr(value, "__dict__", None):
                found[path] = value
        return found

    def choose(self, parts: Parts, _sample: Parts, _depth: int) -> Parts:
        """Return all parts: each item of a list may count for itself."""
        return parts
