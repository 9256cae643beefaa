"""``d9m bisect``: find the commit that changed the bits of a training."""

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path

from lightning_d9m.errors import SettingError
from lightning_d9m.text import escape, pluralize, printable
from lightning_d9m.tools.cli.arguments import COMMAND, get_command
from lightning_d9m.tools.history.bisection import Bisection, Commit, Repository
from lightning_d9m.tools.launch.runs import Runs, make_output
from lightning_d9m.tools.output.columns import print_result
from lightning_d9m.tools.output.comparison_text import format_evidence
from lightning_d9m.tools.output.terminal import format_next_steps, wrap

ARGUMENTS = f"""
commits:GOOD..BAD  a commit with the right bits and a later one with others; GOOD.. ends at HEAD
--until EPOCH  end each training after this epoch of its first fit, counted from 0 (default: train
    to the end)
--link PATH ...  a path below the repository's top that git does not track and the training needs,
    such as a folder of data; may be given several times
-o, --output DIR  new folder for ledgers and logs
-v, --verbose  show whole digests and the bits of numbers
{COMMAND}"""
EXAMPLE = "d9m bisect v1.0..HEAD --until 0 -- python train.py"
SETTINGS: dict[str, dict[str, object]] = {"link": {"default": [], "type": str}}


def run(arguments: argparse.Namespace) -> int:
    """Bisect and print the commit; return 1, because there is a difference."""
    command = get_command(arguments)
    repository = Repository(Path.cwd())
    good, bad = _find_commits(repository, arguments.commits)
    runs = Runs(command, make_output(arguments.output), arguments.timeout)
    search = Bisection(repository, runs, arguments.until, arguments.link)
    try:
        search.search(good, bad)
    except (KeyboardInterrupt, SystemExit):  # a signal
        _print_out(search, arguments)
        raise
    _print_out(search, arguments)
    return 1


def _print_out(search: Bisection, arguments: argparse.Namespace) -> None:
    output = search.runs.output
    guilty, named = search.guilty, ("verdict", "seconds", "reason")
    comparison = guilty.comparison if guilty else None
    facts = {
        "candidates": [asdict(commit) for commit in search.candidates],
        "commits": search.commits,
        "comparison": comparison.as_json() if comparison else None,
        "trials": [
            {"commit": trial.commit.sha, **{name: getattr(trial, name) for name in named}}
            for trial in search.trials
        ],
        "output": str(output),
    }
    lines = format_bisection(search, verbose=arguments.verbose)
    print_result(arguments.format, facts, [*lines, "", f"ledgers: {output}"])


def _find_commits(repository: Repository, commits: str) -> tuple[Commit, Commit]:
    """Return the good commit and the bad one."""
    first, dots, last = commits.partition("..")
    if not (first and dots):
        raise SettingError(
            f"The commits are {commits!r}. Give a good and a bad one, GOOD..BAD, such as "
            "v1.0..HEAD."
        )
    good, bad = repository.find_commit(first), repository.find_commit(last or "HEAD")
    if good.sha not in repository.list_commits(bad)[1:]:
        raise SettingError(
            f"The good commit {good.short} is not an earlier ancestor of the bad commit "
            f"{bad.short}. Give a commit that comes before it: GOOD..BAD."
        )
    return good, bad


def format_bisection(found: Bisection, *, verbose: bool = False) -> list[str]:
    """Return the lines of the result: the commit, and what differs first."""
    candidates = [f"{own.short} {escape(own.title, 200)}" for own in found.candidates]
    if not candidates:
        lines = ["incomplete: the search was ended before it found the commit."]
        lines += [f"  {own.commit.short} {own.verdict}" for own in found.trials]
    elif not candidates[1:]:
        lines = wrap(f"first commit that differs: {candidates[0]}")
    else:
        lines = wrap(
            f"The first commit that differs is one of these {len(candidates)}; the others in "
            "between did not train:"
        )
        lines += [f"  {commit}" for commit in candidates]
    lines.append("")
    steps = []
    if (guilty := found.guilty) is not None:
        steps.append((f"git show {guilty.commit.short}", "shows what it changes"))
        if (compared := guilty.comparison) is None:
            lines += [*wrap("It trains another number of fits than the good one."), ""]
        else:
            lines += [*format_evidence(compared, verbose=verbose), ""]
            paths = printable(shlex.join([str(compared.expected), str(compared.actual)]))
            steps.append((f"d9m report {paths}", "shows the difference as a page"))
    skipped = sum(trial.verdict == "skipped" for trial in found.trials)
    trained = pluralize(len(found.trials) - skipped, "time")
    said = f"trained: {trained} for {pluralize(found.commits, 'commit')}"
    if skipped:
        said += f", {skipped} skipped because {'it' if skipped == 1 else 'they'} did not train"
    return [*lines, said, *format_next_steps(steps)]
