"""The page that ``d9m report`` writes: the values that its template shows.

Jinja escapes every value. The filter ``untrusted`` also cuts a text of a ledger and isolates its
direction.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import takewhile
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_d9m.comparison.causes import earliest_divergences, find_cause
from lightning_d9m.comparison.differences import Divergence, PlaceDifference, name_call
from lightning_d9m.comparison.ledgers import Comparison
from lightning_d9m.comparison.timeline import (
    Module,
    StepHistogram,
    Timeline,
    ValuePair,
    module_of,
)
from lightning_d9m.comparison.weight_distance import RESOLUTION, STANDARD_ERROR
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.ledger.format.records import Header, Scalar
from lightning_d9m.output.comparison_text import (
    count_compared,
    is_one_ledger,
    list_one_sided,
    name_ranks,
    state_verdict,
)
from lightning_d9m.output.result_tables import (
    LAYER_COLUMNS,
    RunRow,
    list_layer_lines,
    list_layers,
    list_run_columns,
)
from lightning_d9m.output.svg import HeatMap, draw_chart, draw_key
from lightning_d9m.output.terminal import find_command
from lightning_d9m.text import describe_pair, pluralize, quote
from lightning_d9m.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

GENERATOR = '<meta name="generator" content="lightning_d9m'
_MAX_RANKS = 64
_MAX_ROWS_FIRST, _MAX_ROWS_OTHERS = 3_000, 1_000
_MAX_FIELDS = 200
_MAX_SENTENCES = 200
_MAX_DEPTH = 12
_MAX_MODULES = 1_500
# What ran, by its name on the page.
_FACTS: dict[str, Callable[[Header], object]] = {
    "command": lambda header: header.program.get("command"),
    "commit": lambda header: _describe_commit(header.program),
    "date": lambda header: _describe_date(header.created),
    "seed": lambda header: header.seed,
    "ranks": lambda header: header.world_size,
    "device": lambda header: header.stack.get("device.0.name", header.stack.get("device.kind")),
    "processor": lambda header: header.stack.get("cpu.model"),
    "torch": lambda header: header.stack.get("torch.version"),
    "CUDA": lambda header: header.stack.get("torch.cuda"),
    "Lightning": lambda header: header.stack.get("package.lightning"),
    "Python": lambda header: header.stack.get("python.version"),
    "lightning_d9m": lambda header: header.package,
}
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class RepeatedRuns:
    """All runs of a `d9m repeat`, beside the pair that the page compares.

    Attributes:
        verdict: The verdict on all runs.
        rows: The table of all runs.
        values: For each run but the first, the logged values of the first and its own by name.
    """

    verdict: str
    rows: Sequence[RunRow]
    values: Sequence[Mapping[str, Sequence[ValuePair]]]


def render_page(
    comparison: Comparison,
    timeline: Timeline,
    ledgers: tuple[Ledger, Ledger],
    repeated: RepeatedRuns | None = None,
) -> str:
    """Return the whole page."""
    from importlib.resources import files

    environment = _make_environment()
    folder = files("lightning_d9m.output") / "templates"
    style, script = ((folder / name).read_text() for name in ("style.css", "script.js"))
    found = comparison.divergences
    basis = state_verdict(comparison)
    if comparison.verdict == "different":  # the header says the rest
        basis = f"{count_compared(comparison)} compared."
    final = ledgers[1].outcome(min(ledgers[1].files)).final if comparison.equal else None
    values = [timeline.values] if repeated is None else repeated.values
    # If there are many ranks, those that diverge are shown.
    chosen = list(dict.fromkeys([*(entry.rank for entry in found), *timeline.ranks]))[:_MAX_RANKS]
    ranks = [(rank, timeline.ranks[rank]) for rank in sorted(chosen) if rank in timeline.ranks]
    return environment.get_template("report.html.j2").render(
        comparison=comparison,
        timeline=timeline,
        repeated=repeated,
        title=f"{comparison.verdict}: {_name_pair(comparison.expected, comparison.actual)}",
        cause=find_cause(comparison) if found or comparison.stack else None,
        weights="" if final is None else final.totals.get("weights", ""),
        facts=list(list_run_facts(ledgers)),
        command=find_command(ledgers),
        first=found[0] if found else None,
        first_ranks=_describe_first_ranks(comparison),
        one_sided=list(list_one_sided(comparison)),
        one_ledger=is_one_ledger(comparison),
        basis=basis,
        places=list(_list_places(found)),
        modules=_make_module_map(timeline, comparison),
        run_columns=list_run_columns([] if repeated is None else repeated.rows),
        values=list(_draw_values(timeline, values)),
        keys=[draw_key(n) for n in range(1 + len(values))] if repeated else [],
        ranks=_make_heat_map(ranks, timeline.epochs) if ranks else None,
        ranks_left_out=len(timeline.ranks) - len(ranks),
        layers=list(enumerate(list_layers(timeline.distances))),
        layer_chart=_draw_layers(timeline),
        style=style,
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )


def list_run_facts(ledgers: Sequence[Ledger]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, value in each run) of what ran, where a run has it."""
    headers = [ledger.header for ledger in ledgers]
    for name, read in _FACTS.items():
        values = [read(header) for header in headers]
        if any(value not in (None, "") for value in values):
            yield name, ["" if value is None else str(value) for value in values]


def _name_pair(one: Path, other: Path) -> str:
    """Return the names of two ledgers, each with as many folders as tell them apart.

    >>> _name_pair(Path("a/run-001/fit-000"), Path("a/run-002/fit-000"))
    'run-001/fit-000 and run-002/fit-000'
    """
    ends = zip(reversed(one.parts), reversed(other.parts), strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    return " and ".join("/".join(path.parts[-1 - equal :]) for path in (one, other))


def _describe_date(created: str) -> str:
    day, _, time = created.partition("T")
    return f"{day} {time[:8]} UTC" if time.endswith("+00:00") else created


def _describe_commit(program: Mapping[str, Scalar]) -> str:
    commit = str(program.get("git.commit") or "")
    return f"{commit}, with changes" if commit and program.get("git.dirty") else commit


def _draw_values(
    timeline: Timeline, runs: Sequence[Mapping[str, Sequence[ValuePair]]]
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, drawing of the values, drawing of their difference) of each logged value."""
    for number, (name, pairs) in enumerate(timeline.values.items(), start=1):
        series = [[(step, one) for step, one, _ in pairs]]
        series += [[(step, other) for step, _, other in run.get(name, ())] for run in runs]
        lines = [[(step, value) for step, value in own if value is not None] for own in series]
        both = [(step, one, other) for step, one, other in pairs if None not in (one, other)]
        gaps = [(step, abs(one - other)) for step, one, other in both]  # type: ignore[operator]
        label = f"Logged value {number}"
        drawing = ""
        if any(gap > 0 and isfinite(gap) for _, gap in gaps):
            drawing = draw_chart(f"{label}: difference", [gaps], timeline.epochs, log=True)
        yield name, draw_chart(label, lines, timeline.epochs, name="run"), drawing


def _draw_layers(timeline: Timeline) -> str:
    """Draw the distances of the layers; return nothing if they are too small for that."""
    lines = list_layer_lines(timeline.distances)
    if not any(RESOLUTION <= value < inf for points in lines for _, value in points):
        return ""
    label = "Size of the difference of each layer by step"
    return draw_chart(label, lines, timeline.epochs, log=True)


@cache
def _make_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lightning_d9m.output"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {
        "max_ranks": _MAX_RANKS,
        "max_fields": _MAX_FIELDS,
        "max_sentences": _MAX_SENTENCES,
        "generator": GENERATOR,
        "version": __version__,
        "layer_columns": LAYER_COLUMNS,
        "standard_error": f"{STANDARD_ERROR:.0%}",
        "draw_key": draw_key,
    }
    environment.filters |= {
        "untrusted": _mark_untrusted,
        "name": _break_name,
        "sides": _mark_sides,
        "call_name": lambda place: name_call(place.name, place.call),
        "ranks": lambda ranks: name_ranks(ranks).partition(" ")[2],
        "is_digest": lambda text: _DIGEST.fullmatch(text) is not None,
        "count": pluralize,
        "commands": _mark_commands,
    }
    return environment


def _mark_untrusted(value: object, limit: int = 160) -> "Markup":
    """Return a value on one line, cut, escaped, and isolated in its direction."""
    from markupsafe import Markup, escape

    text = value if isinstance(value, str) else quote(value, limit)
    if len(text) > limit or not text.isprintable():
        text = quote(text, limit)
    return escape(text) if text.isascii() else Markup("<bdi>{}</bdi>").format(text)


def _break_name(value: object) -> "Markup":
    """Return a name as ``untrusted`` does; a line may break after its dots and underscores."""
    from markupsafe import Markup

    return _mark_untrusted(value).replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>"))


def _mark_commands(text: str) -> "Markup":
    """Return a sentence in which what stands between backticks is code."""
    from markupsafe import Markup

    marked = [Markup("<code>{}</code>"), Markup("{}")]
    return Markup("").join(
        marked[number % 2 == 0].format(part) for number, part in enumerate(text.split("`"))
    )


def _mark_sides(entry: PlaceDifference | Divergence) -> list["Markup"]:
    """Return the values of both runs; what they have in full shows when the mouse points there."""
    from markupsafe import Markup

    values = ["missing" if side is None else side for side in (entry.expected, entry.actual)]
    return [
        Markup('<span title="{}">{}</span>').format(_mark_untrusted(value).striptags(), shown)
        if shown != value
        else shown
        for value, shown in zip(values, map(_mark_untrusted, describe_pair(*values)), strict=True)
    ]


def _describe_first_ranks(comparison: Comparison) -> str:
    """Return which of several ranks diverge first, and how many diverge later."""
    found = earliest_divergences(comparison)
    if not found or not comparison.ranks[1:]:
        return ""
    later = len(comparison.divergences) - len(found)
    others = f"; {pluralize(later, 'more rank')} diverged later" if later else ""
    together = name_ranks(sorted(entry.rank for entry in found))
    return f"{together} of {len(comparison.ranks)}{others}. ".capitalize()


def _list_places(found: list[Divergence]) -> Iterator[tuple[int, Any]]:
    """Yield (rank, place) for what differs where a rank diverges first."""
    share = _MAX_ROWS_OTHERS // max(1, len(found) - 1)
    for number, entry in enumerate(found):
        for place in entry.places[: share if number else _MAX_ROWS_FIRST]:
            yield entry.rank, place


def _describe_module(path: str, module: Module, *, is_first: bool) -> dict[str, object]:
    """Return a row of the tree of modules; below the greatest depth it has its whole path."""
    first = None
    if module.first is not None:
        epoch, step, _, _, what = module.first
        kind, _, name = what.partition(" ")
        within = name.removeprefix(path).lstrip(".:") if path else name
        first = (kind, within, epoch, step)
    deep = path.count(".") >= _MAX_DEPTH
    return {
        "label": path if deep else path.rpartition(".")[2],
        "depth": min(path.count(".") + 1, _MAX_DEPTH) if path else 0,
        "state": "differs first" if is_first else "differs" if first else "same",
        "differing": module.differing,
        "first": first,
        "is_first": is_first,
    }


def _make_heat_map(
    named: Sequence[tuple[object, StepHistogram]], epochs: Mapping[int, int]
) -> Mapping[str, object]:
    heat = HeatMap([row for _, row in named])
    return {
        "rows": [(name, heat.draw_row(row)) for name, row in named],
        "axis": heat.draw_axis(epochs),
        "shades": heat.shades,
    }


def _make_module_map(timeline: Timeline, comparison: Comparison) -> Mapping[str, object] | None:
    """Return the tree of modules beside its heat map, layer 10 after layer 9; None without modules.

    Returns:
        ``rows`` with (module, its cells), ``axis`` with the steps of the columns, ``shades`` with
        (number of the shade, fewest, most differing digests), ``left_out`` with a number.
    """
    if not timeline.modules:
        return None
    ordered = sorted(timeline.modules.items(), key=lambda item: not item[1].differing)
    modules = dict(ordered[:_MAX_MODULES])
    first = [module_of(entry.kind, entry.name) for entry in comparison.divergences[:1]]
    paths = {"", *modules, *first}
    for path in list(paths):
        parts = path.split(".")[:_MAX_DEPTH]
        paths |= {".".join(parts[:n]) for n in range(1, len(parts))}

    def order(path: str) -> list[str]:
        return [part.zfill(9) if part.isdecimal() else part for part in path.split(".")]

    rows: list[tuple[object, StepHistogram]] = []
    for path in sorted(paths, key=order):
        module = modules.get(path, Module())
        rows.append((_describe_module(path, module, is_first=[path] == first), module.steps))
    left_out = len(timeline.modules) - len(modules)
    return {**_make_heat_map(rows, timeline.epochs), "left_out": left_out}
