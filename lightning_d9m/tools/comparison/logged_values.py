"""The loss and the logged values of two runs, collected while their ledgers are compared."""

from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_d9m.engine.ledger.differences import Divergence
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.engine.ledger.keys import Item

MAX_SERIES = 24
ValuePair: TypeAlias = tuple[int, float | None, float | None]


@dataclass(slots=True)
class LoggedValues:
    """Collects the values at the ends of epochs; pass ``watch`` to ``compare_ledgers``.

    Attributes:
        pairs: The loss and the logged values of the first rank by name, at most ``MAX_SERIES``:
            (step, the reference's value, this run's value), None where a run has no such record.
        rank: The rank whose values are kept; None before.
        left_out: The names of its other values.
    """

    pairs: dict[str, list[ValuePair]] = field(default_factory=dict)
    rank: int | None = None
    left_out: set[str] = field(default_factory=set)

    def watch(self, rank: int, one: Item | None, other: Item | None, _: Divergence | None) -> None:
        """Keep the values of a pair of records; a ``RecordObserver``."""
        self.rank = rank if self.rank is None else self.rank
        both = [own for own in (one, other) if isinstance(own, Digests) and own.moment == "epoch"]
        if not both or rank != self.rank:
            return
        values = [own.list_values() if isinstance(own, Digests) else {} for own in (one, other)]
        for name in values[0] | values[1]:
            if name in self.pairs or len(self.pairs) < MAX_SERIES:
                pair = (values[0].get(name), values[1].get(name))
                self.pairs.setdefault(name, []).append((both[-1].step, *pair))
            else:
                self.left_out.add(name)
