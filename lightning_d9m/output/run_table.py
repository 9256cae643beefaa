"""The table at the end of ``d9m repeat``: run, seed, weights, final loss, verdict.

Its form is that of Riach's table of repeated trainings (GTC 2019, S9911). Runs on different numbers
of processes have these numbers, the time and the records instead of seed and loss.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning_d9m.output.columns import Column
from lightning_d9m.text import cut_digests


@dataclass(frozen=True)
class RunRow:
    """One fit of one run.

    Attributes:
        run: Number of the run, from 1.
        fit: Number of the fit within the run, from 1.
        seed: The base seed.
        weights: Digest of the final weights, 32 hex digits; empty if the fit did not end.
        loss: ``float.hex()`` of the last training loss; None if there was none.
        verdict: ``"reference"`` for run 1, ``"equal"``, ``"differs"`` or ``"no match"`` for others.
        processes: Number of processes; None unless it distinguishes the runs.
        seconds: Duration of the run; None likewise.
        records: Number of records in the ledger; None likewise.
    """

    run: int
    fit: int
    seed: int
    weights: str
    loss: str | None
    verdict: str
    processes: int | None = None
    seconds: float | None = None
    records: int | None = None

    def as_json(self) -> dict[str, object]:
        """Return the row for ``--json``, the loss in both notations (null for NaN)."""
        loss = math.nan if self.loss is None else float.fromhex(self.loss)
        row = asdict(self)
        for name in ("processes", "seconds", "records") if self.processes is None else ():
            del row[name]
        return row | {"loss": loss if math.isfinite(loss) else None, "loss_hex": self.loss}


def list_columns(rows: Sequence[RunRow], *, verbose: bool = False) -> list[Column[RunRow]]:
    """Return the columns of a table of these runs; losses are never cut."""
    several_fits = len({row.fit for row in rows}) > 1
    digests = [row.weights for row in rows]
    named = [digest or "none" for digest in digests]
    cut = dict(zip(digests, named if verbose else cut_digests(named), strict=True))
    number: Column[RunRow] = Column(
        "run.fit" if several_fits else "run",
        lambda row: f"{row.run}.{row.fit}" if several_fits else str(row.run),
        is_number=True,
    )
    weights: Column[RunRow] = Column("weights", lambda row: cut[row.weights])
    verdict: Column[RunRow] = Column("verdict", lambda row: row.verdict, has_meaning=True)
    if any(row.processes is not None for row in rows):
        return [number, *_OF_PROCESSES, weights, verdict]
    return [number, _SEED, weights, _LOSS, *[_BITS] * verbose, verdict]


def _read_loss(row: RunRow) -> float | None:
    return None if row.loss is None else float.fromhex(row.loss)


_OF_PROCESSES: tuple[Column[RunRow], ...] = (
    Column("processes", lambda row: str(row.processes), is_number=True),
    Column(
        "time", lambda row: "" if row.seconds is None else f"{row.seconds:.1f} s", is_number=True
    ),
    Column("records", lambda row: str(row.records), is_number=True),
)
_SEED: Column[RunRow] = Column("seed", lambda row: str(row.seed), is_number=True)
_LOSS: Column[RunRow] = Column(
    "final loss", lambda row: "none" if (loss := _read_loss(row)) is None else repr(loss)
)
_BITS: Column[RunRow] = Column(
    "", lambda row: "" if (loss := _read_loss(row)) is None else loss.hex()
)
