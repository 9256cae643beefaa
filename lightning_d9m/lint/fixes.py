"""Edits of files, for the findings that have one right answer."""

import ast
import io
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import unified_diff
from itertools import accumulate
from pathlib import Path

from lightning_d9m.errors import SettingError, file_errors
from lightning_d9m.lint.rules import Finding
from lightning_d9m.lint.scanner import scan_source
from lightning_d9m.lint.source import Source

# An edit may lie within the code of another, which a later round makes.
_ROUNDS = 5


@dataclass(frozen=True)
class FileFix:
    """The text of a file before and after its edits.

    Attributes:
        path: The file.
        before: Its text, with newlines between lines.
        after: Its edited text.
        count: Number of edits.
    """

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
            newline = "\r\n" if b"\r\n" in data else "\n"
            path.write_bytes(self.after.replace("\n", newline).encode(encoding))


def fix_text(text: str, path: str, rules: frozenset[str]) -> FileFix:
    """Edit a text until no finding of these rules has an edit."""
    before, count = text, 0
    for _ in range(_ROUNDS):
        edits = scan_source(Source(text), path, rules).edits
        edited, made = _edit(text, edits)
        if edited == text:
            break
        text, count = edited, count + made
    return FileFix(path, before, text, count)


def _edit(text: str, edits: Mapping[Finding, str]) -> tuple[str, int]:
    """Make the edits that do not overlap; none if the text would not parse any more."""
    starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    edited, limit, made = text, len(text), 0
    for finding in sorted(edits, reverse=True):
        first = starts[finding.line - 1] + finding.column - 1
        end = starts[finding.end_line - 1] + finding.end_column - 1
        if end <= limit:
            code = edits[finding].replace("{}", text[first:end])
            edited, limit, made = edited[:first] + code + edited[end:], first, made + 1
    try:
        ast.parse(edited)
    except SyntaxError:
        return text, 0
    return edited, made
