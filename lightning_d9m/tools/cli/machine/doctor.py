"""``d9m doctor``: settings of this machine that make runs nondeterministic, and their fixes."""

import argparse
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING

from lightning_d9m.text import pluralize, printable
from lightning_d9m.tools.output.columns import Column, format_table, print_result
from lightning_d9m.tools.output.terminal import terminal_width

if TYPE_CHECKING:
    from lightning_d9m.engine.control.doctor import CheckResult

ARGUMENTS = """
--json  print findings and the whole stack as one JSON object
"""
EXAMPLE = "d9m doctor"
_STATUSES = ("problem", "note", "ok")  # in the order of findings


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 0 if there is no problem, else 1."""
    # These load torch, which `d9m --help` must not.
    import torch

    from lightning_d9m.engine.control.doctor import check_settings, find_problems
    from lightning_d9m.engine.control.settings import Settings
    from lightning_d9m.engine.ledger.stack import capture_stack
    from lightning_d9m.engine.recording.run import RunOptions
    from lightning_d9m.integrations.strategies.horovod.environment import check_installation
    from lightning_d9m.tools.audit.device import try_device

    findings = [*find_problems(), check_settings(Settings, RunOptions), *check_installation()]
    findings += [try_device(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]
    findings.sort(key=lambda finding: _STATUSES.index(finding.status))
    facts = {"findings": list(map(asdict, findings)), "stack": capture_stack()}
    statuses = [finding.status for finding in findings]
    found = "No problems found"
    if problems := statuses.count("problem"):
        found = f"{pluralize(problems, 'problem')} found"
    elif notes := statuses.count("note"):
        found += f", but {pluralize(notes, 'note')}"
    status = attrgetter("status")
    columns = (
        Column["CheckResult"]("", status, meaning=status),
        Column["CheckResult"]("", _describe),
    )
    table = format_table(columns, findings, plain=False, width=terminal_width())
    print_result(arguments.format, facts, [f"{found}.", "", *table.splitlines()])
    return int("problem" in statuses)


def _describe(finding: "CheckResult") -> str:
    """Return what was found, why it matters and the fix, a line each."""
    found = printable(f"{finding.name}: {finding.found}")
    fix = finding.fix and f"Fix: {finding.fix}"
    return "\n".join(filter(None, [found, finding.reason, fix]))
