"""What ``d9m locate`` has found, in sentences."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightning_d9m.evidence.display import plain

if TYPE_CHECKING:
    from lightning_d9m.adapters.locate import Found
    from lightning_d9m.adapters.locate_op import OpFinding
    from lightning_d9m.evidence.compare import Divergence

_WIDTH = 80
_LABEL = re.compile(r"\s*[a-z ]+:|\s+")
# A line of the program, with the path of its file, is shown whole.
_LONGEST = 400


def describe_place(found: "Sequence[Divergence]") -> str:
    """Return where runs diverge, in a line."""
    if not found:
        return "the runs are not comparable"
    first = found[0]
    when = f"epoch {first.epoch}, step {first.step}"
    if first.moment == "batch":
        when += f", batch {first.batch}"
    elif first.moment in ("initial", "final"):
        when = f"the {first.moment} state"
    call = f", call {first.call}" if first.call else ""
    return f"{when}: {first.kind} {plain(first.name)}{call}"


def describe(found: "Found", *, recipe: bool) -> Iterator[str]:
    """Yield the lines of the report, none longer than a terminal is wide unless a name is."""
    for line in _describe(found, recipe=recipe):
        indent = len(line) - len(line.lstrip()) + (2 if _LABEL.match(line) else 0)
        yield from textwrap.wrap(
            line,
            _WIDTH,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]


def _describe(found: "Found", *, recipe: bool) -> Iterator[str]:
    for look in found.looks:
        yield f"  {look}"
    yield ""
    if found.cause is None:
        yield "equal: no two runs differ."
        if recipe:
            yield "To see what would differ without lightning_d9m's switches: --without-recipe."
        return
    cause, pair = found.cause, found.pair
    yield f"cause: {cause.kind}"
    yield cause.text
    if found.divergences:
        first = found.divergences[0]
        yield f"where: {describe_place(found.divergences)}"
        ranks = ", ".join(str(entry.rank) for entry in found.divergences)
        if found.ranks > 1:
            yield f"rank:  {ranks} of {found.ranks}"
        yield f"differ: {first.count:,} of {first.compared:,} places of that moment"
    elif pair is not None:
        for entry in (*pair.comparison.refusals, *pair.comparison.stack):
            yield f"  {plain(entry.field)}"
            yield f"    expected: {plain(entry.expected)}"
            yield f"    actual:   {plain(entry.actual)}"
    if found.op is not None:
        yield from describe_op(found.op)
    if cause.advice:
        yield f"advice: {cause.advice}"


def describe_op(found: "OpFinding") -> Iterator[str]:
    """Yield what the dumps of an operation show, and what the catalogue knows of it."""
    from lightning_d9m.adapters.locate_op import find_patch

    yield f"op: {found.op}" + (
        f", called at {plain(found.source, _LONGEST)}" if found.source else ""
    )
    if found.inputs_equal:
        yield "Its inputs were equal in both runs."
    else:
        yield "Its inputs differed, though no recorded operation wrote them."
    if found.magnitude is not None:
        m = found.magnitude
        ulps = "" if m.ulps is None else f", at most {m.ulps:,} ulps"
        yield (
            f"{m.count:,} of {m.total:,} elements differ{ulps}, by at most {m.absolute:.3g} "
            f"({m.relative:.3g} relative)"
        )
        for at, expected, actual in m.examples:
            yield f"  {list(at)}"
            yield f"    expected: {expected!r} ({expected.hex()})"
            yield f"    actual:   {actual!r} ({actual.hex()})"
    if not found.inputs_equal:
        return
    if found.obstacle:
        yield f"It could not be run alone: {plain(found.obstacle, _LONGEST)}"
    elif found.outcomes > 1:
        yield (
            f"Confirmed: run alone {found.replays} times on these inputs, it gave "
            f"{found.outcomes} different outputs."
        )
    else:
        yield (
            f"Run alone {found.replays} times on these inputs, here, it gave one output each time: "
            "what makes it differ is not shown by the operation alone."
        )
    patch = find_patch(found.op)
    if patch is not None:
        does = patch.instead or patch.reason
        yield f"known: {patch.name} ({patch.status}). {patch.cause} {does}"
        yield f"fix: {patch.torch_does} See `d9m ops {patch.name}`."
    elif found.outcomes > 1:
        yield (
            "fix: torch.use_deterministic_algorithms(True), which lightning_d9m switches on, picks "
            "a deterministic kernel or raises; without a recipe's switches it is off."
        )
