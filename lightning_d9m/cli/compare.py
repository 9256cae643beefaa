"""``d9m compare``: compare two ledgers and name the first divergence."""

import argparse
import json
import shlex

from lightning_d9m.cli.arguments import add_format_arguments, add_ledger_arguments, choose_ledgers
from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.comparison.timeline import Timeline
from lightning_d9m.launch.progress import show_progress
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.output.comparison_text import (
    format_comparison,
    format_evidence,
    state_verdict,
)
from lightning_d9m.output.distance_table import format_distances, list_distances
from lightning_d9m.output.markdown import format_markdown
from lightning_d9m.output.next_steps import find_command, format_next_steps, list_next_steps
from lightning_d9m.output.terminal import print_lines, terminal_width
from lightning_d9m.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m compare``."""
    add_ledger_arguments(parser)
    add_format_arguments(parser)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show whole digests, the bits of numbers, and how far the weights of each layer are "
        "apart",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare two ledgers, print the result, and return 0 if they are equal, else 1."""
    paths = choose_ledgers(arguments)
    expected, actual = map(read_ledger, paths)
    verbose = arguments.verbose
    timeline = Timeline()
    with show_progress("records compared") as progress:
        watch = timeline.watch if verbose else None
        comparison = compare_ledgers(expected, actual, progress=progress, watch=watch)
    if arguments.format == "json":
        facts = comparison.as_json()
        if verbose:
            facts["distances"] = list_distances(timeline.distances)
        print(json.dumps(facts, indent=2))
    elif arguments.format == "markdown":
        evidence = format_evidence(comparison, verbose=verbose)
        print(format_markdown(state_verdict(comparison), evidence))
    else:
        print_lines(format_comparison(comparison, verbose=verbose))
        if timeline.distances.moments and not comparison.equal:
            print("\n".join(format_distances(timeline.distances, terminal_width())))
        if comparison.verdict == "different":
            command = f"-- {printable(find_command((expected, actual)) or 'COMMAND')}"
            ledgers = printable(" ".join(shlex.quote(str(path)) for path in paths))
            print("\n".join(format_next_steps(list_next_steps(command, ledgers))))
    return 0 if comparison.equal else 1
