"""The table at the end of ``d9m repeat``: run, seed, weights, final loss, verdict.

Its form is that of Riach's table of repeated trainings (GTC 2019, S9911). Runs on different numbers
of processes have these numbers, the time and the records instead of seed and loss.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lightning_d9m.output.markdown import markdown_table
from lightning_d9m.output.terminal import WIDTH, make_table, measure, render, style
from lightning_d9m.text import cut_digests

if TYPE_CHECKING:
    from rich.table import Table

_TITLES = ("seed", "weights", "final loss")
_PROCESS_TITLES = ("processes", "time", "records", "weights")
_OF_PROCESSES = {"processes", "seconds", "records"}


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
        if self.processes is None:
            row = {name: value for name, value in row.items() if name not in _OF_PROCESSES}
        return row | {
            "loss": loss if math.isfinite(loss) else None,
            "loss_hex": self.loss,
        }


def format_table(
    rows: Sequence[RunRow], width: int = WIDTH, *, plain: bool = True, verbose: bool = False
) -> str:
    """Lay out the rows; losses are never cut."""
    table = _make_table(rows, verbose=verbose)
    return render(table, max(width, measure(table)), plain=plain)


def format_markdown_table(rows: Sequence[RunRow]) -> str:
    """Return the rows as a table in Markdown."""
    return markdown_table(*_list_rows(rows, verbose=False))


def _make_table(rows: Sequence[RunRow], *, verbose: bool) -> "Table":
    titles, cells = _list_rows(rows, verbose=verbose)
    table = make_table(titles, [(*row[:-1], style(row[-1])) for row in cells])
    for column in table.columns[: 4 if _PROCESS_TITLES[0] in titles else 2]:
        column.justify = "right"
    return table


def _list_rows(rows: Sequence[RunRow], *, verbose: bool) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of the table; the last column is the verdict."""
    several_fits = len({row.fit for row in rows}) > 1
    by_processes = any(row.processes is not None for row in rows)
    titles = _PROCESS_TITLES if by_processes else (*_TITLES, *[""] * verbose)
    list_cells = _list_process_cells if by_processes else _list_cells
    digests = [row.weights or "none" for row in rows]
    cells = [
        [
            f"{row.run}.{row.fit}" if several_fits else str(row.run),
            *list_cells(row, weights)[: len(titles)],
            row.verdict,
        ]
        for row, weights in zip(rows, digests if verbose else cut_digests(digests), strict=True)
    ]
    return ["run.fit" if several_fits else "run", *titles, "verdict"], cells


def _list_cells(row: RunRow, weights: str) -> tuple[str, ...]:
    loss = None if row.loss is None else float.fromhex(row.loss)
    return (
        str(row.seed),
        weights,
        "none" if loss is None else repr(loss),
        "" if loss is None else loss.hex(),
    )


def _list_process_cells(row: RunRow, weights: str) -> tuple[str, ...]:
    seconds = "" if row.seconds is None else f"{row.seconds:.1f} s"
    return str(row.processes), seconds, str(row.records), weights
