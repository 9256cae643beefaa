"""``d9m scan``: find causes of nondeterminism in source."""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from lightning_d9m.errors import SettingError
from lightning_d9m.lint.rules import RULES
from lightning_d9m.lint.scanner import fix_text, read_torch_version, scan_file
from lightning_d9m.lint.source import list_files, read_source
from lightning_d9m.output.lint_text import render_json, render_sarif, render_text
from lightning_d9m.output.terminal import terminal_width
from lightning_d9m.text import pluralize

_FLAGGED = "D9M103"  # depends on all files

ARGUMENTS = """
paths:PATH*  files and folders (default: the current folder)
--format {text,json,sarif}  text for a terminal (80 columns), JSON or SARIF 2.1.0 (default: text)
| --json  short for --format json
--select RULES ...  only these rules, by ids or prefixes of ids, separated by commas: D9M2,D9M301
--ignore RULES ...  not these rules, by ids or prefixes of ids, separated by commas: D9M2,D9M301
--exclude GLOB ...  leave out paths or names that match
--deterministic  assume deterministic algorithms: leave out ops that vary only without them
    (D9M103). The default if a scanned file turns them on
--fix  edit the files where there is one right answer (a missing seed becomes 0, a listing or a set
    of strings is sorted), then report what is left
| --diff  print what --fix would edit
--rules  list the rules and exit
"""
SETTINGS: dict[str, dict[str, object]] = {"exclude": {"default": []}}


def run(arguments: argparse.Namespace) -> int:
    """Scan, print, and return 1 if there are findings, else 0."""
    if arguments.rules:
        for rule in RULES.values():
            print(f"{rule.id}  {rule.severity:8}{rule.name}")
        return 0
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
        scans |= {path: scan_file(path, rules) for path in edited}
    turned_on = arguments.deterministic or any(scan.turns_on for scan in scans.values())
    found = [finding for scan in scans.values() for finding in scan.findings]
    findings = sorted(f for f in found if not (turned_on and f.rule == _FLAGGED))
    summary = {
        "torch": read_torch_version(),
        "files": len(files),
        "lines": sum(scan.lines for scan in scans.values()),
        "deterministic": turned_on,
    }
    if arguments.format == "json":
        text = render_json(findings, summary)
    elif arguments.format == "sarif":
        text = render_sarif(findings)
    else:
        text = render_text(findings, summary, max(80, terminal_width(160)))
    print(text)
    return 1 if findings else 0


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
