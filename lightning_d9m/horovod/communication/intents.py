"""Announcements of collectives, and how those of ranks differ."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_d9m.errors import RanksDisagreeError

_MAX_NAMES = 8


@dataclass(frozen=True)
class CollectiveIntent:
    """The exchange that a rank is about to start.

    Attributes:
        activity: A description, such as ``"the barrier 'pre_setup'"``.
        items: The parts of the exchange, such as the parameters that have gradients.
    """

    activity: str
    items: tuple[str, ...] = ()

    def fingerprint(self) -> bytes:
        """Return a hash of 8 bytes."""
        text = "\0".join((self.activity, *self.items)).encode()
        return hashlib.blake2b(text, digest_size=8).digest()


def compose_disagreement(intents: Sequence[CollectiveIntent]) -> str:
    """Describe how the intents of the ranks differ."""
    if len({intent.activity for intent in intents}) > 1:
        lines = [f"  rank {rank}: {intent.activity}" for rank, intent in enumerate(intents)]
        return "\n".join(
            ["The ranks are about to do different things and cannot continue:", *lines]
        )
    sets = [frozenset(intent.items) for intent in intents]
    common = frozenset[str].intersection(*sets)
    differing = sorted(frozenset[str].union(*sets) - common)
    lines = []
    for name in differing[:_MAX_NAMES]:
        have = [str(rank) for rank, items in enumerate(sets) if name in items]
        lack = [str(rank) for rank, items in enumerate(sets) if name not in items]
        lines.append(f"  {name}: yes on rank {', '.join(have)}; no on rank {', '.join(lack)}")
    if len(differing) > _MAX_NAMES:
        lines.append(f"  and {len(differing) - _MAX_NAMES} more")
    return "\n".join(
        [f"The ranks do not agree on what takes part in {intents[0].activity}:", *lines]
    )


def make_disagreement(intents: Sequence[CollectiveIntent]) -> RanksDisagreeError:
    """Return the error that says how the intents of the ranks differ."""
    return RanksDisagreeError(
        compose_disagreement(intents), intents=[each.activity for each in intents]
    )
