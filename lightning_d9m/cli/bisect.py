"""``d9m bisect``: find the commit that changed the bits of a training."""

import argparse
import json
from pathlib import Path

from lightning_d9m.cli.arguments import add_command_arguments, declare, get_command
from lightning_d9m.errors import SettingError
from lightning_d9m.history.bisection import Bisection
from lightning_d9m.history.packages import PackageBisection, open_package_history
from lightning_d9m.history.repository import Commit, Repository
from lightning_d9m.launch.run import make_output
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.output.bisection_text import format_bisection, list_facts
from lightning_d9m.output.terminal import print_lines

_ARGUMENTS = """
commits:GOOD..BAD?  a commit with the right bits and a later one with others; without BAD it is
    HEAD. With --golden, BAD is enough
--golden LEDGER  compare with this ledger in place of that of the good commit
--packages OLD NEW  search for a package in place of a commit: two lists as pip freeze prints them,
    with which the training has the right bits and others
--until EPOCH  end each training after this epoch, counted from 0 (default: train to the end)
--link PATH ...  a path below the repository's top that git does not track and the training needs,
    such as a folder of data; may be given several times
-o, --output DIR  new folder for ledgers and logs
-v, --verbose  show the whole patch, and bits of numbers
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``d9m bisect``."""
    parser.usage = (
        "d9m bisect [--until EPOCH] [--link PATH] [-o DIR] [--timeout SECONDS]\n"
        "                  [--json] [-v] GOOD..BAD -- COMMAND ...\n"
        "       d9m bisect --golden LEDGER [...] [GOOD..]BAD -- COMMAND ...\n"
        "       d9m bisect --packages OLD NEW [...] -- COMMAND ..."
    )
    declare(parser, _ARGUMENTS, link={"default": [], "type": str})
    add_command_arguments(parser, "a training")


def run(arguments: argparse.Namespace) -> int:
    """Bisect and print the commit; return 1, because there is a difference."""
    if arguments.packages is not None:
        return _bisect_packages(arguments)
    command = get_command(arguments, "bisect")
    repository = Repository(Path.cwd())
    good, bad = _find_commits(repository, arguments)
    golden = None if arguments.golden is None else read_ledger(arguments.golden)
    bisection = Bisection(
        repository,
        command,
        make_output(arguments.output),
        until=arguments.until,
        timeout=arguments.timeout,
        links=arguments.link,
        golden=golden,
    )
    return _search(arguments, bisection, good, bad)


def _bisect_packages(arguments: argparse.Namespace) -> int:
    if arguments.commits is not None:  # argparse takes the first word of the command for it
        arguments.argv.insert(0, arguments.commits)
    command = get_command(arguments, "bisect --packages OLD NEW")
    if arguments.link or arguments.golden is not None:
        raise SettingError(
            "--link and --golden are for commits, and --packages is given. The trainings run in "
            "the working folder, and the old list is the reference. Leave them out."
        )
    with open_package_history(*arguments.packages) as (history, good, bad, environment):
        bisection = PackageBisection(
            history,
            command,
            make_output(arguments.output),
            until=arguments.until,
            timeout=arguments.timeout,
            environment=environment,
        )
        return _search(arguments, bisection, good, bad)


def _search(
    arguments: argparse.Namespace, bisection: Bisection, good: Commit | None, bad: Commit
) -> int:
    result = bisection.search(good, bad)
    if arguments.json:
        print(json.dumps(list_facts(result) | {"output": str(bisection.output)}, indent=2))
    else:
        lines = format_bisection(result, verbose=arguments.verbose)
        print_lines([*lines, "", f"ledgers: {bisection.output}"])
    return 1


def _find_commits(
    repository: Repository, arguments: argparse.Namespace
) -> tuple[Commit | None, Commit]:
    """Return the good commit, None if a golden ledger finds it, and the bad one."""
    first, dots, last = (arguments.commits or "").partition("..")
    if not dots:
        first, last = "", first
    if not first and arguments.golden is None:
        raise SettingError(
            f"The commits are {arguments.commits!r}, which names no good commit. Give GOOD..BAD, "
            "such as v1.0..HEAD, or a ledger with the right bits: --golden LEDGER."
        )
    bad = repository.find_commit(last or "HEAD")
    if not first:
        return None, bad
    good = repository.find_commit(first)
    if good == bad or not repository.is_ancestor(good, bad):
        raise SettingError(
            f"The good commit {good.short} is not an earlier ancestor of the bad commit "
            f"{bad.short}. Give a commit that comes before it: GOOD..BAD."
        )
    return good, bad
