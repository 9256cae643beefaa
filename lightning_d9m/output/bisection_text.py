"""The result of ``d9m bisect`` as text and as JSON types."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict

from lightning_d9m.history.bisection import BisectResult, Trial
from lightning_d9m.history.repository import Commit
from lightning_d9m.output.comparison_text import format_evidence
from lightning_d9m.output.terminal import format_next_steps, wrap
from lightning_d9m.text import escape, pluralize, printable

# Relative distances of weights below it can come from the rounding of float32 alone.
ROUNDING = 1e-5
_PATCH_LINES = 40


def list_facts(result: BisectResult) -> dict[str, object]:
    """Return the result as JSON types."""
    guilty = result.guilty
    comparison = guilty.comparison if guilty else None
    return {
        "candidates": [asdict(commit) for commit in result.candidates],
        "good": result.good.sha,
        "bad": result.bad.sha,
        "commits": result.commits,
        "distance": guilty.distance if guilty else None,
        "comparison": comparison.as_json() if comparison else None,
        "patch": result.patch,
        "trials": [
            {
                "commit": trial.commit.sha,
                "verdict": trial.verdict,
                "seconds": round(trial.seconds, 3),
                "reason": trial.reason,
            }
            for trial in result.trials
        ],
    }


def format_bisection(result: BisectResult, *, verbose: bool = False) -> list[str]:
    """Return the lines of the result: the commit, what it changed, and what differs first."""
    lines = [*_format_candidates(result), ""]
    if result.patch:
        lines += _format_patch(result, verbose=verbose)
    if result.guilty is not None:
        lines += _format_difference(result.guilty, verbose=verbose)
    tested = [trial for trial in result.trials if trial.verdict != "skipped"]
    skipped = len(result.trials) - len(tested)
    lines.append(
        f"trained: {pluralize(len(tested), 'time')} for {pluralize(result.commits, result.noun)}"
        + (
            f", {skipped} skipped because {'it' if skipped == 1 else 'they'} did not train"
            if skipped
            else ""
        )
    )
    steps = []
    if result.patch:
        steps.append((f"git show {result.candidates[0].short}", "shows the whole commit"))
    if result.guilty is not None and (found := result.guilty.comparison) is not None:
        paths = printable(shlex.join([str(found.expected), str(found.actual)]))
        steps.append((f"d9m report {paths}", "shows the difference as a page"))
    return [*lines, *format_next_steps(steps)]


def _format_candidates(result: BisectResult) -> Iterator[str]:
    if len(result.candidates) == 1:
        yield from wrap(f"first {result.noun} that differs: {_describe(result.candidates[0])}")
        return
    yield from wrap(
        f"The first {result.noun} that differs is one of these {len(result.candidates)}; the "
        "others in between did not train:"
    )
    for commit in result.candidates:
        yield f"  {_describe(commit)}"


def _describe(commit: Commit) -> str:
    if not commit.author:
        return escape(commit.subject)
    return f"{commit.short} {escape(commit.subject)} ({escape(commit.author)}, {commit.date})"


def _format_patch(result: BisectResult, *, verbose: bool) -> Iterator[str]:
    lines = result.patch.strip("\n").splitlines()
    shown = lines if verbose else lines[:_PATCH_LINES]
    for line in shown:
        yield f"  {printable(line)}".rstrip()
    if left := len(lines) - len(shown):
        yield f"  ... and {pluralize(left, 'more line')}; -v shows all"
    yield ""


def _format_difference(trial: Trial, *, verbose: bool) -> Iterator[str]:
    if trial.comparison is None:
        yield from wrap("It trains another number of fits than the good one.")
    else:
        yield from format_evidence(trial.comparison, verbose=verbose)
    if (distance := trial.distance) is not None:
        size = f"Where weights first differ, they are {distance:.1e} of their norm apart"
        if distance < ROUNDING:
            yield from wrap(f"{size}: as little as rounding does.")
        else:
            yield from wrap(
                f"{size}: more than rounding does in a step. Either another computation, or "
                "rounding that the steps before have amplified."
            )
    yield ""
