"""The result of ``d9m bisect`` as text and as JSON types."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict

from lightning_d9m.history.bisection import Bisection, Trial
from lightning_d9m.history.repository import Commit
from lightning_d9m.output.comparison_text import format_evidence
from lightning_d9m.output.terminal import format_next_steps, wrap
from lightning_d9m.text import escape, pluralize, printable

# Relative distances of weights below it can come from the rounding of float32 alone.
ROUNDING = 1e-5
_PATCH_LINES = 40


def list_facts(found: Bisection) -> dict[str, object]:
    """Return the result as JSON types."""
    guilty = found.guilty
    comparison = guilty.comparison if guilty else None
    return {
        "candidates": [asdict(commit) for commit in found.candidates],
        "commits": found.commits,
        "distance": guilty.distance if guilty else None,
        "comparison": comparison.as_json() if comparison else None,
        "patch": _find_patch(found),
        "trials": [
            {
                "commit": trial.commit.sha,
                "verdict": trial.verdict,
                "seconds": round(trial.seconds, 3),
                "reason": trial.reason,
            }
            for trial in found.trials
        ],
    }


def format_bisection(found: Bisection, *, verbose: bool = False) -> list[str]:
    """Return the lines of the result: the commit, what it changed, and what differs first."""
    lines, steps = [*_format_candidates(found), ""], []
    if patch := _find_patch(found):
        whole = patch.strip("\n").splitlines()
        shown = whole if verbose else whole[:_PATCH_LINES]
        lines += [f"  {printable(line)}".rstrip() for line in shown]
        if left := len(whole) - len(shown):
            lines.append(f"  ... and {pluralize(left, 'more line')}; -v shows all")
        lines.append("")
        steps.append((f"git show {found.candidates[0].short}", "shows the whole commit"))
    if (guilty := found.guilty) is not None:
        lines += _format_difference(guilty, verbose=verbose)
        if (compared := guilty.comparison) is not None:
            paths = printable(shlex.join([str(compared.expected), str(compared.actual)]))
            steps.append((f"d9m report {paths}", "shows the difference as a page"))
    skipped = sum(trial.verdict == "skipped" for trial in found.trials)
    trained = pluralize(len(found.trials) - skipped, "time")
    said = f"trained: {trained} for {pluralize(found.commits, found.repository.noun)}"
    if skipped:
        said += f", {skipped} skipped because {'it' if skipped == 1 else 'they'} did not train"
    return [*lines, said, *format_next_steps(steps)]


def _find_patch(found: Bisection) -> str:
    """Return what the commit changed; nothing for a package, or if there are several candidates."""
    first, *others = found.candidates
    return found.repository.show(first) if first.author and not others else ""


def _format_candidates(found: Bisection) -> Iterator[str]:
    noun, candidates = found.repository.noun, found.candidates
    if len(candidates) == 1:
        yield from wrap(f"first {noun} that differs: {_describe(candidates[0])}")
        return
    yield from wrap(
        f"The first {noun} that differs is one of these {len(candidates)}; the others in between "
        "did not train:"
    )
    for commit in candidates:
        yield f"  {_describe(commit)}"


def _describe(commit: Commit) -> str:
    if not commit.author:
        return escape(commit.subject)
    return f"{commit.short} {escape(commit.subject)} ({escape(commit.author)}, {commit.date})"


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
