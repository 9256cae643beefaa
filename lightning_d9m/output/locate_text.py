"""The report of ``d9m locate`` as text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_d9m.ledger.kinds import STATE
from lightning_d9m.locate.search import describe_place, explains
from lightning_d9m.output.comparison_text import format_field, list_one_sided
from lightning_d9m.output.terminal import make_table, measure, render, wrap
from lightning_d9m.text import escape, printable

if TYPE_CHECKING:
    from lightning_d9m.comparison.numeric_difference import Magnitude
    from lightning_d9m.locate.op_evidence import OpFinding
    from lightning_d9m.locate.search import SearchResult

_INDENT = " " * 10
_MOST_ULPS = 2**16
_PAIR = 2
_EXAMPLES = 3
# By the status of the catalog's entry; an exempt entry has its own.
_FIXES = {
    "patched": "On a CUDA machine, patch_ops=True (LIGHTNING_D9M_PATCH_OPS=1) replaces it.",
    "exempt": "",
}
# A line of the program, with its file's path, is shown in full.
_LONGEST = 400


def describe(found: "SearchResult", *, determinism: bool, verbose: bool = False) -> Iterator[str]:
    """Yield the lines of the report: the cause, where it is, the evidence, the advice."""
    if found.cause is None:
        yield "equal: no two runs differ."
        if determinism:
            yield "To see what differs without the determinism settings, add --no-determinism."
    else:
        yield from wrap(f"different: {found.cause.kind}. {found.cause.text}")
        yield ""
        yield from _describe_cause(found, verbose=verbose)
    for number, look in enumerate(found.looks):
        yield from _label("" if number else "looks", look)


def _describe_cause(found: "SearchResult", *, verbose: bool) -> Iterator[str]:
    assert found.cause is not None, "something differs"
    yield from _describe_moment(found)
    for finding in found.lines:
        label = "line" if explains(finding.rule, found.cause.kind) else "suspect"
        yield from _label(label, f"{escape(finding.location, _LONGEST)}: {escape(finding.code)}")
        yield from _label("", f"{finding.rule}: {finding.reason}")
    if found.op is not None:
        yield from describe_op(found.op)
        if found.op.magnitude is not None:
            yield from _describe_magnitude(found.op.magnitude, verbose=verbose)
        if found.op.inputs_equal and found.op.generator_equal:
            yield from _describe_fix(found.op)
    elif found.magnitude is not None:
        yield from _describe_magnitude(found.magnitude, verbose=verbose)
    if found.left:
        yield from _label("files", printable(found.left))
    if found.cause.advice:
        yield from _label("advice", found.cause.advice)


def _label(label: str, text: str) -> Iterator[str]:
    """Yield a text beside its label; without one, below the text of the label before."""
    yield from wrap(text, _INDENT, f"{label}:".ljust(len(_INDENT)) if label else None)


def _describe_moment(found: "SearchResult") -> Iterator[str]:
    """Yield where the runs diverge, and the fields that make them incomparable."""
    pair = found.pair
    if found.divergences:
        first = found.divergences[0]
        yield from _label("where", describe_place(found.divergences))
        if found.ranks > 1:
            ranks = ", ".join(str(entry.rank) for entry in found.divergences)
            reference = found.reference_rank
            compared = "" if reference is None else f", compared with rank {reference} (reference)"
            named = f"{ranks} of {found.ranks}{compared}"
            if reference is not None and found.ranks == _PAIR:
                named = "0 and 1 differ from each other; two ranks do not show which one is wrong"
            yield from _label("rank", named)
        if pair is not None and pair.fits > 1:
            yield from _label("fit", f"{escape(pair.fit)}, one of {pair.fits}")
        differ = f"{first.count:,} of {first.compared:,} values recorded there"
        yield from _label("differ", differ)
        yield from _describe_writing(found)
    if pair is None:
        return
    for entry in (*pair.comparison.refusals, *pair.comparison.stack):
        yield from format_field(entry, len(pair.comparison.ranks))
    for sentence in () if found.divergences else list_one_sided(pair.comparison):
        yield from wrap(sentence, "  ")


def _describe_writing(found: "SearchResult") -> Iterator[str]:
    """Yield when the state that differs at the beginning of a batch was written."""
    first = found.divergences[0]
    if found.writer:
        yield from _label("written", escape(found.writer, _LONGEST))
    elif first.moment != "batch" or first.kind not in STATE or found.reference_rank is not None:
        return
    elif first.call:
        yield from _label("written", f"in step {first.step}, before the optimizer's step")
    elif first.step:
        yield from _label(
            "written",
            f"in step {first.step - 1}, or by a hook or thread before this one",
        )


def describe_op(found: "OpFinding") -> Iterator[str]:
    """Yield an operation, the line that calls it, and the evidence."""
    called = "in the backward pass of" if found.backward else "called at"
    source = f", {called} {escape(found.source, _LONGEST)}" if found.source else ""
    yield from _label("op", f"{found.op}{source}")
    if not found.inputs_equal:
        yield from _label("", "Its inputs differed, although no recorded operation wrote them.")
        return
    state = "" if found.generator_equal else ", but not the state of its generator"
    yield from _label("", f"Its inputs were equal in both runs{state}.")
    runs = f"alone {found.replays} times on these inputs, it"
    if found.obstacle:
        said = f"It could not be run alone: {escape(found.obstacle, _LONGEST)}"
    elif found.outcomes > 1:
        said = f"Confirmed: run {runs} gave {found.outcomes} different outputs."
    elif not found.generator_equal:
        said = (
            f"Confirmed: run alone {found.replays} times from one state of its generator, it "
            "always gave the same output."
        )
    else:
        said = (
            f"Run {runs} always gave the same output: the operation alone does not show why it "
            "differs."
        )
    yield from _label("", said)


def _describe_fix(found: "OpFinding") -> Iterator[str]:
    """Yield the catalog's entry of an operation, and the fix."""
    patch = found.patch
    if patch is not None:
        yield from _label("known", f"{patch.name} ({patch.status}). {patch.cause}")
        yield from _label("", f"With deterministic algorithms on, torch: {patch.torch_does}")
        fix = _FIXES[patch.status] or patch.reason
        yield from _label("fix", f"{fix} See `d9m ops {patch.name}`.")
    elif found.outcomes > 1:
        yield from _label(
            "fix",
            "torch.use_deterministic_algorithms(True), which lightning_d9m enables, picks "
            "a deterministic kernel or raises; --no-determinism leaves it off.",
        )


def _describe_magnitude(found: "Magnitude", *, verbose: bool) -> Iterator[str]:
    # Of values that have little in common, the number says nothing.
    close = found.ulps is not None and found.ulps < _MOST_ULPS
    ulps = f", {found.ulps:,} ulps" if close else ""
    yield from _label(
        "values",
        f"{found.count:,} of {found.total:,} elements differ, by at most {found.absolute:.3g} "
        f"({found.relative:.3g} relative{ulps})",
    )
    rows = []
    for at, expected, actual in found.examples[: None if verbose else _EXAMPLES]:
        rows.append((str(list(at)), repr(expected), repr(actual)))
        if verbose:
            rows.append(("", expected.hex(), actual.hex()))
    table = make_table(("index", "reference", "this run"), rows)
    for line in render(table, measure(table), plain=True).splitlines():
        yield f"{_INDENT}{line}"
