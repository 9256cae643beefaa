"""The page that ``d9m report`` writes: the text of ``d9m compare``, and tables.

Jinja escapes every value. The filter ``untrusted`` also cuts a text of a ledger and isolates its
direction.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from lightning_d9m.engine.ledger.differences import Divergence, name_call
from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.ledger.format.records import Digests, Header, Scalar
from lightning_d9m.engine.ledger.keys import Item
from lightning_d9m.text import describe_pair, printable, quote
from lightning_d9m.tools.comparison.causes import find_cause
from lightning_d9m.tools.comparison.ledgers import Comparison
from lightning_d9m.tools.output.columns import list_cells, short
from lightning_d9m.tools.output.comparison_text import format_evidence, state_verdict
from lightning_d9m.tools.output.repeat_text import RepeatReport, list_run_columns
from lightning_d9m.tools.output.terminal import find_command
from lightning_d9m.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

# `d9m report` replaces a file only if it finds this in its first bytes.
GENERATOR_TAG = '<meta name="generator" content="lightning_d9m'
# A browser lays out all rows of a table, and a model has up to a hundred thousand places. The first
# rank that diverges shows what differs; those of the others share the second number.
_MAX_ROWS_FIRST, _MAX_ROWS_OTHERS = 3_000, 1_000
_MAX_SERIES = 24  # a program may log one value for each layer, and a row of each says little
_MAX_LINES = 1_000
_LONGEST = 400
# What ran, by its name on the page.
# Lambdas, because a field of a stack is missing where it does not apply.
_FACTS: dict[str, Callable[[Header], object]] = {
    "command": lambda header: header.program.get("command"),
    "commit": lambda header: _describe_commit(header.program),
    "date": lambda header: header.created and f"{header.created[:19].replace('T', ' ')} UTC",
    "seed": lambda header: header.seed,
    "ranks": lambda header: header.world_size,
    "device": lambda header: header.stack.get("device.name", header.stack.get("device.kind")),
    "processor": lambda header: header.stack.get("cpu.model"),
    "torch": lambda header: header.stack.get("torch.version"),
    "CUDA": lambda header: header.stack.get("torch.cuda"),
    "Lightning": lambda header: header.stack.get("package.lightning"),
    "Python": lambda header: header.stack.get("python.version"),
    "lightning_d9m": lambda header: header.package,
}
# Where a narrow window breaks a long name: before a word, and not within it or a number.
_WORD = re.compile(r"(?<=[./:_])(?=[^\W\d])")


# A table, not a chart: runs that differ by ulps have one curve, and loggers draw curves already.
@dataclass(slots=True)
class LoggedDifferences:
    """Finds where the values at the ends of epochs differ; pass ``watch`` to ``compare_ledgers``.

    Attributes:
        rows: For the loss and the logged values of the first rank, at most ``_MAX_SERIES``, by
            name: the first step at which it differs, and both values there; the greatest
            difference, and its step.
        rank: The rank whose values are compared; None before.
        left_out: The names of its other values.
    """

    rows: dict[str, list[Any]] = field(default_factory=dict)
    rank: int | None = None
    left_out: set[str] = field(default_factory=set)

    def watch(self, rank: int, one: Item | None, other: Item | None, _: Divergence | None) -> None:
        """Note the values of a pair of records; a ``RecordObserver``."""
        self.rank = rank if self.rank is None else self.rank
        both = [own for own in (one, other) if isinstance(own, Digests) and own.moment == "epoch"]
        if both and rank == self.rank:
            values = (own.list_values() if isinstance(own, Digests) else {} for own in (one, other))
            self.note(both[-1].step, *values)

    def note(self, step: int, expected: Mapping[str, float], actual: Mapping[str, float]) -> None:
        """Note the values of both runs at a step."""
        for name in {**expected, **actual}:
            if name not in self.rows and len(self.rows) == _MAX_SERIES:
                self.left_out.add(name)
                continue
            row = self.rows.setdefault(name, ["equal", "", "", None, ""])
            one, other = expected.get(name), actual.get(name)
            # As texts, in which 0.0 differs from -0.0, and NaN does not differ from itself.
            shown = ["missing" if own is None else repr(own) for own in (one, other)]
            if shown[0] == shown[1]:
                continue
            if row[0] == "equal":
                row[:3] = step, *shown
            size = math.nan if one is None or other is None else abs(one - other)
            if math.isfinite(size) and (row[3] is None or size > row[3]):
                row[3:] = size, step


@dataclass(frozen=True)
class ComparedRuns:
    """Two runs that were compared.

    Attributes:
        comparison: How they compare.
        values: What they have logged.
        ledgers: Their ledgers.
        report: The comparison of all runs, if they are of a `d9m repeat`.
        located: The report of `d9m locate` on the two, as far as it compared them.
    """

    comparison: Comparison
    values: LoggedDifferences
    ledgers: tuple[Ledger, Ledger]
    report: RepeatReport | None = None
    located: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """The verdict on all runs."""
        return self.comparison.verdict if self.report is None else self.report.verdict


def render_page(compared: ComparedRuns) -> str:
    """Return the whole page."""
    comparison, values, report = compared.comparison, compared.values, compared.report
    ledgers = compared.ledgers
    # With the folder of a logger's version, as all runs may be named alike below it.
    names = ("/".join(path.parts[-3:]) for path in (comparison.expected, comparison.actual))
    found = comparison.divergences
    # Only equal runs have one digest of their final weights.
    final = ledgers[1].outcome(min(ledgers[1].files)).final if comparison.equal else None
    evidence = format_evidence(comparison)
    places = [
        (entry.rank, *row)
        for number, entry in enumerate(found)
        for row in _list_places(entry, _MAX_ROWS_OTHERS // len(found) if number else None)
    ]
    return _make_environment().get_template("report.html.j2").render(
        comparison=comparison,
        report=report,
        verdict="" if report is None else report.state_verdict(),
        title=f"{comparison.verdict}: {' and '.join(names)}",
        basis=state_verdict(comparison).partition(": ")[2],
        cause=find_cause(comparison) if found or comparison.stack else None,
        weights="" if final is None else final.totals.get("weights", ""),
        facts=list(_list_run_facts(ledgers)),
        command=find_command(ledgers),
        located=[
            printable(line[:_LONGEST]) + " ..." * (len(line) > _LONGEST)
            for line in compared.located[:_MAX_LINES]
        ],
        located_left=len(compared.located) - _MAX_LINES,
        first=found[0] if found else None,
        evidence=evidence[:_MAX_LINES],
        evidence_left=len(evidence) - _MAX_LINES,
        places=places,
        places_left=sum(entry.count for entry in found) - len(places),
        runs=None if report is None else list_cells(list_run_columns(report.rows), report.rows),
        values=[(name, *row[:3], short(row[3]), row[4]) for name, row in values.rows.items()],
        values_rank=values.rank,
        values_left=len(values.left_out),
    )  # fmt: skip


def _list_run_facts(ledgers: Sequence[Ledger]) -> Iterator[tuple[str, ...]]:
    """Yield (name, value in each run) of what ran, where a run has it."""
    for name, read in _FACTS.items():
        values = [read(ledger.header) for ledger in ledgers]
        if any(value not in (None, "") for value in values):
            yield name, *("" if value is None else str(value) for value in values)


def _describe_commit(program: Mapping[str, Scalar]) -> str:
    commit = str(program.get("git.commit") or "")
    return f"{commit}, with changes" if commit and program.get("git.dirty") else commit


@cache
def _make_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lightning_d9m.tools.output"),
        autoescape=True,  # a ledger may come from a stranger
        # A misspelled name in the template is an error, not an empty text.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"generator": GENERATOR_TAG, "version": __version__}
    environment.filters["untrusted"] = _mark_untrusted
    return environment


def _mark_untrusted(value: object, limit: int = 160) -> "Markup":
    """Return a value on one line, cut, escaped, and isolated in its direction."""
    from markupsafe import Markup

    text = str(value)
    # Escapes of HTML do not stop characters that turn the direction of text.
    if len(text) > limit or not text.isprintable():
        text = quote(text, limit)
    # join escapes each part.
    parts = Markup("<wbr>").join(_WORD.split(text))
    return (Markup("{}") if text.isascii() else Markup("<bdi>{}</bdi>")).format(parts)


def _list_places(found: Divergence, most: int | None) -> Iterator[tuple[object, ...]]:
    """Yield (position, kind, name, both values) for what differs where a rank diverges first."""
    for place in found.places[: _MAX_ROWS_FIRST if most is None else most]:
        values = ("missing" if own is None else own for own in (place.expected, place.actual))
        yield place.position, place.kind, name_call(place.name, place.call), *describe_pair(*values)
