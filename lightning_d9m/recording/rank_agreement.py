"""Whether all ranks hold the same bits: digests as vectors of integers, gathered by the caller."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from lightning_d9m.comparison.record_diff import NAMES_KEPT
from lightning_d9m.errors import DriftError
from lightning_d9m.text import describe_moment, describe_names, escape

_HALF = 8
_NAMES = "names of the entries"


@dataclass(frozen=True, slots=True)
class RankDifference:
    """How the ranks disagree.

    Attributes:
        rank: The first rank that differs.
        ranks: All ranks that differ.
        expected_rank: The rank that the others are held against.
        names: The first names that differ on ``rank``, at most ``NAMES_KEPT``.
        count: Number of entries that differ on ``rank``.
        total: Number of entries that were compared.
        expected: The digest of the first of ``names`` on ``expected_rank``.
        actual: The same on ``rank``.
    """

    rank: int
    ranks: tuple[int, ...]
    expected_rank: int
    names: tuple[str, ...]
    count: int
    total: int
    expected: str
    actual: str


def encode_digests(entries: Mapping[str, str]) -> list[int]:
    """Return digests as int64 values: two for the names, then two for each digest, in order.

    The digest of the names comes first, so that ranks that list other names are found rather than
    held against each other entry by entry.
    """
    names = blake2b(repr(list(entries)).encode(), digest_size=2 * _HALF).hexdigest()
    return [part for value in (names, *entries.values()) for part in _split(value)]


def compare_ranks(names: Sequence[str], vectors: Sequence[Sequence[int]]) -> RankDifference | None:
    """Compare what ``encode_digests`` gave on each rank.

    Rank 0 is what the others are held against, unless all the others agree with each other: then
    rank 0 is the one that differs. With two ranks nobody can tell which is right, and rank 1 is
    named.

    Args:
        names: The names that this rank encoded.
        vectors: One vector for each rank, in order of ranks; every rank gathers the same.

    Returns:
        How they differ, the same on all ranks that encoded the same names, or None when all agree.

    Raises:
        ValueError: When the vectors do not fit the names, so that nothing was compared.
    """
    lengths = sorted({len(vector) for vector in vectors})
    if lengths != [2 * len(names) + 2]:
        raise ValueError(
            f"Vectors of {lengths} integers were gathered for {len(names)} names; each must have "
            f"{2 * len(names) + 2}. All ranks must encode the same names."
        )
    base = list(vectors[0])
    differing = [rank for rank, vector in enumerate(vectors) if list(vector) != base]
    if not differing:
        return None
    expected_rank = 0
    others = len(vectors) - 1
    if 1 < others == len(differing) and all(list(v) == list(vectors[1]) for v in vectors[2:]):
        expected_rank, differing, base = 1, [0], list(vectors[1])
    rank = differing[0]
    actual = list(vectors[rank])
    all_names = (_NAMES, *names)
    places = [at for at in range(len(all_names)) if _pair(base, at) != _pair(actual, at)]
    if places[0] == 0:
        places = [0]
    return RankDifference(
        rank=rank,
        ranks=tuple(differing),
        expected_rank=expected_rank,
        names=tuple(all_names[at] for at in places[:NAMES_KEPT]),
        count=len(places),
        total=len(names),
        expected=_join(*_pair(base, places[0])),
        actual=_join(*_pair(actual, places[0])),
    )


def rank_error(
    difference: RankDifference, *, moment: str, epoch: int, step: int, group: str = "weights"
) -> DriftError:
    """Build the error that says which rank left the others."""
    first, expected_rank = difference.rank, difference.expected_rank
    labels = [f"expected (rank {expected_rank}):", f"actual (rank {first}):"]
    width = max(len(label) for label in labels)
    if difference.ranks[1:]:
        who = f"Ranks {', '.join(str(rank) for rank in difference.ranks[:8])}"
        who += f"{', ...' if difference.ranks[8:] else ''} differ"
    else:
        who = f"Rank {first} differs"
    if difference.names == (_NAMES,):
        what = f"they do not list the same {escape(group)}"
    else:
        named = describe_names(difference.names, difference.count)
        what = f"{difference.count} of {difference.total} {escape(group)} differ, first {named}"
    return DriftError(
        f"{who} from rank {expected_rank} in {describe_moment(moment, epoch, step)}: {what}.\n"
        f"  {labels[0]:<{width}} {difference.expected}\n"
        f"  {labels[1]:<{width}} {difference.actual}\n"
        "All ranks must hold the same bits after each step. Look for what only one rank does: a "
        "change to its weights, a module that is not synchronised, a failing device.",
        moment=moment,
        epoch=epoch,
        step=step,
        rank=first,
        group=group,
        names=difference.names,
        count=difference.count,
        total=difference.total,
        expected=difference.expected,
        actual=difference.actual,
    )


def _split(digest: str) -> tuple[int, int]:
    data = bytes.fromhex(digest)
    return (
        int.from_bytes(data[:_HALF], "big", signed=True),
        int.from_bytes(data[_HALF:], "big", signed=True),
    )


def _join(high: int, low: int) -> str:
    halves = [part.to_bytes(_HALF, "big", signed=True) for part in (high, low)]
    return b"".join(halves).hex()


def _pair(vector: Sequence[int], at: int) -> tuple[int, int]:
    return vector[2 * at], vector[2 * at + 1]
