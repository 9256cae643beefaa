"""Hashing on several threads, which works because hash functions release the interpreter lock."""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_on_threads(
    function: Callable[[Item], Result], items: Collection[Item], threads: int
) -> list[Result]:
    """Return the results of a function, in the order of the items.

    A single thread is the caller's.
    """
    results: Iterator[Result] = map(function, items)
    if threads == 1:
        return [*results]
    with ThreadPoolExecutor(threads) as pool:
        # No thread starts while the interpreter ends, when the run of a loop without a Recorder
        # does.
        with suppress(RuntimeError):
            results = pool.map(function, items)
        return [*results]
