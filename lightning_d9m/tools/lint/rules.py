"""The rules of the linter, each with its reason and fix, and what they find."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_d9m.text import read_stanzas

Severity = Literal["error", "warning", "note"]
Certainty = Literal["certain", "depends"]
CODE = 120  # a JSON of findings goes into logs; the place has the rest
"""Longest excerpt of code in a finding."""


@dataclass(frozen=True)
class LintRule:
    """One rule.

    Attributes:
        id: The id for ``--select``, ``--ignore`` and suppressions.
        severity: ``"error"``: runs differ with any setting; ``"warning"``: runs differ, or the run
            stops, on some devices or settings; ``"note"``: may deserve attention.
        name: A few words, as an identifier.
        reason: The mechanism.
        fix: The remedy.
    """

    id: str
    severity: Severity
    name: str
    reason: str
    fix: str


# Texts are data: they are read in `d9m scan --rules`, in its findings and in docs/commands.md.
_STANZAS = read_stanzas(Path(__file__).with_name("rules.txt"))
_FIELDS: list[dict[str, Any]] = [
    {name: value for name, [value] in stanza.items()} for stanza in _STANZAS
]
RULES: dict[str, LintRule] = {fields["id"]: LintRule(**fields) for fields in _FIELDS}


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
        certainty: ``"certain"`` if the source shows everything that matters; otherwise
            ``"depends"``, as of each op and order.
        reason: The mechanism.
        fix: The remedy.
        code: The code, cut to one line.
        op: The catalog's name of the op; empty if the finding is not about an op.
        edit: What to write in place of the code, with ``{}`` for it; empty if there is more than
            one right answer.
    """

    file: str
    cell: int = 0
    line: int
    column: int = 1
    rule: str
    end_line: int
    end_column: int = 1
    certainty: Certainty = "certain"
    reason: str = ""
    fix: str = ""
    code: str = ""
    op: str = ""
    edit: str = ""

    def __post_init__(self) -> None:
        for name in ("reason", "fix"):  # where there is none, that of the rule
            if not getattr(self, name):
                object.__setattr__(self, name, getattr(RULES[self.rule], name))

    @property
    def severity(self) -> Severity:
        """The rule's severity; an uncertain error is downgraded to a warning."""
        # An error says that runs differ, which an uncertain finding cannot say.
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
        fields = asdict(self) | {
            "name": RULES[self.rule].name,
            "severity": self.severity,
            # JSON has null where a field does not apply.
            "cell": self.cell or None,
            "op": self.op or None,
        }
        # An edit is made by --fix, which reads the finding itself.
        del fields["edit"]
        return fields
