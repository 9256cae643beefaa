"""``d9m doctor``: what on this machine would make a run nondeterministic, and the fix for each."""

import argparse
import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_d9m.control.doctor import CheckResult

_WIDTH = 80
_INDENT = " " * 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of ``d9m doctor``."""
    parser.add_argument(
        "--json", action="store_true", help="print findings and the whole stack as one JSON object"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; return 0 when there is nothing to mend, else 1."""
    # These load torch, which the command line's help must not.
    from lightning_d9m.control.doctor import find_problems, sort_findings
    from lightning_d9m.horovod.doctor import look_at_installation
    from lightning_d9m.ledger.stack import capture_stack

    findings = sort_findings([*find_problems(), *look_at_installation()])
    problems = sum(finding.status == "problem" for finding in findings)
    if arguments.json:
        report = {"findings": [asdict(f) for f in findings], "stack": capture_stack()}
        print(json.dumps(report, indent=2))
    else:
        for finding in findings:
            print("\n".join(format_finding(finding)))
        plural = "" if problems == 1 else "s"
        print(f"\n{problems} problem{plural} found." if problems else "\nNothing to mend.")
    return 1 if problems else 0


def format_finding(finding: "CheckResult") -> Iterator[str]:
    """Yield a finding's lines, at most 80 columns wide."""
    yield from _wrap(f"{finding.status:8} {finding.name}: {finding.found}", "")
    if finding.reason:
        yield from _wrap(finding.reason, _INDENT)
    if finding.fix:
        yield from _wrap(f"Fix: {finding.fix}", _INDENT)


def _wrap(text: str, first: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=_INDENT, break_on_hyphens=False
    )
