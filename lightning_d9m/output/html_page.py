"""The page that ``d9m report`` writes. Whatever comes from a ledger passes through ``_text``."""

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from html import escape

from lightning_d9m.comparison.ledgers import Comparison, Divergence
from lightning_d9m.comparison.record_diff import FieldDifference, name_call
from lightning_d9m.comparison.timeline import Timeline, module_of
from lightning_d9m.output.comparison_text import (
    advise,
    count_compared,
    is_one_ledger,
    list_one_sided,
    name_ranks,
    state_verdict,
)
from lightning_d9m.output.html_assets import SCRIPT, STYLE
from lightning_d9m.output.svg_timeline import draw_growth, draw_timeline
from lightning_d9m.text import describe_value, pluralize, quote
from lightning_d9m.version import __version__

GENERATOR = '<meta name="generator" content="lightning_d9m'
_RANKS = 64
_ROWS_FIRST, _ROWS_OTHERS = 3_000, 1_000
_FIELDS = 200
_SENTENCES = 200
_DEPTH = 12
_WORDS = 1_000
_DIGEST = re.compile(r"[0-9a-f]{32}")


def _text(value: object, limit: int = 160) -> str:
    """Return an untrusted value for HTML: one line, cut, escaped, and isolated in its direction."""
    text = value if isinstance(value, str) else quote(value, limit)
    if len(text) > limit or not text.isprintable():
        text = quote(text, limit)
    return escape(text) if text.isascii() else f"<bdi>{escape(text)}</bdi>"


def _name(value: object) -> str:
    """Return a name as ``_text`` does; a line may end at its dots, rather than within a word."""
    return _text(value).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _value(value: str | None) -> str:
    return "missing" if value is None else _text(describe_value(value))


def render_page(comparison: Comparison, course: Timeline) -> str:
    """Return the whole page."""
    title = f"d9m: {comparison.verdict}"
    ours = b64encode(sha256(SCRIPT.encode()).digest()).decode()
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'{GENERATOR} {escape(__version__)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Whatever a ledger might smuggle in: nothing is loaded from anywhere, nor run but our own.
        (
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            f"base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{ours}'\">"
        ),
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
        *_render_verdict(comparison),
        *_render_fields(
            "What cannot be held against each other", comparison.refusals, "The runs differ here."
        ),
        *_render_fields(
            "Stack differences", comparison.stack, "Each alone may change bits.", always=True
        ),
        *_render_fields("Settings that differ", comparison.settings, "The runs stay comparable."),
        *_render_divergences(comparison.divergences),
        *_render_timeline(course, comparison),
        *_render_growth(course),
        *_render_tree(course, comparison),
        *_render_places(comparison.divergences),
        *_render_moments(course),
        *_render_one_sided(comparison),
        f"<footer>Written by lightning_d9m {escape(__version__)}.</footer>",
        f"</main><script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _render_verdict(comparison: Comparison) -> Iterator[str]:
    """Yield what is to be known before anything is scrolled."""
    kind = comparison.verdict.replace(" ", "-")
    yield f'<header class="verdict {kind}"><h1>{escape(comparison.verdict.capitalize())}</h1>'
    found = comparison.divergences
    if found:
        yield from _render_first(comparison, found)
    elif comparison.verdict == "different":
        yield "<p>No record that both runs have differs, but one has what the other lacks:</p>"
    for entry in comparison.refusals[:3]:
        yield (
            f"<p><code>{_name(entry.field)}</code>: expected {_text(entry.expected)}, actual "
            f"{_text(entry.actual)}. {escape(entry.reason)}</p>"
        )
    if not found:
        yield from (f"<p>{_text(text, _WORDS)}</p>" for text in _first_sentences(comparison))
    if comparison.stack:
        fields = pluralize(len(comparison.stack), "field")
        listed = ", ".join(f"<code>{_name(entry.field)}</code>" for entry in comparison.stack[:3])
        more = " and others" if comparison.stack[3:] else ""
        but = "but the bits are equal" if comparison.equal else "which alone may change bits"
        yield f"<p>The stacks differ in {fields}, {but}: {listed}{more}.</p>"
    elif not comparison.refusals:
        yield "<p>The stacks are equal.</p>"
    if is_one_ledger(comparison):
        yield "<p>Both are one ledger, so this shows nothing about two runs.</p>"
    yield "<dl>"
    for name, path in (("expected", comparison.expected), ("actual", comparison.actual)):
        yield f"<dt>{name}</dt><dd><code>{_text(str(path), 400)}</code></dd>"
    yield "</dl>"
    basis = state_verdict(comparison)
    if comparison.verdict == "different":  # the rest of it stands above
        basis = f"{count_compared(comparison)} compared."
    yield f'<p class="basis">{_text(basis, _WORDS)}</p></header>'


def _first_sentences(comparison: Comparison) -> list[str]:
    sentences = list(list_one_sided(comparison))
    return sentences[:3] + (["More is listed below."] if sentences[3:] else [])


def _render_first(comparison: Comparison, found: Sequence[Divergence]) -> Iterator[str]:
    first = found[0]
    together = sorted(entry.rank for entry in found if entry.when == first.when)
    later = len(found) - len(together)
    others = f"; {pluralize(later, 'more rank')} diverged later" if later else ""
    ranks = f"{name_ranks(together)} of {len(comparison.ranks)}{others}. ".capitalize()
    ranks = ranks if comparison.ranks[1:] else ""
    yield (
        f'<p class="lead">First divergence: <strong>{_where(first)}</strong>, {_text(first.kind)} '
        f"<code>{_name(name_call(first.name, first.call))}</code>.</p>"
    )
    yield (f"<p>{ranks}{first.count:,} of {first.compared:,} places differ there.</p>")
    for alone in first.one_sided[:1]:
        run = "actual" if alone.expected is None else "expected"
        yield (
            f"<p>Only the {run} run has {_text(alone.kind)} <code>"
            f"{_name(name_call(alone.name, alone.call))}</code> in that batch.</p>"
        )
    if _DIGEST.fullmatch(first.actual) is None:  # a number, say
        yield f"<p>Expected {_value(first.expected)}, actual {_value(first.actual)}.</p>"
    difference = comparison.first
    if difference is not None and (text := advise(difference[1])):
        yield f"<p>{escape(text)}</p>"
    elif first.kind != "op":
        yield (
            "<p>To find the operation: <code>d9m locate -- COMMAND</code>, with the command that "
            "trains.</p>"
        )


def _where(found: Divergence) -> str:
    batch = "" if found.batch is None else f", batch {found.batch}"
    moment = f"{found.moment} state, " if found.moment in {"initial", "final"} else ""
    if found.moment == "epoch":
        moment = "end of "
    return f"{moment}epoch {found.epoch}, step {found.step}{batch}"


def _render_fields(
    title: str, found: Sequence[FieldDifference], note: str, *, always: bool = False
) -> Iterator[str]:
    if not found and not always:
        return
    yield f"<section><h2>{title}</h2>"
    if not found:
        yield "<p>None.</p></section>"
        return
    yield f"<p>{note}</p>"
    rows = [
        [
            f"<code>{_name(e.field)}</code>",
            _text(e.expected, 256),
            _text(e.actual, 256),
            name_ranks(e.ranks).partition(" ")[2],
        ]
        for e in found[:_FIELDS]
    ]
    yield from _table(["field", "expected", "actual", "ranks"], rows, len(found))
    yield "</section>"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], total: int, filters: str = ""
) -> Iterator[str]:
    """Yield a table; cells are HTML already.

    Args:
        heads: The names of the columns.
        rows: The cells.
        total: How many rows there are in all.
        filters: How each column is filtered: "c" by a choice, "t" by a text, "-" not at all.
    """
    kinds = {"c": ' data-filter="choice"', "t": ' data-filter="text"'}
    yield '<div class="scroll" tabindex="0"><table><thead><tr>'
    for number, head in enumerate(heads):
        how = kinds.get(filters[number : number + 1], "")
        yield f'<th scope="col"{how}>{head}</th>'
    yield "</tr></thead><tbody>"
    count = 0
    for row in rows:
        count += 1
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    yield "</tbody></table></div>"
    if total > count:
        yield f'<p class="left-out">{total - count:,} more are left out.</p>'


def _render_divergences(found: Sequence[Divergence]) -> Iterator[str]:
    if not found:
        return
    yield "<section><h2>First divergence of each rank</h2>"
    rows = [
        [
            str(entry.rank),
            f'<span class="where">{_where(entry)}</span>',
            _text(entry.kind),
            f"<code>{_name(name_call(entry.name, entry.call))}</code>",
            f"{entry.count:,} of {entry.compared:,}",
        ]
        for entry in found[:_RANKS]
    ]
    yield from _table(["rank", "where", "kind", "name", "that differ"], rows, len(found))
    yield "</section>"


def _render_places(found: Sequence[Divergence]) -> Iterator[str]:
    """Yield the table of all that differs where a rank diverges first, with filters."""
    if not found:
        return
    yield "<section><h2>All that differs there</h2>"
    yield (
        "<p>In the batch, or the record, in which each rank diverges first, in order of execution."
        "</p>"
    )
    share = _ROWS_OTHERS // max(1, len(found) - 1)
    rows = [
        [
            str(entry.rank),
            f"{place.position:,}",
            _text(place.kind),
            f"<code>{_name(name_call(place.name, place.call))}</code>",
            _value(place.expected),
            _value(place.actual),
        ]
        for number, entry in enumerate(found)
        for place in entry.places[: share if number else _ROWS_FIRST]
    ]
    heads = ["rank", "position", "kind", "name", "expected", "actual"]
    yield from _table(heads, rows, sum(entry.count for entry in found), "c-ct--")
    yield "</section>"


def _render_timeline(course: Timeline, comparison: Comparison) -> Iterator[str]:
    if not course.ranks:
        return
    # Of many ranks, those that diverge.
    chosen = [*(entry.rank for entry in comparison.divergences), *course.ranks]
    kept = sorted(list(dict.fromkeys(chosen))[:_RANKS])
    drawing = draw_timeline({rank: course.ranks[rank] for rank in kept}, course.epochs)
    yield f"<section><h2>Timeline</h2><figure>{drawing}<figcaption>"
    yield (
        'The digests of each rank by step: <span class="key equal">equal</span> <span class="key '
        'different">different</span> <span class="key alone">in one run only</span></figcaption>'
        "</figure>"
    )
    if len(course.ranks) > len(kept):
        yield f'<p class="left-out">{len(course.ranks) - len(kept):,} more are left out.</p>'
    yield "</section>"


def _render_growth(course: Timeline) -> Iterator[str]:
    if not course.ranks:
        return
    yield "<section><h2>How the difference grows</h2>"
    drawn = False
    for title, growth in (
        ("Share of probed places that differ, by step", course.places),
        ("Share of weights that differ, by step", course.weights),
    ):
        steps = [step for step in growth.ordered() if step.compared]
        # One point shows no growth; the table of moments has it.
        if steps[1:] and any(step.differing for step in steps):
            drawn = True
            drawing = draw_growth(title, growth, course.epochs)
            yield f"<figure>{drawing}<figcaption>{title}.</figcaption></figure>"
    if not drawn:
        yield "<p>No probe and no weight differs in any of several steps that both runs have.</p>"
    yield "</section>"


def _render_tree(course: Timeline, comparison: Comparison) -> Iterator[str]:
    modules = course.modules
    if not modules:
        return
    found = comparison.divergences[:1]
    first = module_of(found[0].kind, found[0].name) if found else None
    yield "<section><h2>Modules</h2>"
    if not course.differing:
        yield "<p>No module differs.</p>"
    yield '<ul class="tree" tabindex="0">'
    paths = {"", *modules, *([] if first is None else [first])}
    for path in list(paths):
        pieces = path.split(".")[:_DEPTH]
        paths |= {".".join(pieces[:n]) for n in range(1, len(pieces))}
    for path in sorted(paths, key=_order):
        module = modules.get(path)
        depth = path.count(".") + 1 if path else 0
        name = path.rpartition(".")[2] if depth <= _DEPTH else path
        depth = min(depth, _DEPTH)
        label = f"<code>{_name(name) if path else '(model)'}</code>"
        state, note = "same", ""
        if module is not None and module.first is not None:
            epoch, step, _, _, what = module.first
            state = "differs"
            note = f"{module.differing:,} differ, first {_name(what)} at epoch {epoch}, step {step}"
        if path == first:
            state, note = "differs first", f"<strong>first divergence</strong> {note}"
        yield f'<li class="{state}" style="--depth:{depth}">{label} <span>{note}</span></li>'
    yield "</ul>"
    if course.modules_left_out:
        yield '<p class="left-out">The model has more modules; the rest is left out.</p>'
    yield "</section>"


def _order(path: str) -> list[str]:
    """Sort layer 10 behind layer 9."""
    pieces = path.split(".") if path else []
    return [piece.zfill(9) if piece.isdecimal() else piece for piece in pieces]


def _render_moments(course: Timeline) -> Iterator[str]:
    if not course.moments:
        return
    yield "<section><h2>Digests by epoch and step</h2>"
    rows = [
        [
            str(moment.rank),
            _text(moment.where),
            f'<span class="status {moment.status.replace(" ", "-")}">{moment.status}</span>',
            ", ".join(f"{_text(g)} {n:,} of {of:,}" for g, n, of in moment.groups[:20]),
        ]
        for moment in course.moments
    ]
    total = len(rows) + course.moments_left_out
    yield from _table(["rank", "moment", "status", "that differ"], rows, total, "ctc-")
    yield "</section>"


def _render_one_sided(comparison: Comparison) -> Iterator[str]:
    sentences = list(list_one_sided(comparison))
    if sentences:
        yield "<section><h2>In one run only, resumed, or cut short</h2><ul>"
        yield from (f"<li>{_text(text, _WORDS)}</li>" for text in sentences[:_SENTENCES])
        yield "</ul>"
        if sentences[_SENTENCES:]:
            yield f'<p class="left-out">{len(sentences) - _SENTENCES:,} more are left out.</p>'
        yield "</section>"
