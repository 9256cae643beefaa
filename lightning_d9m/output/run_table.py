"""The table that ends ``d9m repeat``: run, seed, weights, final loss, verdict.

Its form is that of Riach's table of repeated trainings (GTC 2019, S9911).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_WIDTH = 80
_SHORTEST_DIGEST = 8


@dataclass(frozen=True)
class RunRow:
    """One fit of one run.

    Attributes:
        run: Number of the run, from 1.
        fit: Number of the fit within the run, from 1.
        seed: The base seed.
        weights: Digest of the final weights, 32 hex digits; empty when the fit did not end.
        loss: ``float.hex()`` of the last training loss; None when there was none.
        verdict: ``"expected"`` for the first run, ``"equal"`` or ``"differs"`` for the others.
    """

    run: int
    fit: int
    seed: int
    weights: str
    loss: str | None
    verdict: str

    def as_json(self) -> dict[str, object]:
        """Return the row for ``--json``, the loss in both notations (JSON knows no NaN: null)."""
        loss = math.nan if self.loss is None else float.fromhex(self.loss)
        return asdict(self) | {
            "loss": loss if math.isfinite(loss) else None,
            "loss_hex": self.loss,
        }


def format_table(rows: Sequence[RunRow]) -> str:
    """Lay out the rows in at most 80 columns; digests are cut to what fits, never a loss."""
    several_fits = len({row.fit for row in rows}) > 1
    cells = [
        (
            f"{row.run}.{row.fit}" if several_fits else str(row.run),
            str(row.seed),
            row.weights or "none",
            "none" if row.loss is None else repr(float.fromhex(row.loss)),
            "" if row.loss is None else float.fromhex(row.loss).hex(),
            row.verdict,
        )
        for row in rows
    ]
    titles = ("run.fit" if several_fits else "run", "seed", "weights", "final loss", "", "verdict")
    widths = [max(len(line[column]) for line in (titles, *cells)) for column in range(len(titles))]
    spare = _WIDTH - sum(widths) + widths[2] - 2 * (len(widths) - 1)
    widths[2] = max(_SHORTEST_DIGEST, min(widths[2], spare))
    lines = []
    for line in (titles, *cells):
        run, seed, weights, *rest = line
        padded = [
            run.rjust(widths[0]),
            seed.rjust(widths[1]),
            weights[: widths[2]].ljust(widths[2]),
        ]
        padded += [text.ljust(width) for text, width in zip(rest, widths[3:], strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
