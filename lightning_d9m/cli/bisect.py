"""``d9m bisect``: find the commit that changed the bits of a training."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_d9m.cli.arguments import COMMAND, get_command
from lightning_d9m.errors import SettingError
from lightning_d9m.history.bisection import Bisection
from lightning_d9m.history.packages import open_package_history
from lightning_d9m.history.repository import Commit, Repository
from lightning_d9m.launch.run import Runs, make_output
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.output.bisection_text import format_bisection, list_facts
from lightning_d9m.output.columns import print_result

ARGUMENTS = f"""
commits:GOOD..BAD?  a commit with the right bits and a later one with others; without BAD it is HEAD
--golden LEDGER  compare with this ledger in place of that of a good commit; only BAD is given
--packages OLD NEW  search for a package in place of a commit: two lists as pip freeze prints them,
    with which the training has the right bits and others
--until EPOCH  end each training after this epoch, counted from 0 (default: train to the end)
--link PATH ...  a path below the repository's top that git does not track and the training needs,
    such as a folder of data; may be given several times
-o, --output DIR  new folder for ledgers and logs
-v, --verbose  show the whole patch, and bits of numbers
{COMMAND}"""
SETTINGS: dict[str, dict[str, object]] = {"link": {"default": [], "type": str}}
PARSER = {
    "usage": "d9m bisect [--until EPOCH] [--link PATH] [-o DIR] [--timeout SECONDS]\n"
    "                  [--json] [-v] GOOD..BAD -- COMMAND ...\n"
    "       d9m bisect --golden LEDGER [...] BAD -- COMMAND ...\n"
    "       d9m bisect --packages OLD NEW [...] -- COMMAND ..."
}


def run(arguments: argparse.Namespace) -> int:
    """Bisect and print the commit; return 1, because there is a difference."""
    if arguments.packages is not None and arguments.commits is not None:
        # argparse takes the first word of the command for it
        arguments.argv.insert(0, arguments.commits)
    command = get_command(arguments, "bisect")
    with _open_history(arguments) as (repository, good, bad):
        runs = Runs(command, make_output(arguments.output), arguments.timeout)
        if arguments.golden is not None:
            golden = read_ledger(arguments.golden)
            runs.fits = {golden.path.name: golden}
        search = Bisection(repository, runs, arguments.until, arguments.link)
        search.search(good, bad)
        facts = list_facts(search) | {"output": str(runs.output)}
        lines = format_bisection(search, verbose=arguments.verbose)
        print_result(arguments.format, facts, [*lines, "", f"ledgers: {runs.output}"])
    return 1


@contextmanager
def _open_history(
    arguments: argparse.Namespace,
) -> Iterator[tuple[Repository, Commit | None, Commit]]:
    """Yield a repository, its good commit (None with a golden ledger), and its bad one."""
    if arguments.packages is not None:
        if arguments.link or arguments.golden is not None:
            raise SettingError(
                "--link and --golden are for commits, and --packages is given. The trainings run "
                "in the working folder, and the old list is the reference. Leave them out."
            )
        with open_package_history(*arguments.packages) as found:
            yield found
        return
    repository = Repository(Path.cwd())
    first, _, last = (arguments.commits or "").rpartition("..")
    if bool(first) == (arguments.golden is not None):
        raise SettingError(
            f"The commits are {arguments.commits!r}. Give a good and a bad one, GOOD..BAD, such as "
            "v1.0..HEAD; or, with --golden LEDGER in place of the good one, the bad one alone."
        )
    bad = repository.find_commit(last or "HEAD")
    good = repository.find_commit(first) if first else None
    if good is not None and good.sha not in repository.list_commits(bad)[1:]:
        raise SettingError(
            f"The good commit {good.short} is not an earlier ancestor of the bad commit "
            f"{bad.short}. Give a commit that comes before it: GOOD..BAD."
        )
    yield repository, good, bad
