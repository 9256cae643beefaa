"""``d9m compare``: compare two ledgers and name the first divergence."""

import argparse
import shlex

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.text import printable
from lightning_d9m.tools.cli.arguments import FORMAT, LEDGERS, STATUS, choose_ledgers
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.history.bundle import list_located
from lightning_d9m.tools.launch.progress import show_progress
from lightning_d9m.tools.output.columns import print_result
from lightning_d9m.tools.output.comparison_text import format_evidence, state_verdict
from lightning_d9m.tools.output.terminal import find_command, list_next_steps

ARGUMENTS = f"""{LEDGERS}{FORMAT}
-v, --verbose  show whole digests and the bits of numbers
"""
EXAMPLE = "d9m compare d9m-runs/000/run-001 d9m-runs/000/run-002"


def run(arguments: argparse.Namespace) -> int:
    """Compare two ledgers, print the result, and return the status of the verdict."""
    paths = choose_ledgers(arguments)
    expected, actual = map(read_ledger, paths)
    with show_progress("records compared") as progress:
        comparison = compare_ledgers(expected, actual, progress=progress)
    located, steps = list_located((expected, actual)), []
    if comparison.verdict == "different" and not located:
        command = f"-- {printable(find_command((expected, actual)) or 'COMMAND')}"
        steps = list_next_steps(command, printable(shlex.join(map(str, paths))))
    lines = [*format_evidence(comparison, verbose=arguments.verbose), *located]
    verdict = state_verdict(comparison)
    print_result(arguments.format, comparison.as_json(), lines, verdict, steps=steps)
    return STATUS[comparison.verdict]
