"""``d9m compare``: compare two ledgers and name the first divergence."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lightning_d9m.evidence.compare import Comparison, RankComparison, compare_ledgers
from lightning_d9m.evidence.difference import Difference, FieldDifference
from lightning_d9m.evidence.display import (
    counted,
    describe_names,
    describe_value,
    plain,
)
from lightning_d9m.evidence.ledger import read_ledger

_WIDTH = 80
_RANKS_SHOWN = 8
# As much as a stack records of a variable: cut shorter, two values might look alike.
_VALUE = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of ``d9m compare``."""
    where = "a folder fit-NNN, a folder that holds exactly one, or one file rank-N.jsonl"
    parser.add_argument("expected", type=Path, help=f"ledger of the earlier run: {where}")
    parser.add_argument("actual", type=Path, help="ledger of the later run, likewise")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return 0 when the runs are equal, else 1."""
    expected, actual = read_ledger(arguments.expected), read_ledger(arguments.actual)
    watched = sys.stderr.isatty()
    comparison = compare_ledgers(expected, actual, progress=_show_progress if watched else None)
    if watched:
        print("\r\033[K", end="", file=sys.stderr)
    if arguments.json:
        print(json.dumps(as_json(comparison), indent=2))
    else:
        print("\n".join(format_comparison(comparison)))
    return 0 if comparison.verdict == "equal" else 1


def _show_progress(records: int) -> None:
    print(f"\r{records:,} records compared", end="", file=sys.stderr, flush=True)


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return the comparison for ``--json``; the names are those of the attributes."""
    return {
        "verdict": comparison.verdict,
        **asdict(comparison),
        "expected": str(comparison.expected),
        "actual": str(comparison.actual),
    }


def format_comparison(comparison: Comparison) -> list[str]:
    """Lay out a comparison in lines: what explains a difference comes before the difference."""
    lines = [f"expected: {comparison.expected}", f"actual:   {comparison.actual}"]
    if comparison.expected.exists() and comparison.expected.samefile(comparison.actual):
        lines.append("Both are one ledger, so this shows nothing about two runs.")
    for found, title in (
        (comparison.stack, "The stacks differ, which alone may change bits:"),
        (comparison.settings, "Settings differ that leave the runs comparable:"),
        (comparison.refusals, "The runs cannot be held against each other:"),
    ):
        if found:
            lines += ["", title]
            for entry in found:
                lines += _format_field(entry, len(comparison.ranks))
    for entry in comparison.refusals[:1]:
        lines += _wrap(entry.reason)
    lines.append("")
    for name, ranks in (
        ("expected", comparison.ranks_only_expected),
        ("actual", comparison.ranks_only_actual),
    ):
        if ranks:
            lines.append(f"Only the {name} run has a file of {_name_ranks(ranks)}.")
    for rank in comparison.ranks if not comparison.refusals else ():
        lines += _format_rank(rank)
    return [*lines, *_wrap(state_verdict(comparison))]


def _format_field(entry: FieldDifference, ranks: int) -> Iterator[str]:
    # Most of the time all ranks differ in the same way: then they need no mention.
    where = f" ({_name_ranks(entry.ranks)})" if 0 < len(entry.ranks) < ranks else ""
    yield f"  {plain(entry.field)}{where}"
    yield f"    expected: {plain(entry.expected, _VALUE)}"
    yield f"    actual:   {plain(entry.actual, _VALUE)}"


def _name_ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(str(rank) for rank in ranks[:_RANKS_SHOWN])
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if ranks[_RANKS_SHOWN:] else ""
    return f"rank{'s' if ranks[1:] else ''} {listed}{more}"


def _format_rank(rank: RankComparison) -> Iterator[str]:
    """Yield what differs on one rank, and what was left out; nothing for a rank in order."""
    if rank.first is not None:
        yield from _format_divergence(rank, rank.first)
    for name, found, places, breaks, complete, truncated in (
        (
            "expected",
            rank.only_expected,
            rank.only_expected_places,
            rank.expected_breaks,
            rank.expected_complete,
            rank.expected_truncated,
        ),
        (
            "actual",
            rank.only_actual,
            rank.only_actual_places,
            rank.actual_breaks,
            rank.actual_complete,
            rank.actual_truncated,
        ),
    ):
        if found.count:
            records = counted(found.count, "record")
            yield from _wrap(
                f"Rank {rank.rank}: only the {name} run has {records}, the first {found.first}."
            )
        if places.count:
            number = counted(places.count, "probe")
            yield from _wrap(
                f"Rank {rank.rank}: only the {name} run has {number} in batches of both, the first "
                f"{places.first}."
            )
        for found_break in breaks:
            yield from _wrap(
                f"Rank {rank.rank}: the {name} run was interrupted and resumed at epoch "
                f"{found_break.epoch}, batch {found_break.batch} (step {found_break.step})"
                + (f"; {plain(found_break.problem)}." if found_break.problem else ".")
            )
        if not complete:
            torn = "; its torn last record was left out" if truncated else ""
            yield from _wrap(
                f"Rank {rank.rank}: the {name} run was ended before it finished its ledger{torn}."
            )


def _format_divergence(rank: RankComparison, first: Difference) -> Iterator[str]:
    yield from _wrap(f"Rank {rank.rank} diverges first in {first.where}:")
    for group, (count, of) in first.by_group.items():
        yield f"  {plain(group)}: {count} of {of} differ"
    if first.names != ("(total)",):
        count = first.by_group.get(first.group, (first.count, 0))[0]
        yield from _wrap(f"first {plain(first.group)}: {describe_names(first.names, count)}", "  ")
    yield f"    expected: {describe_value(first.expected)}"
    yield f"    actual:   {describe_value(first.actual)}"
    if first.moment == "initial":
        yield from _wrap(
            "No training caused it: seed before the model is built (lightning_d9m.enable or "
            "seed_everything at the top of the program).",
            "  ",
        )
    elif set(first.by_group) == {"scalars"}:
        yield from _wrap(
            "Nothing but logged scalars differs here. One that differs by nature, as a measured "
            "time, can be left out: ignored_metrics, or LIGHTNING_D9M_IGNORED_METRICS=NAME before "
            "the command.",
            "  ",
        )
    if rank.differing or not rank.places:
        yield f"  Records that differ: {rank.differing:,} of {rank.records:,}."
    if rank.places:
        yield f"  Probes that differ: {rank.differing_places:,} of {rank.places:,},"
        yield f"  in {rank.differing_batches:,} of {counted(rank.batches, 'batch', 'batches')}."


def state_verdict(comparison: Comparison) -> str:
    """Return the verdict in a sentence, with what it rests on."""
    records = counted(sum(rank.records for rank in comparison.ranks), "record")
    if places := sum(rank.places for rank in comparison.ranks):
        batches = counted(sum(rank.batches for rank in comparison.ranks), "batch", "batches")
        records += f" and {counted(places, 'probe')} of {batches}"
    if comparison.verdict == "equal":
        digests = sum(rank.digests for rank in comparison.ranks)
        epochs = counted(max(rank.epochs for rank in comparison.ranks), "epoch")
        ranks = _name_ranks([rank.rank for rank in comparison.ranks])
        return f"equal: {records} bit for bit the same ({digests:,} of digests; {epochs}; {ranks})."
    if comparison.verdict == "different":
        return f"different: {records} compared."
    if comparison.refusals:
        names = ", ".join(plain(entry.field) for entry in comparison.refusals)
        return f"not comparable: the runs differ by design ({names})."
    if not comparison.ranks:
        return "not comparable: the ledgers have no rank in common."
    return "not comparable: a rank has no digests in common, so nothing was proven."


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    )
