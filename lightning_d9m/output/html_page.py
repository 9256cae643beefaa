"""The page that ``d9m report`` writes: the values that its template shows.

Jinja escapes every value. The filter ``untrusted`` also cuts a text of a ledger and isolates its
direction.
"""

import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from lightning_d9m.comparison.ledgers import Comparison, Divergence
from lightning_d9m.comparison.record_diff import name_call
from lightning_d9m.comparison.timeline import Module, Timeline, module_of
from lightning_d9m.output.comparison_text import (
    advise,
    count_compared,
    is_one_ledger,
    list_one_sided,
    name_ranks,
    state_verdict,
)
from lightning_d9m.output.svg_timeline import draw_growth, draw_timeline
from lightning_d9m.text import describe_value, pluralize, quote
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
_DIGEST = re.compile(r"[0-9a-f]{32}")


def render_page(comparison: Comparison, course: Timeline) -> str:
    """Return the whole page."""
    from importlib.resources import files

    environment = _make_environment()
    folder = files("lightning_d9m.output") / "templates"
    style, script = ((folder / name).read_text() for name in ("style.css", "script.js"))
    found = comparison.divergences
    basis = state_verdict(comparison)
    if comparison.verdict == "different":  # the header says the rest
        basis = f"{count_compared(comparison)} compared."
    # If there are many ranks, those that diverge.
    chosen = list(dict.fromkeys([*(entry.rank for entry in found), *course.ranks]))[:_MAX_RANKS]
    drawn = {rank: course.ranks[rank] for rank in sorted(chosen) if rank in course.ranks}
    return environment.get_template("report.html.j2").render(
        comparison=comparison,
        course=course,
        first=found[0] if found else None,
        first_ranks=_describe_first_ranks(comparison),
        advice=advise(comparison.first[1]) if comparison.first else "",
        one_sided=list(list_one_sided(comparison)),
        one_ledger=is_one_ledger(comparison),
        basis=basis,
        places=list(_list_places(found)),
        tree=list(_list_modules(course, comparison)),
        timeline=draw_timeline(drawn, course.epochs) if drawn else "",
        growth=dict(_draw_growths(course)),
        ranks_left_out=len(course.ranks) - len(drawn),
        max_ranks=_MAX_RANKS,
        max_fields=_MAX_FIELDS,
        max_sentences=_MAX_SENTENCES,
        generator=GENERATOR,
        version=__version__,
        style=style,
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )


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
    environment.filters |= {
        "untrusted": _mark_untrusted,
        "name": _break_name,
        "value": _describe_digest,
        "call_name": lambda place: name_call(place.name, place.call),
        "ranks": lambda ranks: name_ranks(ranks).partition(" ")[2],
        "position": _describe_position,
        "is_digest": lambda text: _DIGEST.fullmatch(text) is not None,
        "count": pluralize,
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


def _describe_digest(value: str | None) -> "Markup":
    return _mark_untrusted("missing" if value is None else describe_value(value))


def _describe_position(found: Divergence) -> str:
    batch = "" if found.batch is None else f", batch {found.batch}"
    moment = f"{found.moment} state, " if found.moment in {"initial", "final"} else ""
    if found.moment == "epoch":
        moment = "end of "
    return f"{moment}epoch {found.epoch}, step {found.step}{batch}"


def _describe_first_ranks(comparison: Comparison) -> str:
    """Return which of several ranks diverge first, and how many diverge later."""
    found = comparison.divergences
    if not found or not comparison.ranks[1:]:
        return ""
    together = sorted(entry.rank for entry in found if entry.when == found[0].when)
    later = len(found) - len(together)
    others = f"; {pluralize(later, 'more rank')} diverged later" if later else ""
    return f"{name_ranks(together)} of {len(comparison.ranks)}{others}. ".capitalize()


def _list_places(found: list[Divergence]) -> Iterator[tuple[int, Any]]:
    """Yield (rank, place) for what differs where a rank diverges first."""
    share = _MAX_ROWS_OTHERS // max(1, len(found) - 1)
    for number, entry in enumerate(found):
        for place in entry.places[: share if number else _MAX_ROWS_FIRST]:
            yield entry.rank, place


def _draw_growths(course: Timeline) -> Iterator[tuple[str, str]]:
    for title, growth in (
        ("Share of probed places that differ, by step", course.places),
        ("Share of weights that differ, by step", course.weights),
    ):
        steps = [step for step in growth.ordered() if step.compared]
        # One point shows no growth; the table of moments has it.
        if steps[1:] and any(step.differing for step in steps):
            yield title, draw_growth(title, growth, course.epochs)


@dataclass(frozen=True)
class _Node:
    path: str
    module: Module | None
    is_first: bool

    @property
    def depth(self) -> int:
        return min(self.path.count(".") + 1, _MAX_DEPTH) if self.path else 0

    @property
    def label(self) -> str:
        """The module's own name; below the greatest depth, its whole path."""
        return self.path if self.path.count(".") >= _MAX_DEPTH else self.path.rpartition(".")[2]

    @property
    def state(self) -> str:
        if self.is_first:
            return "differs first"
        return "differs" if self.module is not None and self.module.first is not None else "same"


def _list_modules(course: Timeline, comparison: Comparison) -> Iterator[_Node]:
    """Yield the tree of modules with all parents, layer 10 after layer 9."""
    modules = course.modules
    if not modules:
        return
    first = [module_of(entry.kind, entry.name) for entry in comparison.divergences[:1]]
    paths = {"", *modules, *first}
    for path in list(paths):
        parts = path.split(".")[:_MAX_DEPTH]
        paths |= {".".join(parts[:n]) for n in range(1, len(parts))}

    def order(path: str) -> list[str]:
        return [part.zfill(9) if part.isdecimal() else part for part in path.split(".")]

    for path in sorted(paths, key=order):
        yield _Node(path, modules.get(path), [path] == first)
