"""The comparison of two runs as text, for ``d9m compare``."""

from collections.abc import Iterator, Sequence
from itertools import islice

from lightning_d9m.engine.ledger.differences import (
    Divergence,
    FieldDifference,
    describe_varying,
    name_call,
    name_value,
)
from lightning_d9m.engine.ledger.stack import format_differences
from lightning_d9m.text import describe_names, describe_pair, escape, pluralize
from lightning_d9m.tools.comparison.causes import advise, earliest_divergences
from lightning_d9m.tools.comparison.ledgers import Comparison, RankComparison
from lightning_d9m.tools.output.terminal import wrap

_RANGES_SHOWN = 8
_STACKS = {
    False: "The stacks differ, which alone may change results:",
    True: "The stacks differ; portable bits do not depend on them:",
}
# A path, or a sentence about one, is shown in full.
_LONGEST = 4_096


def format_comparison(comparison: Comparison) -> list[str]:
    """Return the lines of a comparison: the verdict, the ledgers, what differs between them.

    What may explain a difference, such as another driver, comes before the difference.
    """
    return [*wrap(state_verdict(comparison)), "", *format_evidence(comparison)]


def format_evidence(comparison: Comparison, *, verbose: bool = False) -> list[str]:
    """Return the lines of a comparison without the verdict; see ``format_comparison``."""
    lines = [
        f"reference: {escape(str(comparison.expected), _LONGEST)}",
        f"this run:  {escape(str(comparison.actual), _LONGEST)}",
    ]
    if comparison.expected.exists() and comparison.expected.samefile(comparison.actual):
        # A link, or a name that was typed twice, would otherwise look like a proof.
        lines.append("Both are the same ledger, so this shows nothing about two runs.")
    for found, title in (
        (comparison.stack, _STACKS[comparison.portable]),
        (comparison.settings, "These settings differ, but the runs are still comparable:"),
        (comparison.refusals, "The runs cannot be compared:"),
    ):
        if found:
            lines += ["", title]
            for entry in found:
                lines += format_field(entry, len(comparison.ranks), verbose=verbose)
    for entry in comparison.refusals[:1]:
        lines += wrap(entry.reason)
    details = [] if comparison.refusals else list(_format_divergences(comparison, verbose=verbose))
    for sentence in list_one_sided(comparison):
        details += wrap(sentence)
    return [*lines, "", *details] if details else lines


def format_field(entry: FieldDifference, ranks: int, *, verbose: bool = False) -> Iterator[str]:
    """Yield a field and its two values; ranks are named if not all of them differ in this way."""
    where = f" ({name_ranks(entry.ranks)})" if 0 < len(entry.ranks) < ranks else ""
    one, other = (entry.expected, entry.actual) if verbose else entry.shown
    yield from format_differences([(f"{entry.field}{where}", one, other)]).splitlines()


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the names of ranks, with ranges.

    >>> name_ranks([3]), name_ranks([2, 3]), name_ranks([0, 1, 2, 7])
    ('rank 3', 'ranks 2, 3', 'ranks 0-2, 7')
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        # A training of a thousand ranks mostly differs on all of them.
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    shown = [
        f"{found[0]}-{found[-1]}" if found[2:] else ", ".join(map(str, found))
        for found in ranges[:_RANGES_SHOWN]
    ]
    left = sum(map(len, ranges[_RANGES_SHOWN:]))
    more = f" and {left} more" if left else ""
    return f"rank{'s' if ranks[1:] else ''} {', '.join(shown)}{more}"


def _format_divergences(comparison: Comparison, *, verbose: bool) -> Iterator[str]:
    """Yield the first divergence in full, and one sentence for each of the other ranks'."""
    ranks = {entry.rank: entry for entry in comparison.ranks}
    same: dict[str, list[int]] = {}
    for number, found in enumerate(comparison.divergences):
        # One rank shows what differs; the others mostly show the same.
        if number == 0:
            rank = ranks[found.rank]
            yield from _format_divergence(rank, found, advise(comparison), verbose=verbose)
            continue
        name = "" if found.name == "(total)" else f" {escape(name_call(found.name, found.call))}"
        # Ranks with the same sentence share one line.
        counts = f"{found.count:,} of {found.compared:,} differ"
        sentence = f"in {found.where}: {escape(found.kind)}{name}; {counts}."
        same.setdefault(sentence, []).append(found.rank)
    for sentence, numbers in same.items():
        verb = "diverge" if numbers[1:] else "diverges"
        yield from wrap(_begin(f"{name_ranks(sorted(numbers))} {verb} {sentence}"))


def _format_divergence(
    rank: RankComparison, first: Divergence, advice: str, *, verbose: bool
) -> Iterator[str]:
    yield from wrap(f"Rank {rank.rank}, {first.where}:")
    for group, (count, of) in first.by_kind.items():
        yield f"  {escape(group)}: {count} of {of} differ"
    # Only the digest of a whole group was recorded, so no name is known.
    if first.names != ("(total)",):
        count = first.by_kind.get(first.kind, (first.count, 0))[0]
        if first.kind == "batch":
            named = f"first value: {escape(name_value(first.kind, first.name))}"
        else:
            named = f"first {escape(first.kind)}: {describe_names(first.names, count)}"
        yield from wrap(named, "  ")
    expected, actual = describe_pair(first.expected, first.actual, verbose=verbose)
    yield f"    reference: {expected}"
    yield f"    this run:  {actual}"
    if advice:
        yield from wrap(advice, "  ")
    if rank.differing or not rank.places:
        yield f"  Records that differ: {rank.differing:,} of {rank.records:,}."
    if rank.places:
        yield f"  Probes that differ: {rank.differing_places:,} of {rank.places:,},"
        yield f"  in {rank.differing_batches:,} of {pluralize(rank.batches, 'batch', 'batches')}."


def list_one_sided(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence for everything that only one run has, or that it lacks."""
    for name, ranks in (
        ("the reference", comparison.ranks_only_expected),
        ("this run", comparison.ranks_only_actual),
    ):
        if ranks:
            yield f"Only {name} has a file of {name_ranks(ranks)}."
    same: dict[str, list[int]] = {}
    for rank in comparison.ranks if not comparison.refusals else ():
        for sentence in _list_one_sided(rank):
            same.setdefault(sentence, []).append(rank.rank)
    for sentence, numbers in same.items():
        yield _begin(f"{name_ranks(numbers)}: {sentence}")


def _list_one_sided(rank: RankComparison) -> Iterator[str]:
    if rank.uncompared_batches:
        batches = pluralize(rank.uncompared_batches, "batch", "batches")
        yield (
            f"the probes of {batches} were not compared, because they are of the micro-batches of "
            "each process, and the runs have different numbers of processes. Compare runs on "
            "equally many."
        )
    for name, side in (("the reference", rank.expected), ("this run", rank.actual)):
        if found := side.records:
            yield f"only {name} has {pluralize(found, 'record')}, the first {side.first_record}."
        if found := side.places:
            yield (
                f"only {name} has {pluralize(found, 'probe')} in batches of both, "
                f"the first {side.first_place}."
            )
        # A sentence of the ledger becomes a part of another one.
        problem = escape(side.problem.removesuffix("."), _LONGEST)
        for resumed in side.breaks:
            if resumed.parent or resumed is side.breaks[0]:
                yield (
                    f"{name} was interrupted and resumed at epoch {resumed.epoch}, batch "
                    f"{resumed.batch} (step {resumed.step}){'; ' if problem else ''}{problem}."
                )
                problem = ""  # it is that of the first
            for reason in resumed.inexact:
                yield f"{name} was not resumed exactly there: {escape(reason, _LONGEST)}"
        if not side.end:
            torn = "; its torn last record was left out" if side.truncated else ""
            # A segment may be compared while it runs.
            ended = "was ended before it" if rank.segment is None else "has not"
            yield f"{name} {ended} finished its ledger{torn}."


def state_verdict(comparison: Comparison) -> str:
    """Return a sentence with the verdict and what it is based on."""
    return " ".join([_state_verdict(comparison), *list_limits(comparison)])


def list_limits(*comparisons: Comparison) -> list[str]:
    """Return sentences for a verdict: the ops that may vary, and what was not compared."""
    varying = dict.fromkeys(describe_varying(own.varying_ops) for own in comparisons)
    reasons = (rank.undigested for own in comparisons for rank in own.ranks if rank.undigested)
    first = "".join(islice(reasons, 1))
    missing = first and f"A value was not compared, in {escape(first, _LONGEST)}"
    return [*filter(None, [*varying, missing])]


def _state_verdict(comparison: Comparison) -> str:
    if comparison.verdict == "equal":
        digests = sum(rank.digests for rank in comparison.ranks)
        epochs = pluralize(max(rank.epochs for rank in comparison.ranks), "epoch")
        ranks = name_ranks([rank.rank for rank in comparison.ranks])
        return (
            f"equal: {_describe_segment(comparison)}{count_compared(comparison)} bit for bit the "
            f"same ({digests:,} of digests; {epochs}; {ranks})."
            f"{describe_exception(comparison, ' Each run')}"
        )
    # The text must not say more than what was compared.
    if comparison.verdict == "incomplete":
        return (
            f"incomplete: {count_compared(comparison)} bit for bit the same, as far as both runs "
            f"go; {describe_exception(comparison, 'each') or CUT}"
        )
    if comparison.verdict == "different":
        first = ""
        if found := earliest_divergences(comparison):
            verb = "diverge" if found[1:] else "diverges"
            ranks = name_ranks(sorted(entry.rank for entry in found))
            first = " " + _begin(f"{ranks} {verb} first, in {found[0].where}.")
            if (logged := comparison.logged) is not None:
                first += f" Logged values or evaluations differ before, from {logged.where} on."
        return f"different: {count_compared(comparison)} compared.{first}"
    if comparison.refusals:
        names = ", ".join(escape(entry.field) for entry in comparison.refusals)
        return f"not comparable: the runs differ by design ({names})."
    # Each reason for which nothing was compared has its own sentence.
    if not comparison.ranks:
        return "not comparable: the ledgers have no rank in common."
    return "not comparable: a rank has no digests in common, so nothing was proven."


def _describe_segment(comparison: Comparison) -> str:
    """Return the steps of a segment and of the whole run; empty for two whole runs."""
    first = comparison.ranks[0]
    if first.segment is None:
        return ""
    end = max(first.expected.last_step, first.actual.last_step)
    return f"steps {first.segment[0]:,} to {first.segment[1]:,} of 0 to {end:,}, "


CUT = (
    "a run was ended before it finished its ledger, as by a signal or os._exit. Let the program "
    "return, or train within a lightning_d9m.Recorder, whose end finishes the ledger."
)


def describe_exception(comparison: Comparison, subject: str) -> str:
    """Return that an exception ended both runs, and whether the state there was compared.

    Empty if none did. ``subject`` names the runs.
    """
    failed = [rank for rank in comparison.ranks if rank.error]
    if not failed:
        return ""
    seen = "was compared" if all(rank.sees_end for rank in failed) else "was not recorded"
    return f"{subject} was ended by {escape(failed[0].error)}, and the state there {seen}."


def count_compared(comparison: Comparison) -> str:
    """Return how many records and probes were compared."""
    records = pluralize(sum(rank.records for rank in comparison.ranks), "record")
    if places := sum(rank.places for rank in comparison.ranks):
        batches = pluralize(sum(rank.batches for rank in comparison.ranks), "batch", "batches")
        records += f" and {pluralize(places, 'probe')} of {batches}"
    return records


def _begin(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
