"""What a scan finds."""

from dataclasses import asdict, dataclass

from lightning_d9m.lint.rules import RULES, Certainty, Severity


@dataclass(frozen=True, order=True, kw_only=True)
class Finding:
    """One line of a scan.

    Attributes:
        file: The file's path, as given or below the folder that was given.
        cell: The number of a notebook's cell, from 1, all kinds counted; 0 in a Python file.
        line: In the file, or in the cell; from 1.
        column: In characters, from 1.
        rule: The rule's id.
        end_line: The last line of what was found.
        end_column: The column behind it.
        file_line: In the file, also for a notebook.
        certainty: ``"certain"`` where all that it depends on was read in the source (the device is
            taken to be CUDA, and gradients to be asked for); else ``"depends"``.
        reason: Why it was found.
        fix: What to do.
        code: The source of what was found, cut to one line.
        op: The catalogue's name of the op; empty where it is none.
    """

    file: str
    cell: int = 0
    line: int
    column: int
    rule: str
    end_line: int
    end_column: int
    file_line: int
    certainty: Certainty
    reason: str
    fix: str
    code: str = ""
    op: str = ""

    @property
    def severity(self) -> Severity:
        """That of the rule; what only depends is no error."""
        severity = RULES[self.rule].severity
        uncertain = self.certainty == "depends" and severity == "error"
        return "warning" if uncertain else severity

    @property
    def place(self) -> str:
        """``file:line:column``, with the cell of a notebook before the line."""
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.file}:{cell}{self.line}:{self.column}"

    def as_record(self) -> dict[str, object]:
        """Return the finding in the types that JSON knows."""
        return {
            **asdict(self),
            "name": RULES[self.rule].name,
            "severity": self.severity,
            "cell": self.cell or None,
            "op": self.op or None,
        }
