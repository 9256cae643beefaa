"""The page that ``d9m report`` writes. Whatever comes from a ledger passes through ``_text``."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from lightning_d9m import __version__
from lightning_d9m.adapters.compare_report import state_verdict
from lightning_d9m.adapters.report_style import SCRIPT, STYLE
from lightning_d9m.evidence.compare import Comparison, Divergence
from lightning_d9m.evidence.course import Course, Growth, Module
from lightning_d9m.evidence.difference import FieldDifference, name_call
from lightning_d9m.evidence.display import describe_value, shown

GENERATOR = '<meta name="generator" content="lightning_d9m'
_RANKS = 64
_ROWS = 500
_FIELDS = 200
_DEPTH = 12
_WIDTH, _HEIGHT = 720, 200
_LEFT, _BOTTOM = 64, 28


def _text(value: object, limit: int = 160) -> str:
    """Return an untrusted value for HTML: one line, cut, escaped, and isolated in its direction."""
    text = value if isinstance(value, str) else shown(value, limit)
    if len(text) > limit or not text.isprintable():
        text = shown(text, limit)
    return f"<bdi>{escape(text)}</bdi>"


def _name(value: object) -> str:
    """Return a name as ``_text`` does; a line may end at its dots, rather than within a word."""
    return _text(value).replace(".", ".<wbr>").replace("_", "_<wbr>")


def render_page(comparison: Comparison, course: Course) -> str:
    """Return the whole page."""
    title = f"d9m: {comparison.verdict}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'{GENERATOR} {escape(__version__)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Whatever a ledger might smuggle in: nothing is loaded from anywhere.
        (
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
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
        *_render_growth(course),
        *_render_tree(course, comparison),
        *_render_moments(course),
        *_render_one_sided(comparison),
        f"<footer>Written by lightning_d9m {escape(__version__)}.</footer>",
        f"</main><script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _render_verdict(comparison: Comparison) -> Iterator[str]:
    kind = comparison.verdict.replace(" ", "-")
    yield f'<header class="verdict {kind}"><h1>{escape(comparison.verdict.capitalize())}</h1>'
    yield f"<p>{_text(state_verdict(comparison), 1000)}</p>"
    for found in comparison.divergences[:1]:
        yield (
            f"<p>First divergence: <strong>{_where(found)}</strong>, {_text(found.kind)} "
            f"<code>{_name(name_call(found.name, found.call))}</code>.</p>"
        )
    yield "<dl>"
    for name, path in (("expected", comparison.expected), ("actual", comparison.actual)):
        yield f"<dt>{name}</dt><dd><code>{_text(str(path), 400)}</code></dd>"
    yield "</dl>"
    if comparison.expected.exists() and comparison.expected.samefile(comparison.actual):
        yield "<p>Both are one ledger, so this shows nothing about two runs.</p>"
    yield "</header>"


def _where(found: Divergence) -> str:
    batch = "" if found.batch is None else f", batch {found.batch}"
    moment = _text(found.moment) + ", " if found.moment in {"initial", "final"} else ""
    return f"{moment}rank {found.rank}, epoch {found.epoch}, step {found.step}{batch}"


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
        [f"<code>{_name(e.field)}</code>", _text(e.expected), _text(e.actual)]
        for e in found[:_FIELDS]
    ]
    yield from _table(["field", "expected", "actual"], rows, len(found))
    yield "</section>"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], total: int, attributes: str = ""
) -> Iterator[str]:
    """Yield a table; cells are HTML already."""
    yield f'<div class="scroll"><table{attributes}><thead><tr>'
    yield "".join(f'<th scope="col">{head}</th>' for head in heads) + "</tr></thead><tbody>"
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
            f'<span class="where">{_where(entry).removeprefix(f"rank {entry.rank}, ")}</span>',
            _text(entry.kind),
            f"<code>{_name(name_call(entry.name, entry.call))}</code>",
            f"{entry.count:,} of {entry.compared:,}",
        ]
        for entry in found[:_RANKS]
    ]
    heads = ["rank", "where", "kind", "name", "that differ"]
    yield from _table(heads, rows, len(found))
    first = found[0]
    yield "<dl>"
    yield f"<dt>expected</dt><dd><code>{_text(describe_value(first.expected))}</code></dd>"
    yield f"<dt>actual</dt><dd><code>{_text(describe_value(first.actual))}</code></dd></dl>"
    if first.places:
        yield f"<h3>Places that differ: {_where(first)}</h3>"
        yield (
            '<form class="filters" hidden><label>Name <input type="search" id="name"></label> '
            '<label>Kind <select id="kind"><option value="">all</option></select></label> '
            '<output id="shown"></output></form>'
        )
        places = [
            [
                f"{place.position:,}",
                _text(place.kind),
                f"<code>{_name(name_call(place.name, place.call))}</code>",
                f"<code>{_text(place.expected)}</code>",
                f"<code>{_text(place.actual)}</code>",
            ]
            for place in first.places[:_ROWS]
        ]
        heads = ["position", "kind", "name", "expected", "actual"]
        yield from _table(heads, places, first.count, ' id="places"')
    yield "</section>"


def _render_growth(course: Course) -> Iterator[str]:
    yield "<section><h2>How the difference grows</h2>"
    drawn = False
    for title, growth in (
        ("Share of probed places that differ, by step", course.places),
        ("Share of weights that differ, by step", course.weights),
    ):
        # One point shows no growth; the table of moments has it.
        if sum(step.compared > 0 for step in growth.ordered()) > 1:
            drawn = True
            yield f"<figure>{_plot(title, growth)}<figcaption>{title}.</figcaption></figure>"
    yield "</section>" if drawn else "<p>Fewer than two steps were compared.</p></section>"


def _plot(title: str, growth: Growth) -> str:
    steps = [step for step in growth.ordered() if step.compared]
    low, high = steps[0].first, max(steps[-1].last, steps[0].first + 1)
    top = max(step.differing / step.compared for step in steps) or 1.0

    def across(step: float) -> float:
        return round(_LEFT + (step - low) / (high - low) * (_WIDTH - _LEFT - 12), 1)

    def up(share: float) -> float:
        return round(_HEIGHT - _BOTTOM - share / top * (_HEIGHT - _BOTTOM - 14), 1)

    points = [
        (across((step.first + step.last) / 2), up(step.differing / step.compared)) for step in steps
    ]
    line = " ".join(f"{x},{y}" for x, y in points)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2.5"/>' for x, y in points[:200])
    first = next((step.first for step in steps if step.differing), None)
    mark = ""
    if first is not None:
        at = across(first)
        mark = f'<line class="mark" x1="{at}" x2="{at}" y1="8" y2="{_HEIGHT - _BOTTOM}"/>'
    base = _HEIGHT - _BOTTOM
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{base}" y2="{base}"/>'
        f'<line class="axis" x1="{_LEFT}" x2="{_LEFT}" y1="8" y2="{base}"/>{mark}'
        f'<polyline points="{line}"/>{dots}'
        f'<text x="{_LEFT - 6}" y="{up(top) + 4}" text-anchor="end">{top:.2g}</text>'
        f'<text x="{_LEFT - 6}" y="{base + 4}" text-anchor="end">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">step {low:,}</text>'
        f'<text x="{_WIDTH - 12}" y="{_HEIGHT - 8}" text-anchor="end">{high:,}</text></svg>'
    )


def _render_tree(course: Course, comparison: Comparison) -> Iterator[str]:
    if not course.modules:
        return
    first = min(
        ((*m.first[1:4], path) for path, m in course.modules.items() if m.first), default=None
    )
    yield "<section><h2>Modules</h2>"
    if not comparison.divergences:
        yield "<p>No module differs.</p>"
    yield '<ul class="tree">'
    paths = {"", *course.modules}
    for path in course.modules:
        pieces = path.split(".")[:_DEPTH]
        paths |= {".".join(pieces[:n]) for n in range(1, len(pieces))}
    for path in sorted(paths, key=lambda path: path.split(".") if path else []):
        module = course.modules.get(path, Module())
        depth = path.count(".") + 1 if path else 0
        name = path.rpartition(".")[2] if depth <= _DEPTH else path
        depth = min(depth, _DEPTH)
        label = f"<code>{_name(name) if path else '(model)'}</code>"
        state, note = "same", ""
        if module.differing and module.first:
            _, epoch, step, _, what = module.first
            state = "differs"
            note = f"{module.differing:,} differ, first {_name(what)} at epoch {epoch}, step {step}"
        if first is not None and path == first[-1]:
            state, note = "differs first", f"<strong>first divergence</strong>; {note}"
        yield f'<li class="{state}" style="--depth:{depth}">{label} <span>{note}</span></li>'
    yield "</ul>"
    if course.modules_left_out:
        yield '<p class="left-out">The model has more modules; the rest is left out.</p>'
    yield "</section>"


def _render_moments(course: Course) -> Iterator[str]:
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
    yield from _table(["rank", "moment", "status", "that differ"], rows, total)
    yield "</section>"


def _render_one_sided(comparison: Comparison) -> Iterator[str]:
    rows = []
    for name, ranks in (
        ("expected", comparison.ranks_only_expected),
        ("actual", comparison.ranks_only_actual),
    ):
        rows += [[str(rank), name, "a file of this rank", ""] for rank in ranks[:_RANKS]]
    for entry in comparison.ranks:
        for name, what, found in (
            ("expected", "records", entry.only_expected),
            ("actual", "records", entry.only_actual),
            ("expected", "places", entry.only_expected_places),
            ("actual", "places", entry.only_actual_places),
        ):
            if found.count:
                rows.append([str(entry.rank), name, f"{found.count:,} {what}", _text(found.first)])
        for name, complete in (
            ("expected", entry.expected_complete),
            ("actual", entry.actual_complete),
        ):
            if not complete and not comparison.refusals:
                rows.append([str(entry.rank), name, "ended before it finished", ""])
    if rows:
        yield "<section><h2>In one run only</h2>"
        yield from _table(["rank", "run", "what", "the first"], rows[:_ROWS], len(rows))
        yield "</section>"
