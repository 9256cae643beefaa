"""Two runs that are compared while they run, so that both end at their first difference.

Numbers that a program logs, such as measured times, may differ without an effect on the training.
"""

from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import chain, islice
from pathlib import Path

from lightning_d9m.engine.ledger.differences import find_difference
from lightning_d9m.engine.ledger.format.reader import RankReader
from lightning_d9m.engine.ledger.format.records import (
    End,
    ProbeLayout,
    Resume,
    RunFacts,
    StepDigests,
)
from lightning_d9m.engine.ledger.keys import Item
from lightning_d9m.engine.ledger.kinds import EXCEPTION
from lightning_d9m.errors import LedgerError
from lightning_d9m.tools.comparison.ledgers import EVALUATED

# Records after which a difference of what a fit begins with counts: before, a file may be that of
# another process, which takes the same number in the other run.
_SETTLED = 20


class PairWatch(AbstractContextManager["PairWatch"]):
    """Compares the ledgers of two runs as far as both go.

    A program that fits in several processes at once may number its ledgers in any order: then
    nothing is compared before both have ended.

    Args:
        folders: The folder of each run.
    """

    def __init__(self, folders: tuple[Path, Path]) -> None:
        self._folders = folders
        # By name, for each run, what reads its file and the record that was not compared yet.
        self._files: dict[str, list[tuple[RankReader, list[Item]]]] = {}
        self._differs = False
        self._begun: dict[str, int] = {}  # how many records follow such a difference

    def differs(self) -> bool:
        """Read what both have written since the last call; return whether the runs differ."""
        self._open_new()
        headers = [one.header for (one, _), _ in self._files.values()]
        fits = [header.fit for header in headers if header.rank == 0]
        if len({*fits}) == len(fits):
            self._differs = self._differs or any(map(self._compare, self._files))
        return self._differs

    def __exit__(self, *_: object) -> None:
        for reader, _waiting in chain(*self._files.values()):
            reader.close()

    def _open_new(self) -> None:
        """Open the files that both runs have by now, with a whole header in each."""
        one, other = (
            {str(path.relative_to(folder)) for path in folder.glob("fit-*/rank-*.jsonl")}
            for folder in self._folders
        )
        for name in sorted(one & other - self._files.keys()):
            with suppress(LedgerError), ExitStack() as opened:
                paths = (own / name for own in self._folders)
                readers = [opened.enter_context(RankReader(path)) for path in paths]
                self._files[name] = [(reader, []) for reader in readers]
                opened.pop_all()  # of both or none: the other header may come later

    def _compare(self, name: str) -> bool:
        files = self._files[name]
        while True:
            for reader, waiting in files:
                if not waiting:
                    waiting.extend(islice(filter(_counts, reader.records()), 1))
            if not all(waiting for _, waiting in files):
                return False
            item, counterpart = (waiting.pop() for _, waiting in files)
            if name in self._begun:
                self._begun[name] += 1
            if item != counterpart and _differ(item, counterpart):
                if name not in self._begun and not _begins(item):
                    return True
                self._begun.setdefault(name, 0)
            if self._begun.get(name, 0) >= _SETTLED:
                return True


def _counts(item: Item) -> bool:
    """Return whether the other run should have a record, too.

    Two runs need not save at the same steps, and end for their own reasons; of an exception that
    ended a run, its failure decides. It may end a run within a batch, whose probes then have a
    different layout: a layout is compared as part of the probes that name it.
    """
    is_own = isinstance(item, StepDigests | Resume | End | ProbeLayout)
    return not is_own and getattr(item, "moment", "") != EXCEPTION


def _differ(one: Item, other: Item) -> bool:
    """Return whether more than logged values and evaluations differ."""
    if type(one) is not type(other):
        return True
    found = find_difference(one, other)
    return found is not None and not EVALUATED.issuperset(found.by_kind)


def _begins(item: Item) -> bool:
    """Return whether a record tells what a fit begins with."""
    return isinstance(item, RunFacts) or getattr(item, "moment", "") == "initial"
