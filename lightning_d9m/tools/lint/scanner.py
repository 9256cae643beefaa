"""The scan of files: read, parse, check; comments that suppress findings; and edits of files.

Such a comment is ``# d9m: ignore[RULE] reason``. A finding with one right answer has an edit.
"""

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning_d9m.errors import SettingError, file_errors
from lightning_d9m.ops.patches.catalog.catalog import find_op
from lightning_d9m.tools.lint.checks import ops, order, settings
from lightning_d9m.tools.lint.rules import CODE, RULES, Finding
from lightning_d9m.tools.lint.source import Source, SourceError, parse, read_source
from lightning_d9m.tools.lint.tree import Call, Report, Tree

LARGEST = 5_000_000
"""Largest size of a source file, in bytes; larger files hold data."""

# An edit may lie within the code of another, which a later round makes.
_ROUNDS = 5
_MARK = re.compile(r"#\s*d9m:")
_COMMENT = re.compile(r"#\s*d9m:\s*ignore\s*\[(?P<rules>[^\]]*)\]\s*\S.*")
_NOT_SCANNED = "D9M001"
_CALLS: tuple[Callable[[Call], Iterator[Report]], ...] = (
    ops.check_op,
    settings.check_choice_by_time,
    settings.check_seed,
    settings.check_worker_seed,
    order.check_listing,
    order.check_modification_time,
    order.check_completion,
    order.check_hash,
    settings.check_setting_call,
)
_NODES: Mapping[type[ast.AST], Sequence[Callable[[Any, Tree], Iterator[Report]]]] = {
    ast.Assign: (settings.check_setting,),
    **dict.fromkeys(
        (ast.Call, ast.Set, ast.SetComp, ast.Name, ast.Attribute, ast.BinOp), (order.check_set,)
    ),
}


@dataclass
class FileScan:
    """The result of the scan of one file; ``turns_on`` is about deterministic algorithms."""

    findings: list[Finding] = field(default_factory=list)
    lines: int = 0
    turns_on: bool = False


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
        found = [Finding(file=path, line=1, end_line=1, rule=_NOT_SCANNED, reason=problem)]
        return FileScan(found if _NOT_SCANNED in rules else [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parser's, about the scanned code
        return scan_source(source, path, rules)


def scan_source(source: Source, path: str, rules: frozenset[str]) -> FileScan:
    """Scan one module; see :func:`scan_file`."""
    problems = list(source.problems)
    # A dict keeps the order, and each report once: two loaders may have one worker_init_fn.
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
    for report in reports:
        # The op may be deterministic in the torch that is installed.
        if report.rule in rules and (
            not report.op or find_op(report.op).is_needed(read_torch_version())
        ):
            f = _describe(report, path, lines)
            kept.setdefault((f.line, f.column, f.rule, f.op), f)
    found = [
        Finding(file=path, cell=cell, line=line, end_line=line, rule=_NOT_SCANNED, reason=reason)
        for line, cell, reason in problems
    ]
    for finding in _suppress(kept.values(), source.text, path, rules):
        cell, line = source.cells[finding.line - 1] if source.cells else (0, finding.line)
        # Edits are made in the text of a module, which a notebook's JSON is not.
        end, edit = finding.end_line - finding.line + line, "" if cell else finding.edit
        found.append(replace(finding, cell=cell, line=line, end_line=end, edit=edit))
    return FileScan(
        findings=sorted(finding for finding in found if finding.rule in rules),
        lines=len(lines),
        # It is a report and not a finding: it concerns all files of the scan.
        turns_on=any(report.rule == settings.TURNED_ON for report in reports),
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
    code = lines[line - 1][start - 1 : end - 1 if line == end_line else None][:CODE]
    place = {"line": line, "column": start, "end_line": end_line, "end_column": end, "code": code}
    said = {name: value for name, value in vars(report).items() if name != "node"}
    return Finding(file=path, **place, **said)


def _find_column(line: str, offset: int) -> int:
    """Return the column in characters of an offset in bytes."""
    if not line.isascii():
        # ast counts bytes of UTF-8, and editors count characters.
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
            # The comment stands above what it is about, with other comments between.
            following = (n for n in range(row, len(lines)) if lines[n].strip()[:1] not in {"", "#"})
            target = next(following, len(lines)) + 1
        written = _COMMENT.fullmatch(token.string)
        named = {word.strip() for word in written["rules"].split(",")} if written else set()
        # A finding about a comment lies at the comment.
        place: dict[str, Any] = {"file": path, "line": row, "column": column + 1, "end_line": row}
        place |= {"end_column": token.end[1] + 1, "code": token.string[:CODE]}
        if not named or named - RULES.keys():
            yield Finding(rule="D9M002", **place)
            continue
        # A finding may span lines, and the comment may stand on any of them.
        covered = {f for f in findings if f.rule in named and f.line <= target <= f.end_line}
        suppressed |= covered
        unused = (named & rules).difference(finding.rule for finding in covered)
        if unused:
            reason = f"It suppresses {', '.join(sorted(unused))}, which is not found here."
            yield Finding(rule="D9M003", reason=reason, **place)
    yield from (finding for finding in findings if finding not in suppressed)


def _list_comments(text: str) -> list[tokenize.TokenInfo]:
    """Return the comments of a valid text that are about our findings."""
    if not _MARK.search(text):
        return []
    try:
        # A # within a text is not a comment, so the text is tokenized; that takes longer than a
        # search, which comes first.
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    return [one for one in tokens if one.type == tokenize.COMMENT and _MARK.match(one.string)]


@dataclass(frozen=True)
class FileFix:
    r"""The text of a file before and after so many edits, with ``\n`` between lines."""

    path: str
    before: str
    after: str
    count: int

    def as_diff(self) -> str:
        """Return the edits as a unified diff."""
        texts = (self.before.splitlines(keepends=True), self.after.splitlines(keepends=True))
        lines = unified_diff(*texts, self.path, self.path)
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)

    def write(self) -> None:
        """Write the edited text in the file's encoding, with its ends of lines.

        Raises:
            SettingError: If the file cannot be written.
        """
        path = Path(self.path)
        advice = "Make it writable, or leave it out with --exclude."
        with file_errors(SettingError, f"{path} cannot be fixed", advice):
            data = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            # The text was read with \n, and the file keeps its ends of lines.
            newline = "\r\n" if b"\r\n" in data else "\n"
            path.write_bytes(self.after.replace("\n", newline).encode(encoding))


def fix_text(text: str, path: str, rules: frozenset[str]) -> FileFix:
    """Edit a text until no finding of these rules has an edit."""
    before, count = text, 0
    for _ in range(_ROUNDS):
        edited, made = _edit(text, scan_source(Source(text), path, rules).findings)
        if edited == text:
            break
        text, count = edited, count + made
    return FileFix(path, before, text, count)


def _edit(text: str, findings: Sequence[Finding]) -> tuple[str, int]:
    """Make the edits that do not overlap; none if the text would not parse any more."""
    starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    edited, limit, made = text, len(text), 0
    # From the end, so that the places of the earlier edits stay right.
    for finding in reversed([one for one in findings if one.edit]):
        first = starts[finding.line - 1] + finding.column - 1
        end = starts[finding.end_line - 1] + finding.end_column - 1
        # One that overlaps a later edit is left to the next round.
        if end <= limit:
            code = finding.edit.replace("{}", text[first:end])
            edited, limit, made = edited[:first] + code + edited[end:], first, made + 1
    try:
        ast.parse(edited)
    except SyntaxError:
        return text, 0
    return edited, made
