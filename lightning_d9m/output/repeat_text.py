"""What ``d9m repeat`` prints at its end: a table of all fits, a verdict, what differs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_d9m.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.launch.run import Run
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.output.comparison_json import as_json
from lightning_d9m.output.comparison_text import format_comparison
from lightning_d9m.output.run_table import RunRow, format_table
from lightning_d9m.text import pluralize


@dataclass(frozen=True)
class _FitOutcome:
    run: int
    fit: int
    ledger: Ledger
    comparison: Comparison | None

    @property
    def differs(self) -> bool:
        return self.comparison is not None and not self.comparison.equal

    def as_row(self, expected: bool) -> RunRow:
        last = self.ledger.outcome(min(self.ledger.files)).final
        verdict = "no match" if self.comparison is None else "differs" if self.differs else "equal"
        return RunRow(
            run=self.run,
            fit=self.fit,
            seed=self.ledger.header.seed,
            weights="" if last is None else last.totals.get("weights", ""),
            loss=None if last is None else last.loss,
            verdict="expected" if expected else verdict,
        )


class RepeatReport:
    """All runs held against the first, fit by fit.

    Args:
        runs: The runs, at least two, in order.
        output: The folder with their ledgers.
    """

    def __init__(self, runs: Sequence[Run], output: Path) -> None:
        self._runs = runs
        self._output = output
        # Fits of one name belong together, so that a run that has one less shifts none.
        names = list(dict.fromkeys(name for run in runs for name in run.fits))
        self._fits = len(names)
        first = runs[0].fits
        self._entries = [
            _FitOutcome(
                run=number,
                fit=names.index(name) + 1,
                ledger=ledger,
                comparison=(
                    compare_ledgers(first[name], ledger) if number > 1 and name in first else None
                ),
            )
            for number, run in enumerate(runs, start=1)
            for name, ledger in run.fits.items()
        ]
        self._rows = [entry.as_row(entry.run == 1) for entry in self._entries]
        self._differing = [entry for entry in self._entries if entry.differs]
        self._other_fits = [
            number for number, run in enumerate(runs, 1) if run.fits.keys() != first.keys()
        ]

    @property
    def equal(self) -> bool:
        """Whether all runs left the same fits, and each agrees with that of the first run."""
        return not (self._differing or self._other_fits)

    def print_out(self, *, as_one_object: bool) -> None:
        """Print it for people, or as one JSON object."""
        if as_one_object:
            print(json.dumps(self._as_json(), indent=2))
            return
        print(format_table(self._rows))
        for number, run in enumerate(self._runs, start=1):
            if run.label:
                print(f"run {number}: {run.label}")
        print()
        self._print_verdict()
        print(f"ledgers: {self._output}")

    def _print_verdict(self) -> None:
        runs = len(self._runs)
        if self.equal:
            records = sum(
                rank.records
                for entry in self._entries
                if entry.run == runs and entry.comparison is not None
                for rank in entry.comparison.ranks
            )
            print(f"equal: {runs} runs agree bit for bit in {pluralize(records, 'record')} each.")
            if self._fits == 1:
                print(f"weights: {self._rows[-1].weights}")
            return
        for number in self._other_fits[:1]:
            print(self._describe_fits(number))
        for entry in self._differing[:1]:
            assert entry.comparison is not None, "it differs"
            print("\n".join(format_comparison(entry.comparison)))
        many = {entry.run for entry in self._differing} | set(self._other_fits)
        above = "."
        if self._differing:
            entry = self._differing[0]
            above = f"; above: run {entry.run}{f', fit {entry.fit}' if self._fits > 1 else ''}."
        verb = "differs" if len(many) == 1 else "differ"
        print(f"\ndifferent: {len(many)} of {runs} runs {verb} from run 1{above}")

    def _describe_fits(self, number: int) -> str:
        """Say that a run left other ledgers than the first; what both have was compared."""
        first, run = self._runs[0].fits, self._runs[number - 1].fits
        return "\n".join(
            [
                f"Run 1 left {pluralize(len(first), 'ledger')}, run {number} left {len(run)}:",
                f"  expected: {', '.join(first)}",
                f"  actual:   {', '.join(run)}",
                "Those that both have were compared.",
            ]
        )

    def _as_json(self) -> dict[str, object]:
        return {
            "verdict": "equal" if self.equal else "different",
            "output": str(self._output),
            "runs": [
                row.as_json()
                | ({"label": label} if (label := self._runs[row.run - 1].label) else {})
                for row in self._rows
            ],
            "ledgers": [list(run.fits) for run in self._runs],
            "differing": [
                {"run": entry.run, "fit": entry.fit, "comparison": as_json(entry.comparison)}
                for entry in self._differing
                if entry.comparison is not None
            ],
        }
