"""``d9m scan``: find causes of nondeterminism in source."""

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from linecache import checkcache, getline
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from rich.cells import cell_len, set_cell_size

from lightning_d9m.errors import SettingError
from lightning_d9m.text import pluralize, printable
from lightning_d9m.tools.lint.rules import RULES, Finding, Severity
from lightning_d9m.tools.lint.scanner import fix_text, read_torch_version, scan_file
from lightning_d9m.tools.lint.source import list_files, read_source
from lightning_d9m.tools.output.terminal import (
    WIDTH,
    format_next_steps,
    paint,
    terminal_width,
    wrap,
)
from lightning_d9m.version import __version__

# Depends on all files. One setting mends all of them, and a library may have hundreds: they must
# not hide the rest.
_FLAGGED, _MOST_FLAGGED = "D9M103", 2
_TEST = re.compile(r"test_.*|.*_test\.py|conftest\.py")  # as pytest names them
_INDENT = "  "
_PROJECT, _TABLE = "pyproject.toml", "tool.d9m.scan"
_PROJECT_SETTINGS = {"select": list, "ignore": list, "exclude": list, "deterministic": bool}
# SARIF's three levels have the names of our severities.
_LEVELS: tuple[Severity, ...] = ("error", "warning", "note")

ARGUMENTS = """
paths:PATH*  files and folders (default: the current folder)
--format {text,json,sarif}  text for a terminal (80 columns), JSON or SARIF 2.1.0 (default: text)
| --json  short for --format json
--select RULES ...  only these rules, by ids or prefixes of ids, separated by commas: D9M2,D9M301
--ignore RULES ...  not these rules, by ids or prefixes of ids, separated by commas: D9M2,D9M301
--exclude GLOB ...  leave out paths or names that match
--deterministic  assume deterministic algorithms: leave out ops that vary only without them
    (D9M103). The default if a scanned file, but a test, turns them on
--fix  edit the files where there is one right answer (a missing seed becomes 0, a listing or a set
    of strings is sorted), then report what is left
| --diff  print what --fix would edit
--rules  list the rules and exit
"""
EXAMPLE = "d9m scan src --fix"
SETTINGS: dict[str, dict[str, object]] = {"exclude": {"default": []}}


def run(arguments: argparse.Namespace) -> int:
    """Scan, print, and return 1 if there are findings, else 0."""
    if arguments.rules:
        for rule in RULES.values():
            print(f"{rule.id}  {rule.severity:8}{rule.name}")
        return 0
    _read_project(arguments)
    chosen = _expand(arguments.select) if arguments.select else set(RULES)
    rules = frozenset(chosen - _expand(arguments.ignore or ()))
    paths = arguments.paths or [Path()]
    # Relative to the current folder if they are inside.
    here = f"{Path.cwd()}{os.sep}"
    files = {
        path.removeprefix(here).removeprefix(f".{os.sep}") or path: problem
        for path, problem in list_files(paths, arguments.exclude).items()
    }
    scans = {path: scan_file(path, rules, problem) for path, problem in files.items()}
    if arguments.fix or arguments.diff:
        edited = [path for path, scan in scans.items() if any(f.edit for f in scan.findings)]
        fixes = [fix_text(read_source(Path(path)).text, path, rules) for path in edited]
        if arguments.diff:
            print("".join(fix.as_diff() for fix in fixes), end="")
            return 1 if fixes else 0
        for fix in fixes:
            fix.write()
        counted = pluralize(sum(fix.count for fix in fixes), "finding")
        print(f"fixed: {counted} in {pluralize(len(fixes), 'file')}", file=sys.stderr)
        # Again, because an edit moves the lines of all findings below it.
        scans |= {path: scan_file(path, rules) for path in edited}
    # A test may train with the flag where the program does not.
    turning = (path for path, scan in scans.items() if scan.turns_on)
    turned_on = arguments.deterministic or any(not _TEST.match(Path(path).name) for path in turning)
    found = [finding for scan in scans.values() for finding in scan.findings]
    findings = sorted(f for f in found if not (turned_on and f.rule == _FLAGGED))
    summary = {
        "torch": read_torch_version(),
        "files": len(files),
        "lines": sum(scan.lines for scan in scans.values()),
        "deterministic": turned_on,
    }
    if arguments.format == "json":
        records = [finding.as_record() for finding in findings]
        print(json.dumps({"schema": 1, **summary, "findings": records}, indent=1))
    elif arguments.format == "sarif":
        print(json.dumps(_make_sarif(findings), indent=1))
    else:
        print("\n".join(_list_lines(findings, summary, max(WIDTH, terminal_width(160)))))
    return 1 if findings else 0


def _read_project(arguments: argparse.Namespace) -> None:
    """Take from the nearest pyproject.toml what the command line does not say."""
    folders = [Path.cwd(), *Path.cwd().parents]
    path = next((f / _PROJECT for f in folders if (f / _PROJECT).is_file()), None)
    text = "" if path is None else path.read_text("utf-8")
    # A file that never names d9m has no settings for this command, which then reports no mistake in
    # the settings of other tools.
    if "d9m" not in text:
        return
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]  # Python 3.11
    except ImportError as error:
        if re.search(r"\btool\W{1,4}d9m\b", text) is None:  # such as a requirement
            return
        raise SettingError(f"[{_TABLE}] in {path} needs Python 3.11 or later.") from error
    try:
        tools = tomllib.loads(text).get("tool", {})
        table = dict(tools.get("d9m", {}).get("scan", {}))
    except (ValueError, TypeError, AttributeError) as error:  # no TOML, or no table
        raise SettingError(f"{path} cannot be read: {error}.") from error
    for name, value in table.items():
        right = isinstance(value, _PROJECT_SETTINGS.get(name, ()))
        if not right or (isinstance(value, list) and not all(isinstance(v, str) for v in value)):
            raise SettingError(
                f"{name} = {value!r} in [{_TABLE}] of {path} is not valid. Allowed: select, ignore "
                "and exclude, lists of texts, and deterministic, true or false."
            )
        setattr(arguments, name, getattr(arguments, name) or value)


def _expand(words: Iterable[str]) -> set[str]:
    """Return the ids of the rules that words name: ids or prefixes of ids."""
    ids: set[str] = set()
    for word in ",".join(words).split(","):
        if not (prefix := word.strip().upper()):
            continue
        found = {rule for rule in RULES if rule.startswith(prefix)}
        if not found:
            raise SettingError(
                f"{word.strip()!r} does not match a rule. `d9m scan --rules` lists them."
            )
        ids |= found
    return ids


def _list_lines(
    findings: Sequence[Finding], summary: Mapping[str, Any], width: int
) -> Iterator[str]:
    """Yield the findings for a terminal: by rule, each place with its line of source."""
    checkcache()  # a file may have changed since an earlier scan of this process
    counts = Counter(finding.severity for finding in findings)
    counted = ", ".join(pluralize(counts[level], level) for level in _LEVELS if counts[level])
    yield from wrap(
        f"{len(findings)} found in {pluralize(summary['files'], 'file')}, "
        f"{pluralize(summary['lines'], 'line')}"
        f"{f' ({counted})' if counted else ''}; ops as of torch {summary['torch']}, deterministic "
        f"algorithms {'on' if summary['deterministic'] else 'assumed to be off'}."
    )
    if edits := sum(bool(finding.edit) for finding in findings):
        verb = "has" if edits == 1 else "have"
        yield f"{edits} of them {verb} one right answer: --fix writes it, --diff shows it."
    alone = {finding.rule for finding in findings} == {_FLAGGED}
    for rule, title in sorted(RULES.items(), key=lambda entry: entry[0] == _FLAGGED):
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in findings:
            if finding.rule == rule:
                groups.setdefault((finding.reason, finding.fix), []).append(finding)
        if groups:
            yield from ("", paint("heading", f"{rule} {title.name}"))
        for (reason, fix), group in groups.items():
            yield ""
            shown = group if rule != _FLAGGED or alone else group[:_MOST_FLAGGED]
            for finding in shown:
                yield from _show_place(finding, width)
            if more := len(group) - len(shown):
                said = f"and {more} more: `d9m scan --select {rule}` lists them"
                yield from wrap(said, _INDENT)
            yield from (*wrap(reason, _INDENT), *wrap(f"Fix: {fix}", _INDENT))
    if findings:
        step = ("d9m repeat -- python PROGRAM", "shows whether its runs really differ")
        yield from format_next_steps([step])


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
    end = finding.end_column - 1 if finding.end_line == finding.line else len(source)
    before, rest = source[: finding.column - 1].lstrip(), source[finding.column - 1 :]
    code, room = source[finding.column - 1 : end], width - len(margin)
    # In columns and not characters, of which some take two: carets must stand below the code.
    if cell_len(before + code) > room:  # a long line begins with the code
        before = ""
    shown = set_cell_size((before + rest).replace("\t", " "), room).rstrip()
    carets = "^" * max(1, min(cell_len(code), room - cell_len(before)))
    below = f"{' ' * (len(margin) - 2)}| {' ' * cell_len(before)}"
    return [place, f"{margin}{shown}", f"{below}{paint(finding.severity, carets)}"]


def _make_sarif(findings: Sequence[Finding]) -> dict[str, object]:
    """Return a log in SARIF 2.1.0 (OASIS): one run, all rules, one result per finding."""
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
    run = {
        "tool": {"driver": driver},
        # Columns are counted in characters of Python's `str`; the other kind of SARIF counts a
        # character beyond 16 bits twice.
        "columnKind": "unicodeCodePoints",
        "results": list(map(_make_result, findings)),
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return {"$schema": schema, "version": "2.1.0", "runs": [run]}


def _make_result(finding: Finding) -> dict[str, object]:
    path = PurePath(finding.file)
    # SARIF wants a URI: a space or a `#` in the name of a file must be encoded.
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
        "ruleIndex": list(RULES).index(finding.rule),
        "level": finding.severity,
        "message": {"text": f"{finding.reason} {finding.fix}"},
        "locations": [{"physicalLocation": place}],
        "properties": {
            "certainty": finding.certainty,
            **({"op": finding.op} if finding.op else {}),
            **({"cell": finding.cell, "cellLine": finding.line} if finding.cell else {}),
        },
    }
