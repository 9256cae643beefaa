"""Digests of a few steps, which each rank keeps until the ranks are compared."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from lightning_d9m.ranks.ranks import Gather

GROUPS = ("weights", "buffers", "optimizers", "schedulers")
_MOST = 32
_ROW = 1 + len(GROUPS)  # the step, then a hash of each group
_BITS = 63


class StepDigests:
    """Keeps a hash of each group after every n-th step; n doubles as soon as there are too many.

    So the number of digests grows with the logarithm of the number of steps. Ranks keep the same
    steps, as these depend on nothing else.
    """

    def __init__(self) -> None:
        self._every = 1
        self._kept: dict[int, list[int]] = {}

    def wants(self, step: int) -> bool:
        """Return whether the state after a step should be added."""
        return step % self._every == 0 and step not in self._kept

    def add(self, step: int, groups: Mapping[str, Mapping[str, str]]) -> None:
        """Add the digests of the state that must be equal on all ranks."""
        self._kept[step] = [_hash(groups.get(group, {})) for group in GROUPS]
        while len(self._kept) > _MOST:
            self._every *= 2
            self._kept = {at: row for at, row in self._kept.items() if at % self._every == 0}

    def forget(self) -> None:
        """Forget the steps, because the ranks agree."""
        self._kept.clear()

    def find_first(self, gather: Gather) -> dict[str, tuple[int | None, int]]:
        """Return by group the last step that was equal on all ranks and the first that was not.

        Every rank calls this and gets the same.
        """
        own = [number for step, row in self._kept.items() for number in (step, *row)]
        own += [-1] * (_ROW * _MOST - len(own))
        tables = [_read(row) for row in gather(own)]
        found: dict[str, tuple[int | None, int]] = {}
        before: dict[str, int] = {}
        for step in sorted(set.intersection(*map(set, tables))):
            for group, *values in zip(GROUPS, *(table[step] for table in tables), strict=True):
                if len(set(values)) == 1:
                    before[group] = step
                elif group not in found:
                    found[group] = (before.get(group), step)
        return found


def _read(row: Sequence[int]) -> dict[int, Sequence[int]]:
    starts = range(0, len(row), _ROW)
    return {row[at]: row[at + 1 : at + _ROW] for at in starts if row[at] >= 0}


def _hash(entries: Mapping[str, str]) -> int:
    data = repr(list(entries.items())).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> (64 - _BITS)
