"""The scan of a file: read, parse, check, suppress."""

import ast
import gc
import symtable
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_d9m.lint.checks.clock import (
    check_learning_rate,
    check_learning_rate_call,
    check_modification_time,
)
from lightning_d9m.lint.checks.indexing import check_index
from lightning_d9m.lint.checks.kernels import check_atomic, check_autotuning
from lightning_d9m.lint.checks.loaders import check_dataset, check_rank_seeds, check_worker_seed
from lightning_d9m.lint.checks.memory import check_empty
from lightning_d9m.lint.checks.ops import check_function_choice, check_op
from lightning_d9m.lint.checks.order import (
    check_completion,
    check_hash,
    check_hash_seed,
    check_listing,
    check_set,
)
from lightning_d9m.lint.checks.seeds import check_seed
from lightning_d9m.lint.checks.settings import TURNED_ON, check_setting, check_setting_call
from lightning_d9m.lint.checks.threads import check_thread
from lightning_d9m.lint.checks.training import check_environment, check_training
from lightning_d9m.lint.files import SourceFile
from lightning_d9m.lint.finding import Finding
from lightning_d9m.lint.rules import RULES
from lightning_d9m.lint.source import (
    Source,
    SourceError,
    parse_error,
    read_notebook,
    read_python,
)
from lightning_d9m.lint.suppression import Suppression, read_suppressions
from lightning_d9m.lint.triggers import find_candidate_lines, has_suppression
from lightning_d9m.lint.walk import Check, ReportFinding, walk
from lightning_d9m.patches.catalog.catalog import find_op

LARGEST = 5_000_000
"""Largest size of a source file, in bytes; larger files hold data."""

_CODE = 120
# Packages whose files may use torch's ops without the word "torch".
_TORCH_PACKAGES = ("torch", "lightning", "pytorch_lightning")
_CALLS: tuple[Check, ...] = (
    check_op,
    check_function_choice,
    check_setting_call,
    check_seed,
    check_listing,
    check_completion,
    check_hash,
    check_hash_seed,
    check_empty,
    check_atomic,
    check_autotuning,
    check_worker_seed,
    check_rank_seeds,
    check_dataset,
    check_training,
    check_environment,
    check_modification_time,
    check_learning_rate_call,
    check_thread,
)
_CHECKS: Mapping[type[ast.AST], Sequence[Check]] = {
    ast.Call: (*_CALLS, check_set),
    ast.Assign: (check_setting, check_hash_seed, check_learning_rate),
    ast.AugAssign: (check_learning_rate,),
    ast.Subscript: (check_index,),
    **dict.fromkeys((ast.Set, ast.SetComp, ast.Name, ast.Attribute, ast.BinOp), (check_set,)),
}


@dataclass
class FileScan:
    """The result of the scan of one file.

    Attributes:
        findings: Sorted by place.
        lines: Number of lines.
        walked: True if it has a word that a finding needs, so that its tree was walked.
        turns_on: True if it turns deterministic algorithms on.
    """

    findings: list[Finding] = field(default_factory=list)
    lines: int = 0
    walked: bool = False
    turns_on: bool = False


@contextmanager
def scanning_prepared() -> Iterator[None]:
    """Suppress the parser's warnings, and garbage collection, because trees have no cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if collecting:
            gc.enable()


def scan_file(
    entry: SourceFile, torch_version: str, rules: frozenset[str], largest: int = LARGEST
) -> FileScan:
    """Scan one file. A file that cannot be scanned gives a finding."""
    path = entry.path
    try:
        size = 0 if entry.problem else Path(path).stat().st_size
        if entry.problem or size > largest:
            too_large = f"It has {size:,} bytes, more than the {largest:,} of --max-bytes."
            return _refuse(path, entry.problem or too_large, rules)
        data = Path(path).read_bytes()
        source = read_notebook(data) if path.endswith(".ipynb") else read_python(data)
    except OSError as error:
        return _refuse(path, f"It cannot be read: {error.strerror or error}.", rules)
    except SourceError as error:
        return _refuse(path, str(error), rules)
    return scan_source(source, path, torch_version, rules)


def scan_source(source: Source, path: str, torch_version: str, rules: frozenset[str]) -> FileScan:
    """Scan one module; see :func:`scan_file`."""
    data = source.text.encode("utf-8", "surrogatepass")
    result = FileScan(lines=source.text.count("\n") + 1)
    for problem in source.problems:
        result.findings.append(_describe_problem(path, problem.line, problem.reason, problem.cell))
    package = _find_package(path) if "from ." in source.text else ""
    lines = find_candidate_lines(data, torch=package.startswith(_TORCH_PACKAGES))
    suppressing = has_suppression(data)
    result.walked = bool(lines) or suppressing
    reports: list[ReportFinding] = []
    try:
        if result.walked:
            tree = ast.parse(source.text)
            reports = walk(tree, lines, _CHECKS, package)
        else:
            # Finds the same syntax errors without building a tree.
            symtable.symtable(source.text, path, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        result.findings.append(
            _describe_problem(path, getattr(error, "lineno", None) or 1, parse_error(error), 0)
        )
    result.turns_on = any(report.rule == TURNED_ON for report in reports)
    places = _Places(source, path)
    found = [
        places.describe(report)
        for report in dict.fromkeys(reports)
        if report.rule in rules and (not report.op or find_op(report.op).is_needed(torch_version))
    ]
    found = _drop_repeated(found)
    if suppressing:
        found = _suppress(found, read_suppressions(source.text), places, rules)
    result.findings = sorted(
        finding
        for finding in (*result.findings, *map(places.locate, found))
        if finding.rule in rules
    )
    return result


def _drop_repeated(findings: Iterable[Finding]) -> list[Finding]:
    """Keep one finding of a rule per place, or per file, if several checks report it."""
    kept: dict[tuple[object, ...], Finding] = {}
    for f in findings:
        kept.setdefault((f.rule,) if RULES[f.rule].once else (f.line, f.column, f.rule, f.op), f)
    return list(kept.values())


class _Places:
    """Converts nodes to places, and lines of a notebook's code to cells."""

    def __init__(self, source: Source, path: str) -> None:
        self.source = source
        self.path = path
        self.lines = source.text.split("\n")

    def describe(self, report: ReportFinding) -> Finding:
        node = report.node
        line, end_line = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined] # reported nodes have line numbers
        rule = RULES[report.rule]
        start = self._column(line, node.col_offset)  # type: ignore[attr-defined] # likewise
        end = self._column(end_line, node.end_col_offset or 0)  # type: ignore[attr-defined] # likewise
        text = self.lines[line - 1][start - 1 : end - 1 if line == end_line else None]
        return Finding(
            file=self.path,
            line=line,
            column=start,
            rule=rule.id,
            end_line=end_line,
            end_column=end,
            file_line=line,
            certainty=report.certainty,
            reason=report.reason or rule.reason,
            fix=report.fix or rule.fix,
            code=text[:_CODE],
            op=report.op,
        )

    def locate(self, finding: Finding) -> Finding:
        """Replace the line of a notebook's code with the cell and its line."""
        if not self.source.cells:
            return finding
        cell, line, file_line = self.source.cells[finding.line - 1]
        end = finding.end_line - finding.line + line
        return replace(finding, cell=cell, line=line, end_line=end, file_line=file_line)

    def _column(self, line: int, offset: int) -> int:
        text = self.lines[line - 1]
        if not text.isascii():
            offset = len(text.encode()[:offset].decode("utf-8", "replace"))
        return offset + 1


def _suppress(
    findings: list[Finding],
    suppressions: list[Suppression],
    places: _Places,
    rules: frozenset[str],
) -> list[Finding]:
    """Remove suppressed findings, and add findings about the suppressions."""
    kept = []
    for finding in findings:
        matching = [
            suppression
            for suppression in suppressions
            if not suppression.problem
            and finding.rule in suppression.rules
            and finding.line <= suppression.target <= finding.end_line
        ]
        for suppression in matching:
            suppression.used.add(finding.rule)
        if not matching:
            kept.append(finding)
    for suppression in suppressions:
        unused = [
            rule for rule in suppression.rules if rule in rules and rule not in suppression.used
        ]
        if suppression.problem:
            kept.append(_describe_suppression("D9M002", suppression, suppression.problem, places))
        elif unused:
            reason = f"It suppresses {', '.join(unused)}, which is not found here."
            kept.append(_describe_suppression("D9M003", suppression, reason, places))
    return kept


def _describe_suppression(
    rule: str, suppression: Suppression, reason: str, places: _Places
) -> Finding:
    line = suppression.line
    return Finding(
        file=places.path,
        line=line,
        column=suppression.column + 1,
        rule=rule,
        end_line=line,
        end_column=suppression.end_column + 1,
        file_line=line,
        certainty="certain",
        reason=reason,
        fix=RULES[rule].fix,
        code=places.lines[line - 1][suppression.column :][:_CODE],
    )


def _refuse(path: str, reason: str, rules: frozenset[str]) -> FileScan:
    findings = [_describe_problem(path, 1, reason, 0)] if "D9M001" in rules else []
    return FileScan(findings=findings)


def _describe_problem(path: str, line: int, reason: str, cell: int) -> Finding:
    return Finding(
        file=path,
        cell=cell,
        line=line,
        column=1,
        rule="D9M001",
        end_line=line,
        end_column=1,
        file_line=line,
        certainty="certain",
        reason=reason,
        fix=RULES["D9M001"].fix,
    )


def _find_package(path: str) -> str:
    """Return the dotted name of a file's package, for its relative imports."""
    parts: list[str] = []
    folder = Path(path).absolute().parent
    while (folder / "__init__.py").exists():
        parts.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(parts))
