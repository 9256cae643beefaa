"""Findings as text, JSON and SARIF."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from linecache import checkcache, getline
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from rich.cells import cell_len

from lightning_d9m.lint.rules import RULES, Finding, Severity
from lightning_d9m.output.terminal import WIDTH, format_next_steps, paint, wrap
from lightning_d9m.text import pluralize, printable
from lightning_d9m.version import __version__

_INDENT = "  "
# One setting mends all of them, and a library may have hundreds: they must not hide the rest.
_FLAGGED, _MOST_FLAGGED = "D9M103", 2
_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
# SARIF's three levels have the names of our severities.
_LEVELS: tuple[Severity, ...] = ("error", "warning", "note")


def render_text(
    findings: Sequence[Finding],
    summary: Mapping[str, Any],
    width: int = WIDTH,
) -> str:
    """Return the findings for a terminal: by rule, each place with its line of source."""
    checkcache()  # a file may have changed since an earlier scan of this process
    counts = Counter(finding.severity for finding in findings)
    counted = ", ".join(pluralize(counts[level], level) for level in _LEVELS if counts[level])
    lines = wrap(
        f"{len(findings)} found in {pluralize(summary['files'], 'file')}, "
        f"{pluralize(summary['lines'], 'line')}"
        f"{f' ({counted})' if counted else ''}; ops as of torch {summary['torch']}, deterministic "
        f"algorithms {'on' if summary['deterministic'] else 'assumed to be off'}."
    )
    alone = {finding.rule for finding in findings} == {_FLAGGED}
    for rule, title in sorted(RULES.items(), key=lambda entry: entry[0] == _FLAGGED):
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in findings:
            if finding.rule == rule:
                groups.setdefault((finding.reason, finding.fix), []).append(finding)
        if groups:
            lines += ["", paint("heading", f"{rule} {title.name}")]
        for (reason, fix), group in groups.items():
            lines.append("")
            shown = group if rule != _FLAGGED or alone else group[:_MOST_FLAGGED]
            for finding in shown:
                lines += _show_place(finding, width)
            if more := len(group) - len(shown):
                lines += wrap(f"and {more} more: `d9m scan --select {rule}` lists them", _INDENT)
            lines += [*wrap(reason, _INDENT), *wrap(f"Fix: {fix}", _INDENT)]
    if findings:
        step = ("d9m repeat -- python PROGRAM", "shows whether its runs really differ")
        lines += format_next_steps([step])
    return "\n".join(lines)


def _show_place(finding: Finding, width: int) -> list[str]:
    """Return the place of a finding, and its line with carets below the code."""
    place = f"{_INDENT}{printable(finding.location)}: "
    place += f"{paint(finding.severity, finding.severity)}, {finding.certainty}"
    source = "" if finding.cell else printable(getline(finding.file, finding.line).rstrip())
    margin = f"{_INDENT}{finding.line:>5} | "
    if not source:  # a notebook's cell, or the program's standard input
        code = f"{_INDENT}| {finding.code}"
        cut = code if len(code) <= WIDTH else f"{code[: WIDTH - 3]}..."
        return [place, *([cut] if finding.code else [])]
    before = source[: finding.column - 1]
    end = finding.end_column - 1 if finding.end_line == finding.line else len(source)
    # A long line is cut on the left so that the code starts within the first third.
    room = width - len(margin)
    indent = len(source) - len(source.lstrip())
    start = min(indent, len(before))
    if cell_len(source[start:end]) > room:
        start = max(start, len(before) - room // 3)
    shown = source[start:].replace("\t", " ")
    while cell_len(shown) > room:
        shown = shown[:-1]
    marked = source[len(before) : max(end, len(before) + 1)]
    offset = cell_len(source[start : len(before)])
    carets = paint(finding.severity, "^" * max(1, min(cell_len(marked), room - offset)))
    return [place, f"{margin}{shown}", f"{' ' * (len(margin) - 2)}| {' ' * offset}{carets}"]


def render_json(findings: Sequence[Finding], summary: Mapping[str, object]) -> str:
    """Return one JSON object: a summary and findings."""
    records = [finding.as_record() for finding in findings]
    return json.dumps({"schema": 1, **summary, "findings": records}, indent=1)


def render_sarif(findings: Sequence[Finding]) -> str:
    """Return a log in SARIF 2.1.0 (OASIS): one run, all rules, one result per finding."""
    indices = {rule: index for index, rule in enumerate(RULES)}
    driver = {
        "name": "d9m scan",
        "version": __version__,
        "semanticVersion": __version__,
        "rules": [
            {
                "id": rule.id,
                "name": rule.name,
                "shortDescription": {"text": rule.name.replace("-", " ").capitalize() + "."},
                "fullDescription": {"text": rule.reason},
                "help": {"text": rule.fix},
                "defaultConfiguration": {"level": rule.severity},
            }
            for rule in RULES.values()
        ],
    }
    log = {
        "$schema": _SARIF,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "results": [_as_result(finding, indices[finding.rule]) for finding in findings],
            }
        ],
    }
    return json.dumps(log, indent=1)


def _as_result(finding: Finding, index: int) -> dict[str, object]:
    path = PurePath(finding.file)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    place: dict[str, object] = {"artifactLocation": {"uri": uri}}
    if not finding.cell:
        # A line of a cell is not a line of the notebook's JSON.
        place["region"] = {
            "startLine": finding.line,
            "startColumn": finding.column,
            "endLine": finding.end_line,
            "endColumn": max(finding.end_column, finding.column),
        }
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": f"{finding.reason} {finding.fix}"},
        "locations": [{"physicalLocation": place}],
        "properties": {
            "certainty": finding.certainty,
            **({"op": finding.op} if finding.op else {}),
            **({"cell": finding.cell, "cellLine": finding.line} if finding.cell else {}),
        },
    }
