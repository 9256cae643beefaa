"""The rules of the linter, each with its reason and fix, and what they find."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, cast

Severity = Literal["error", "warning", "note"]
Certainty = Literal["certain", "depends"]
CODE = 120
"""Longest excerpt of code in a finding."""

# Id, severity and name of each rule, then the mechanism, unless a finding has a more exact one, and
# the remedy, likewise.
_TEXT = """\
D9M001 error not-scanned
The file could not be read as Python.
Fix: Repair the file, or leave it out with --exclude.

D9M002 warning suppression-malformed
A suppression does not name existing rules and a reason.
Fix: Write `# d9m: ignore[RULE] reason`.

D9M003 warning suppression-unused
A suppression suppresses nothing.
Fix: Remove it.

D9M101 warning op-without-deterministic-version
torch has no deterministic version of this op.
Fix: Turn patch_ops on, which replaces the op, or use a different op.

D9M102 error op-silently-nondeterministic
The op varies, and torch's flag neither changes it nor raises.
Fix: Turn patch_ops on, which replaces the op, or use a different op.

D9M103 note op-nondeterministic-without-the-flag
The op varies while deterministic algorithms are off.
Fix: Turn them on: DeterminismCallback(), Trainer(deterministic=True) or
torch.use_deterministic_algorithms(True).

D9M104 error package-kernel-nondeterministic
The package brings its own kernels, which torch's flag does not reach.
Fix: Pass deterministic=True.

D9M106 warning kernel-chosen-by-timing
The kernel is chosen by measured time, so another run may choose a kernel that rounds
differently.
Fix: Fix one configuration, or store the tuning's result in a file that all runs read.

D9M201 error generator-without-seed
Without a seed the generator takes one from the system, which differs in each run; seeding the
global generators does not change that.
Fix: Pass a seed that is fixed and recorded.

D9M203 error seed-differs-in-each-run
The seed is taken from something that differs in each run.
Fix: Pass a seed that is fixed and recorded.

D9M204 error reseeded-from-the-system
Without an argument this takes a seed from the system, which differs in each run.
Fix: Pass a seed that is fixed and recorded.

D9M206 error randomness-of-the-system
This draws from the system, which cannot be seeded.
Fix: Draw from a seeded generator.

D9M207 warning workers-seeded-alike
Every worker sets the same seed, so all draw the same numbers. torch seeds Python, NumPy and
torch in each worker by itself.
Fix: Remove the worker_init_fn, or derive its seed from torch.initial_seed().

D9M301 error set-order
The order of a set of strings depends on PYTHONHASHSEED, which Python draws in each run.
Fix: Iterate over sorted(...), or over dict.fromkeys(...), which keeps the order.

D9M302 error listing-order
The file system determines the order; it differs on other disks and after a copy.
Fix: Wrap it in sorted().

D9M303 error hash-of-string
hash() of a string depends on PYTHONHASHSEED, which Python draws in each run.
Fix: Use hashlib or zlib.crc32 on its bytes.

D9M305 error order-of-completion
Results come in the order in which they finish, which varies.
Fix: Take them in the order in which they were submitted.

D9M306 warning order-of-modification-time
Files that threads or processes write have these times in another order in each run, and so have
copies and downloads.
Fix: Sort by name.

D9M401 warning benchmark-on
cuDNN's benchmark chooses algorithms by measured time, so another run may choose different ones.
Fix: Leave benchmark off.

D9M402 warning determinism-off
Deterministic algorithms are turned off.
Fix: Turn them on, without warn_only: Trainer(deterministic=True) or
torch.use_deterministic_algorithms(True).
"""


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


def _read_rules() -> Iterator[LintRule]:
    for block in _TEXT.split("\n\n"):
        head, _, text = block.partition("\n")
        rule, severity, name = head.split()
        reason, _, fix = " ".join(text.split()).partition(" Fix: ")
        yield LintRule(rule, cast(Severity, severity), name, reason, fix)


RULES: dict[str, LintRule] = {rule.id: rule for rule in _read_rules()}


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
        certainty: ``"certain"`` if the source shows everything that matters (assuming CUDA and
            gradients); otherwise ``"depends"``.
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
            "cell": self.cell or None,
            "op": self.op or None,
        }
        del fields["edit"]
        return fields
