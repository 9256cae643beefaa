"""Agreements of ranks on what they are about to do: a difference is an error instead of a wait.

Before each exchange the ranks compare fingerprints of it. So a rank in the backward pass that meets
a rank at a barrier finds out, and both can report it. The agreement of a backward pass takes 3 to
6 % of a step with four ranks on two cores.
"""

import hashlib
import json
from collections.abc import Sequence

from lightning_d9m.errors import RanksDisagreeError
from lightning_d9m.ranks.ranks import Ranks

_MAX_NAMES = 8
_BYTES = 16  # of a fingerprint, with its length


def agree(ranks: Ranks, activity: str, items: Sequence[str] = ()) -> None:
    """Wait until every rank announces the same activity and items; so this is also a barrier.

    Args:
        ranks: The ranks, seen from this one.
        activity: A description, such as ``"the barrier 'pre_setup'"``.
        items: The parts of it, such as the parameters that are sent.

    Raises:
        RanksDisagreeError: They differ; raised on every rank.
    """
    digest = hashlib.blake2b("\0".join((activity, *items)).encode(), digest_size=8).digest()
    if len(set(ranks.gather_bytes(digest, first=_BYTES))) > 1:
        announced = ranks.gather_bytes(json.dumps([activity, [*items]]).encode())
        found = [json.loads(part) for part in announced]
        raise RanksDisagreeError(
            compose_disagreement(found), intents=[activity for activity, _ in found]
        )


def compose_disagreement(announced: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Describe how the activities and items of the ranks differ."""
    if len({activity for activity, _ in announced}) > 1:
        lines = [f"  rank {rank}: {activity}" for rank, (activity, _) in enumerate(announced)]
        return "\n".join(
            ["The ranks are about to do different things and cannot continue:", *lines]
        )
    sets = [frozenset(items) for _, items in announced]
    common = frozenset[str].intersection(*sets)
    differing = sorted(frozenset[str].union(*sets) - common)
    lines = []
    for name in differing[:_MAX_NAMES]:
        have = [str(rank) for rank, items in enumerate(sets) if name in items]
        lack = [str(rank) for rank, items in enumerate(sets) if name not in items]
        lines.append(f"  {name}: yes on rank {', '.join(have)}; no on rank {', '.join(lack)}")
    if len(differing) > _MAX_NAMES:
        lines.append(f"  and {len(differing) - _MAX_NAMES} more")
    return "\n".join([f"The ranks do not agree on what takes part in {announced[0][0]}:", *lines])
