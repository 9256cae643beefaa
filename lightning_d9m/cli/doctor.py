"""``d9m doctor``: settings of this machine that make runs nondeterministic, and their fixes."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_d9m.text import pluralize

if TYPE_CHECKING:
    from lightning_d9m.control.doctor import CheckResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m doctor``."""
    parser.add_argument(
        "--json", action="store_true", help="print findings and the whole stack as one JSON object"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 0 if there is no problem, else 1."""
    # These load torch, which `d9m --help` must not.
    from lightning_d9m.control.doctor import find_problems, sort_results
    from lightning_d9m.horovod.doctor import check_installation
    from lightning_d9m.ledger.stack import capture_stack

    findings = sort_results([*find_problems(), *check_installation()])
    problems = sum(finding.status == "problem" for finding in findings)
    if arguments.json:
        report = {"findings": [asdict(f) for f in findings], "stack": capture_stack()}
        print(json.dumps(report, indent=2))
    else:
        print(format_findings(findings))
        print(f"\n{pluralize(problems, 'problem') if problems else 'No problems'} found.")
    return 1 if problems else 0


def format_findings(findings: Sequence["CheckResult"]) -> str:
    """Return a table of findings: the status, then what was found, why it matters and the fix."""
    from rich.text import Text

    from lightning_d9m.output.terminal import make_table, render, style, terminal_width

    rows = [
        (
            style(finding.status),
            Text("\n".join(filter(None, [
                f"{finding.name}: {finding.found}",
                finding.reason,
                finding.fix and f"Fix: {finding.fix}",
            ]))),
        )
        for finding in findings
    ]  # fmt: skip
    return render(make_table(["", ""], rows), terminal_width())
