"""The findings of a scan."""

from dataclasses import asdict, dataclass

from lightning_d9m.lint.rules import RULES, Certainty, Severity

CODE = 120
"""Longest excerpt of code in a finding."""


@dataclass(frozen=True, order=True, kw_only=True)
class Finding:
    """One finding of a scan.

    Attributes:
        file: The file's path as given, or below the given folder.
        cell: The number of a notebook's cell among all cells, from 1; 0 in a Python file.
        line: In the file, or in the cell; from 1.
        column: In characters, from 1.
        rule: The rule's id.
        end_line: The last line of the code.
        end_column: The column behind it.
        file_line: In the file, even for a notebook.
        certainty: ``"certain"`` if the source shows everything that matters (assuming CUDA and
            gradients); otherwise ``"depends"``.
        reason: The mechanism.
        fix: The remedy.
        code: The code, cut to one line.
        op: The catalog's name of the op; empty if the finding is not about an op.
    """

    file: str
    cell: int = 0
    line: int
    column: int = 1
    rule: str
    end_line: int
    end_column: int = 1
    file_line: int
    certainty: Certainty = "certain"
    reason: str
    fix: str
    code: str = ""
    op: str = ""

    @property
    def severity(self) -> Severity:
        """The rule's severity; an uncertain error is downgraded to a warning."""
        severity = RULES[self.rule].severity
        uncertain = self.certainty == "depends" and severity == "error"
        return "warning" if uncertain else severity

    @property
    def location(self) -> str:
        """``file:line:column``, with the cell of a notebook before the line."""
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.file}:{cell}{self.line}:{self.column}"

    def as_record(self) -> dict[str, object]:
        """Return the finding as JSON types."""
        return {
            **asdict(self),
            "name": RULES[self.rule].name,
            "severity": self.severity,
            "cell": self.cell or None,
            "op": self.op or None,
        }
