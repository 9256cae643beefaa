"""The result of a search."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_d9m.comparison.causes import Cause
from lightning_d9m.launch.run_pair import RunPair
from lightning_d9m.ledger.kinds import describe_batch
from lightning_d9m.text import escape

if TYPE_CHECKING:
    from lightning_d9m.comparison.differences import Divergence
    from lightning_d9m.comparison.numeric_difference import Magnitude
    from lightning_d9m.lint.finding import Finding
    from lightning_d9m.locate.op_evidence import OpFinding, SampleComparison


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        cause: The kind of cause; None if no runs differed.
        divergences: The first place of each rank that diverges first, as far as it was narrowed
            down.
        ranks: Number of ranks.
        pair: The runs in which it occurred.
        looks: The outcome of each look, as text.
        op: The evidence on the operation, if the place is one.
        magnitude: How far the values are apart at the first place, unless it is an operation.
        reference_rank: The rank whose values are the expected ones, if ranks of one run differ.
        samples: How the samples of the epoch compare, if batches differ.
        lines: Lines of the program that may explain the cause, the likeliest first.
        left: A sentence on files through which a run may have changed later ones.
        writer: What ran when the first place was written; empty if it is not known.
    """

    cause: Cause | None = None
    divergences: "tuple[Divergence, ...]" = ()
    ranks: int = 1
    pair: RunPair | None = None
    looks: list[str] = field(default_factory=list)
    op: "OpFinding | None" = None
    magnitude: "Magnitude | None" = None
    reference_rank: int | None = None
    samples: "SampleComparison | None" = None
    lines: "list[Finding]" = field(default_factory=list)
    left: str = ""
    writer: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the result for ``--json``."""
        record: dict[str, Any] = {
            "verdict": "equal" if self.cause is None else "different",
            "looks": self.looks,
        }
        if self.cause is None:
            return record
        record |= {"cause": self.cause.kind, "text": self.cause.text, "advice": self.cause.advice}
        record["ranks"] = [entry.rank for entry in self.divergences]
        if self.pair is not None:
            record["fit"] = self.pair.fit
        if self.divergences:
            first = self.divergences[0]
            for name in ("moment", "epoch", "step", "batch", "kind", "name", "call", "count"):
                record[name] = getattr(first, name)
        if self.op is not None:
            patch = None if self.op.patch is None else self.op.patch.name
            magnitude = _recorded(self.op.magnitude)
            record["op"] = vars(self.op) | {"magnitude": magnitude, "patch": patch}
        elif self.magnitude is not None:
            record["magnitude"] = _recorded(self.magnitude)
        if self.reference_rank is not None:
            record["reference_rank"] = self.reference_rank
        if self.samples is not None:
            record["samples"] = asdict(self.samples) | {"same": self.samples.same}
        lines = [finding.as_record() for finding in self.lines]
        further = {"lines": lines, "left": self.left, "writer": self.writer}
        record |= {name: value for name, value in further.items() if value}
        return record


def _recorded(magnitude: "Magnitude | None") -> Mapping[str, object] | None:
    return None if magnitude is None else magnitude.as_record()


def describe_place(found: "Sequence[Divergence]") -> str:
    """Return the first place at which runs diverge, as text."""
    if not found:
        return "no place that both runs have"
    first = found[0]
    when = f"epoch {first.epoch}, step {first.step}"
    if first.moment == "batch":
        when += f", {describe_batch(first.batch)}"
    elif first.moment in ("initial", "final"):
        when = f"the {first.moment} state"
    call = f", call {first.call}" if first.call else ""
    return f"{when}: {first.kind} {escape(first.name)}{call}"
