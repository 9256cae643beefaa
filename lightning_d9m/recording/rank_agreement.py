"""The comparison of digests across ranks, as vectors of integers that all ranks gather."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from lightning_d9m.comparison.differences import NAMES_KEPT
from lightning_d9m.errors import DriftError
from lightning_d9m.recording.collective import Gather
from lightning_d9m.recording.replicated_state import ReplicatedState
from lightning_d9m.recording.step_digests import GROUPS, StepDigests
from lightning_d9m.text import describe_moment, describe_names, describe_pair, escape

_HALVES = Struct(">qq")  # of a digest
_NAMES = "names of the entries"
# The words for a group's entries in messages.
_ENTRIES = {"optimizers": "optimizer entries"}
# Integers in a row of ``RankAgreement.summarize`` for each group: names, then digests.
_SUMMARY = 4


@dataclass(frozen=True, slots=True)
class RankDifference:
    """The entries of a group that differ across ranks.

    Attributes:
        rank: The first rank that differs.
        ranks: All ranks that differ.
        world_size: Number of ranks.
        expected_rank: The rank that the others are compared with.
        names: The first names that differ on ``rank``, at most ``NAMES_KEPT``.
        count: Number of entries that differ on ``rank``.
        total: Number of entries that were compared.
        expected: The digest of the first of ``names`` on ``expected_rank``.
        actual: The same on ``rank``.
    """

    rank: int
    ranks: tuple[int, ...]
    world_size: int
    expected_rank: int
    names: tuple[str, ...]
    count: int
    total: int
    expected: str
    actual: str


def encode_digests(entries: Mapping[str, str]) -> list[int]:
    """Return digests as int64 values: two for the names, then two for each digest, in order.

    The digest of the names comes first. Ranks that list different names are not compared entry by
    entry.
    """
    names = _hash_texts(entries)
    return [part for value in (names, *entries.values()) for part in _split(value)]


def _hash_texts(texts: Collection[str]) -> str:
    return blake2b(repr(list(texts)).encode(), digest_size=_HALVES.size).hexdigest()


def compare_ranks(names: Sequence[str], vectors: Sequence[Sequence[int]]) -> RankDifference | None:
    """Compare what ``encode_digests`` gave on each rank.

    The other ranks are compared with rank 0. If they differ from it and agree with each other, rank
    0 is the one that differs. Two ranks differ from each other; ``rank`` is then 1.

    ``vectors`` has one for each rank, in order of ranks; every rank gathers the same.

    Returns:
        The difference, the same on all ranks that encoded the same names; None when all agree.

    Raises:
        ValueError: When the vectors do not fit the names.
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
        world_size=len(vectors),
        expected_rank=expected_rank,
        names=tuple(all_names[at] for at in places[:NAMES_KEPT]),
        count=len(places),
        total=len(names),
        expected=_join(*_pair(base, places[0])),
        actual=_join(*_pair(actual, places[0])),
    )


class RankAgreement:
    """Compares a training state across ranks, record by record.

    Ranks gather one digest of each group, and a group's entries only when these differ.
    """

    def __init__(self, gather: Gather, replicated: ReplicatedState) -> None:
        self._gather = gather
        self._replicated = replicated
        self._tables: dict[str, dict[str, str]] = {}
        self._buffers: dict[str, str] = {}
        self._agreed: dict[str, str] = {}  # what all ranks held, by name of a buffer
        self._steps = StepDigests()

    def wants_step(self, step: int) -> bool:
        """Return whether the state after a step should be kept until the next record."""
        return self._steps.wants(step)

    def keep_step(self, step: int, groups: Mapping[str, Mapping[str, str]]) -> None:
        """Keep the digests of a step, which tell when ranks that differ began to."""
        self._steps.add(step, self._replicated.select(groups))

    def find_steps(self) -> dict[str, tuple[int | None, int]]:
        """Return what ``StepDigests.find_first`` does; every rank must call this."""
        return self._steps.find_first(self._gather)

    def summarize(self, groups: Mapping[str, Mapping[str, str]]) -> list[int]:
        """Return the integers that ``compare`` needs of every rank."""
        selected = self._replicated.select(groups)
        self._tables = {group: selected.get(group, {}) for group in GROUPS}
        self._buffers = self._replicated.select_buffers(groups)
        tables = (*self._tables.values(), self._buffers)
        texts = [text for table in tables for text in (table, table.values())]
        return [part for text in texts for part in _split(_hash_texts(text))]

    def compare(self, rows: Sequence[Sequence[int]]) -> dict[str, RankDifference]:
        """Return the differences by group, the same on every rank.

        ``rows`` has what ``summarize`` returned on each rank.
        """
        differences: dict[str, RankDifference | None] = {}
        for number, (group, table) in enumerate(self._tables.items()):
            parts = [row[_SUMMARY * number : _SUMMARY * (number + 1)] for row in rows]
            names_differ = compare_ranks([], [part[:2] for part in parts])
            if names_differ is None and not _all_equal(parts):
                vectors = self._gather(encode_digests(table))
                differences[group] = compare_ranks(list(table), vectors)
            else:
                differences[group] = names_differ
        buffers = self._compare_buffers([row[-_SUMMARY:] for row in rows])
        differences["buffers"] = differences["buffers"] or buffers
        found = {group: one for group, one in differences.items() if one is not None}
        if not found:
            self._steps.forget()
        return found

    def _compare_buffers(self, parts: Sequence[Sequence[int]]) -> RankDifference | None:
        """Compare the buffers that a training step may set from each rank's own data.

        Such a buffer changes on every rank. One that all ranks held alike in the last record, and
        that only some ranks have changed since, differs by mistake.
        """
        if _all_equal(parts):
            self._agreed = self._buffers
            return None
        if not _all_equal([part[:2] for part in parts]):  # ranks have different buffers
            self._agreed = {}
            return None
        vectors = self._gather(encode_digests(self._buffers))
        agreed: dict[str, str] = {}
        chosen = []
        for at, name in enumerate(self._buffers, start=1):
            held = {_join(*_pair(vector, at)) for vector in vectors}
            if len(held) == 1:
                agreed[name] = held.pop()
            elif self._agreed.get(name) in held:
                agreed[name] = self._agreed[name]
            else:
                continue
            chosen.append((at, name))
        self._agreed = agreed
        kept = [[x for at in (0, *(at for at, _ in chosen)) for x in _pair(v, at)] for v in vectors]
        return compare_ranks([name for _, name in chosen], kept)


def _all_equal(rows: Sequence[Sequence[int]]) -> bool:
    return all(list(row) == list(rows[0]) for row in rows)


def rank_error(
    difference: RankDifference,
    *,
    moment: str,
    epoch: int,
    step: int,
    group: str = "weights",
    steps: tuple[int | None, int] | None = None,
) -> DriftError:
    """Build the error that names the rank that differs, and what differs on it.

    ``steps`` are the last step after which the ranks were equal in this, if it is known, and the
    first after which they were not.
    """
    first, expected_rank = difference.rank, difference.expected_rank
    expected, actual = describe_pair(difference.expected, difference.actual)
    labels = [f"rank {expected_rank} (reference):", f"rank {first}:"]
    if difference.world_size == len(labels):  # nothing tells which of two is wrong
        labels, who = ["rank 0:", "rank 1:"], "Ranks 0 and 1 differ from each other"
    elif difference.ranks[1:]:
        who = f"Ranks {', '.join(str(rank) for rank in difference.ranks[:8])}"
        who += f"{', ...' if difference.ranks[8:] else ''} differ from rank {expected_rank}"
    else:
        who = f"Rank {first} differs from rank {expected_rank}"
    width = len(labels[0])
    entries = _ENTRIES.get(group, escape(group))
    if difference.names == (_NAMES,):
        what = f"they do not list the same {entries}"
    else:
        named = describe_names(difference.names, difference.count)
        what = f"{difference.count} of {difference.total} {entries} differ, first {named}"
    return DriftError(
        f"{who} in {describe_moment(moment, epoch, step)}: {what}.\n"
        f"  {labels[0]:<{width}} {expected}\n"
        f"  {labels[1]:<{width}} {actual}\n{_describe_steps(steps)}"
        "All ranks must hold the same bits after each step. Look for what only one rank does: a "
        "change to its weights, a learning rate that follows its own metric (log the metric with "
        "sync_dist=True), a module that is not synchronized, a failing device.",
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
        expected_rank=expected_rank,
    )


def _describe_steps(steps: tuple[int | None, int] | None) -> str:
    if steps is None:
        return ""
    equal = "" if steps[0] is None else f" They were still equal after step {steps[0]}."
    return f"The ranks differed in this after step {steps[1]}.{equal}\n"


def _split(digest: str) -> tuple[int, int]:
    high, low = _HALVES.unpack(bytes.fromhex(digest))
    return high, low


def _join(high: int, low: int) -> str:
    return _HALVES.pack(high, low).hex()


def _pair(vector: Sequence[int], at: int) -> tuple[int, int]:
    return vector[2 * at], vector[2 * at + 1]
