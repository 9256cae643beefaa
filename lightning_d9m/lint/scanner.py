"""The scan of files: read, parse, check; and comments that suppress findings.

Such a comment is ``# d9m: ignore[RULE] reason``.
"""

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_d9m.lint.checks import ops, order, seeds, settings
from lightning_d9m.lint.rules import CODE, RULES, Finding
from lightning_d9m.lint.source import Source, SourceError, parse, read_source
from lightning_d9m.lint.tree import Call, Report, Tree
from lightning_d9m.patches.catalog.catalog import find_op

LARGEST = 5_000_000
"""Largest size of a source file, in bytes; larger files hold data."""

_MARK = re.compile(r"#\s*d9m:")
_COMMENT = re.compile(r"#\s*d9m:\s*(?P<verb>[\w-]*)\s*(?:\[(?P<rules>[^\]]*)\])?\s*(?P<reason>.*)")
_NOT_SCANNED = "D9M001"
_CALLS: tuple[Callable[[Call], Iterator[Report]], ...] = (
    ops.check_op,
    settings.check_choice_by_time,
    seeds.check_seed,
    seeds.check_system_draw,
    seeds.check_worker_seed,
    order.check_listing,
    order.check_completion,
    order.check_hash,
    lambda call: order.check_set(call.node, call.tree),
    settings.check_setting_call,
)
_NODES: Mapping[type[ast.AST], Sequence[Callable[[Any, Tree], Iterator[Report]]]] = {
    ast.Assign: (settings.check_setting,),
    **dict.fromkeys((ast.Set, ast.SetComp, ast.Name, ast.Attribute, ast.BinOp), (order.check_set,)),
}


@dataclass
class FileScan:
    """The result of the scan of one file.

    Attributes:
        findings: Sorted by place.
        lines: Number of lines.
        turns_on: True if it turns deterministic algorithms on.
        edits: For findings with one right answer: what to write there, with ``{}`` for the code.
    """

    findings: list[Finding] = field(default_factory=list)
    lines: int = 0
    turns_on: bool = False
    edits: dict[Finding, str] = field(default_factory=dict)


@cache
def read_torch_version() -> str:
    """Return the release of torch that is installed, which decides about ops."""
    return version("torch")


def scan_file(path: str, rules: frozenset[str], problem: str = "") -> FileScan:
    """Scan one file. A file that cannot be scanned, for the given reason too, gives a finding."""
    try:
        if not problem and (size := Path(path).stat().st_size) > LARGEST:
            problem = f"It has {size:,} bytes, more than {LARGEST:,}."
        source = Source("") if problem else read_source(Path(path))
    except OSError as error:
        problem = f"It cannot be read: {error.strerror or error}."
    except SourceError as error:
        problem = str(error)
    if problem:
        found = [Finding.at(path, _NOT_SCANNED, (1, 1), reason=problem)]
        return FileScan(found if _NOT_SCANNED in rules else [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parser's, about the scanned code
        return scan_source(source, path, rules)


def scan_source(source: Source, path: str, rules: frozenset[str]) -> FileScan:
    """Scan one module; see :func:`scan_file`."""
    problems = list(source.problems)
    reports: dict[Report, None] = {}
    try:
        module = parse(source.text)
        if isinstance(module, tuple):
            problems.append((module[0], 0, module[1]))
        else:
            reports = dict.fromkeys(_check(Tree(module)))
    except RecursionError:
        problems.append((1, 0, "It is nested too deeply to be scanned."))
    lines = source.text.split("\n")
    kept: dict[tuple[object, ...], Finding] = {}
    edits: dict[Finding, str] = {}
    for report in reports:
        if report.rule in rules and (
            not report.op or find_op(report.op).is_needed(read_torch_version())
        ):
            f = _describe(report, path, lines)
            kept.setdefault((f.line, f.column, f.rule, f.op), f)
            edits |= {f: report.edit} if report.edit and not source.cells else {}
    found = [
        Finding.at(path, _NOT_SCANNED, (line, 1), reason=reason, cell=cell)
        for line, cell, reason in problems
    ]
    for finding in _suppress(kept.values(), source.text, path, rules):
        cell, line = source.cells[finding.line - 1] if source.cells else (0, finding.line)
        end = finding.end_line - finding.line + line
        found.append(replace(finding, cell=cell, line=line, end_line=end))
    return FileScan(
        findings=sorted(finding for finding in found if finding.rule in rules),
        lines=len(lines),
        turns_on=any(report.rule == settings.TURNED_ON for report in reports),
        edits={finding: edits[finding] for finding in found if finding in edits},
    )


def _check(tree: Tree) -> Iterator[Report]:
    for node in tree.nodes:
        for check in _NODES.get(type(node), ()):
            yield from check(node, tree)
        if isinstance(node, ast.Call):
            call = Call(node, tree)
            for check_call in _CALLS:
                yield from check_call(call)


def _describe(report: Report, path: str, lines: Sequence[str]) -> Finding:
    node: Any = report.node
    line, end_line = node.lineno, node.end_lineno or node.lineno
    start = _find_column(lines[line - 1], node.col_offset)
    end = _find_column(lines[end_line - 1], node.end_col_offset or 0)
    return Finding.at(
        path,
        report.rule,
        (line, start),
        (end_line, end),
        certainty=report.certainty,
        reason=report.reason,
        fix=report.fix,
        code=lines[line - 1][start - 1 : end - 1 if line == end_line else None][:CODE],
        op=report.op,
    )


def _find_column(line: str, offset: int) -> int:
    """Return the column in characters of an offset in bytes."""
    if not line.isascii():
        offset = len(line.encode()[:offset].decode("utf-8", "replace"))
    return offset + 1


def _suppress(
    found: Iterable[Finding], text: str, path: str, rules: frozenset[str]
) -> Iterator[Finding]:
    """Yield the findings that no comment suppresses, and findings about the comments.

    A comment alone on its line applies to the next code.
    """
    findings, suppressed, lines = list(found), set[Finding](), text.split("\n")
    for token in _list_comments(text):
        row, column = token.start
        target = row
        if not lines[row - 1][:column].strip():
            following = (n for n in range(row, len(lines)) if lines[n].strip()[:1] not in {"", "#"})
            target = next(following, len(lines)) + 1
        verb, listed, reason = _COMMENT.match(token.string).groups()  # type: ignore[union-attr] # it was listed
        named = [word.strip() for word in (listed or "").split(",") if word.strip()]
        code = lines[row - 1][column:][:CODE]
        end = (row, token.end[1] + 1)
        unknown = [rule for rule in named if rule not in RULES]
        problem = ""
        if verb != "ignore":
            problem = f"{verb!r} is not a verb of d9m; allowed: ignore."
        elif not named:
            problem = "It does not name a rule."
        elif unknown:
            problem = f"The rule {unknown[0]!r} does not exist."
        elif not reason.strip():
            problem = "It does not give a reason."
        if problem:
            yield Finding.at(path, "D9M002", (row, column + 1), end, reason=problem, code=code)
            continue
        covered = {f for f in findings if f.rule in named and f.line <= target <= f.end_line}
        suppressed |= covered
        unused = (set(named) & rules).difference(finding.rule for finding in covered)
        if unused:
            reason = f"It suppresses {', '.join(sorted(unused))}, which is not found here."
            yield Finding.at(path, "D9M003", (row, column + 1), end, reason=reason, code=code)
    yield from (finding for finding in findings if finding not in suppressed)


def _list_comments(text: str) -> list[tokenize.TokenInfo]:
    """Return the comments of a valid text that are about our findings."""
    if not _MARK.search(text):
        return []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    comments = (token for token in tokens if token.type == tokenize.COMMENT)
    return [token for token in comments if _COMMENT.match(token.string)]
