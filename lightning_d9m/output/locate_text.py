"""The report of ``d9m locate`` as text."""

import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_d9m.locate.result import describe_place
from lightning_d9m.text import escape

if TYPE_CHECKING:
    from lightning_d9m.comparison.numeric_difference import Magnitude
    from lightning_d9m.locate.op_evidence import OpFinding
    from lightning_d9m.locate.result import SearchResult
    from lightning_d9m.locate.samples import SampleComparison

_WIDTH = 80
# By the status of the catalog's entry; an exempt entry has its own.
_FIXES = {
    "patched": "On a CUDA machine, patch_ops=True (LIGHTNING_D9M_PATCH_OPS=1) replaces it.",
    "offered": "Deterministic algorithms, which lightning_d9m switches on.",
    "exempt": "",
}
_LABEL = re.compile(r"\s*[a-z ]+:|\s+")
# A line of the program, with its file's path, is shown in full.
_LONGEST = 400


def describe(found: "SearchResult", *, determinism: bool) -> Iterator[str]:
    """Yield the lines of the report, wrapped at 80 columns; long names are not broken."""
    for line in _describe(found, determinism=determinism):
        indent = len(line) - len(line.lstrip()) + (2 if _LABEL.match(line) else 0)
        yield from textwrap.wrap(
            line,
            _WIDTH,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]


def _describe(found: "SearchResult", *, determinism: bool) -> Iterator[str]:
    for look in found.looks:
        yield f"  {look}"
    yield ""
    if found.cause is None:
        yield "equal: no two runs differ."
        if determinism:
            yield "To see what differs without the determinism settings, add --no-determinism."
        return
    cause = found.cause
    yield f"cause: {cause.kind}"
    yield cause.text
    yield from _describe_moment(found)
    if found.op is not None:
        yield from describe_op(found.op)
    elif found.magnitude is not None:
        yield from _describe_magnitude(found.magnitude)
    if found.samples is not None:
        yield f"samples: {_describe_samples(found.samples)}"
    for finding in found.lines:
        yield f"line: {escape(finding.place, _LONGEST)}: {escape(finding.code)}"
        yield f"  {finding.rule}: {finding.reason}"
    if cause.advice:
        yield f"advice: {cause.advice}"


def _describe_moment(found: "SearchResult") -> Iterator[str]:
    """Yield where the runs diverge, and the fields that make them incomparable."""
    pair = found.pair
    if found.divergences:
        first = found.divergences[0]
        yield f"where: {describe_place(found.divergences)}"
        if found.ranks > 1:
            yield f"rank:  {_name_ranks(found)}"
        if pair is not None and pair.fits > 1:
            yield f"fit:   {escape(pair.fit)}, one of {pair.fits}"
        yield f"differ: {first.count:,} of {first.compared:,} places of that moment"
    if pair is None:
        return
    for entry in (*pair.comparison.refusals, *pair.comparison.stack):
        yield f"  {escape(entry.field)}"
        yield f"    reference: {escape(entry.expected)}"
        yield f"    this run:  {escape(entry.actual)}"
    if found.divergences or pair.comparison.refusals:
        return
    for rank in pair.comparison.ranks:
        for side, alone in (("expected", rank.only_expected), ("actual", rank.only_actual)):
            if alone.count:
                yield (
                    f"  rank {rank.rank}, {side} alone: {alone.count:,} records, from "
                    f"{escape(alone.first)}"
                )


def _name_ranks(found: "SearchResult") -> str:
    ranks = ", ".join(str(entry.rank) for entry in found.divergences)
    reference = found.reference_rank
    compared = "" if reference is None else f", compared with rank {reference} (reference)"
    return f"{ranks} of {found.ranks}{compared}"


def _describe_samples(samples: "SampleComparison") -> str:
    if samples.same:
        return f"the epoch has the same {samples.expected:,} in both runs, in a different order."
    counts = f"{samples.expected:,}"
    if samples.actual != samples.expected:
        counts += f" and {samples.actual:,}"
    return f"of the epoch's {counts}, {samples.common:,} are in both runs; the others differ."


def describe_op(found: "OpFinding") -> Iterator[str]:
    """Yield the evidence on an operation, and its entry in the catalog."""
    called = "in the backward pass of" if found.backward else "called at"
    source = f", {called} {escape(found.source, _LONGEST)}" if found.source else ""
    yield f"op: {found.op}{source}"
    if not found.inputs_equal:
        yield "Its inputs differed, although no recorded operation wrote them."
    elif found.generator_equal:
        yield "Its inputs were equal in both runs."
    else:
        yield "Its inputs were equal in both runs, but not the state of its generator."
    if found.magnitude is not None:
        yield from _describe_magnitude(found.magnitude)
    if not found.inputs_equal:
        return
    if found.obstacle:
        yield f"It could not be run alone: {escape(found.obstacle, _LONGEST)}"
    elif found.outcomes > 1:
        yield (
            f"Confirmed: run alone {found.replays} times on these inputs, it gave "
            f"{found.outcomes} different outputs."
        )
    elif not found.generator_equal:
        yield (
            f"Confirmed: run alone {found.replays} times from one state of its generator, it "
            "always gave the same output."
        )
    else:
        yield (
            f"Run alone {found.replays} times on these inputs, it always gave the same output: the "
            "operation alone does not show why it differs."
        )
    if found.generator_equal:
        yield from _describe_fix(found)


def _describe_fix(found: "OpFinding") -> Iterator[str]:
    """Yield the catalog's entry of an operation, and the fix."""
    patch = found.patch
    if patch is not None:
        yield f"known: {patch.name} ({patch.status}). {patch.cause}"
        yield f"with deterministic algorithms on, torch: {patch.torch_does}"
        yield f"fix: {_FIXES[patch.status] or patch.reason} See `d9m ops {patch.name}`."
    elif found.outcomes > 1:
        yield (
            "fix: torch.use_deterministic_algorithms(True), which lightning_d9m switches on, picks "
            "a deterministic kernel or raises; --no-determinism leaves it off."
        )


def _describe_magnitude(found: "Magnitude") -> Iterator[str]:
    ulps = "" if found.ulps is None else f", at most {found.ulps:,} ulps"
    yield (
        f"{found.count:,} of {found.total:,} elements differ{ulps}, by at most "
        f"{found.absolute:.3g} ({found.relative:.3g} relative)"
    )
    for at, expected, actual in found.examples:
        yield f"  {list(at)}"
        yield f"    reference: {expected!r} ({expected.hex()})"
        yield f"    this run:  {actual!r} ({actual.hex()})"
