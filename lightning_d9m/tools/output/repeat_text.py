"""The result of ``d9m repeat``: a table of all fits, the verdict, and what differs.

A row of the table is a mapping, which is its JSON.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.engine.ledger.kinds import SAVED, UNREAD, name_saved
from lightning_d9m.engine.ledger.stack import LOGICAL_RANKS
from lightning_d9m.text import cut_digests, escape, pluralize, printable
from lightning_d9m.tools.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.tools.launch.left_files import FileWatch
from lightning_d9m.tools.launch.runs import RunResult
from lightning_d9m.tools.output.columns import (
    Column,
    format_markdown_table,
    format_table,
    print_result,
)
from lightning_d9m.tools.output.comparison_text import (
    CUT,
    describe_exception,
    format_evidence,
    list_limits,
    state_verdict,
)
from lightning_d9m.tools.output.terminal import list_next_steps, wrap

_VERDICTS = {"equal": "equal", "incomplete": "incomplete"}
_SEVERAL = 2  # later runs, of which some may agree
# The beginning of a ledger's name, where it is not that of a fit.
_OTHER_LEDGERS = {
    "final": "the final model",
    "predict": "the prediction",
    "saved": "the saved files",
    "test": "the test",
    "validate": "the validation",
}
RunRow: TypeAlias = Mapping[str, Any]


def _name_fits(names: Sequence[str]) -> dict[str, int | str]:
    """Number the fits of a run, from 1; other ledgers have the beginning of their name."""
    kinds = {name: name.partition("-")[0] for name in names}
    fits = [name for name in names if kinds[name] not in _OTHER_LEDGERS]
    return {**kinds, **{name: number for number, name in enumerate(fits, start=1)}}


def make_run_row(run: int, fit: int | str, ledger: Ledger, verdict: str, **facts: object) -> RunRow:
    """Return the row of a fit: its digest of weights, its seed and its last training loss.

    The table of such rows has the form of Riach's table of repeated trainings (GTC 2019, S9911).

    Args:
        run: Number of the run, from 1.
        fit: Number of the fit within the run, from 1; of another ledger, such as that of saved
            files, the beginning of its name.
        ledger: Its ledger.
        verdict: ``"reference"`` for run 1, ``"equal"``, ``"differs"`` or ``"no match"`` for others.
        **facts: What distinguishes the run: its number of processes, seconds, records.
    """
    # All ranks have the same weights and loss, or the comparison says so.
    outcome = ledger.outcome(min(ledger.files))
    saved = "" if outcome.last is None else outcome.last.totals.get(SAVED, "")
    last = outcome.final
    written = None if last is None else last.loss
    loss = None if written is None else float.fromhex(written)
    return {
        "run": run,
        "fit": fit,
        "seed": ledger.header.seed,
        "weights": saved if last is None else last.totals.get("weights", ""),
        # JSON has no infinity and no NaN.
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "loss_hex": written,
        "verdict": verdict,
        **dict.fromkeys(("processes", "seconds", "records")),
        **facts,
    }


def list_run_columns(rows: Sequence[RunRow], *, verbose: bool = False) -> list[Column[RunRow]]:
    """Return the columns of a table of these runs; losses are never cut."""
    named = [row["weights"] or "none" for row in rows]
    cut = dict(zip(named, named if verbose else cut_digests(named), strict=True))

    def field(name: str) -> Column[RunRow]:
        return Column(name, lambda row: escape(row[name]), is_number=True)

    def show_loss(row: RunRow) -> str:
        return repr(float.fromhex(row["loss_hex"])) if row["loss_hex"] else "none"

    columns = [field("run")]
    # Most programs have one fit, whose number would say nothing.
    if len({row["fit"] for row in rows}) > 1:
        columns.append(field("fit"))
    weights: Column[RunRow] = Column("weights", lambda row: cut[row["weights"] or "none"])
    if any(row["processes"] is not None for row in rows):
        time = Column[RunRow]("time", lambda row: f"{row['seconds'] or 0.0:.1f} s", is_number=True)
        columns += [field("processes"), time, field("records"), weights]
    else:
        columns += [field("seed"), weights, Column("final loss", show_loss)]
        if verbose:
            columns.append(Column("", lambda row: row["loss_hex"] or ""))
    return [*columns, Column("verdict", itemgetter("verdict"), meaning=itemgetter("verdict"))]


def _describe_ledger(row: RunRow) -> str:
    return _OTHER_LEDGERS.get(str(row["fit"]), f"fit {row['fit']}")


_MISSED = 0.05  # the probability that equal runs leave


def describe_power(runs: int, option: str, size: int = 1) -> str:
    """Return how rare a difference may be that so many equal runs show with 95%.

    If one run in ``1 / q`` has the rarer one of two results, n runs all agree with the probability
    ``(1 - q) ** n + q ** n``: those with the rarer result may agree with each other. Fewer than six
    runs show no q with 95%. ``size`` is the number of runs that one unit of the option adds.

    >>> describe_power(6, "-n")
    'A difference in more than 41% of the runs would have shown with 95%; -n 29 shows 10%.'
    >>> describe_power(4, "--tries", 2)
    '--tries 15 would show a difference in 10% of the runs with 95%.'
    """
    rare = 0.1
    # Up to one half: q is the rate of the rarer result.
    rates = (percent / 100 for percent in range(1, 51))
    rate = next((q for q in rates if (1 - q) ** runs + q**runs <= _MISSED), None)
    count = math.ceil(math.log(_MISSED) / math.log(1 - rare) / size)
    if rate is None:
        return f"{option} {count} would show a difference in {rare:.0%} of the runs with 95%."
    more = f"; {option} {count} shows {rare:.0%}" if rate > rare else ""
    return f"A difference in more than {rate:.0%} of the runs would have shown with 95%{more}."


@dataclass(frozen=True)
class FitOutcome:
    """One fit of one run, compared with that of the same name of run 1; its row of the table."""

    name: str
    ledger: Ledger
    comparison: Comparison
    row: RunRow


class RepeatReport:
    """The comparison of all runs with run 1, fit by fit.

    Args:
        runs: The runs by number; run 1 is the reference.
        output: The folder with their ledgers.
        command: The command that was run.
        printed: The first line of the output in which a run differs from run 1, with its
            counterpart.
        left: The files that the runs wrote.
        is_whole: Whether all runs were made; they end early at a failure or a signal.

    Attributes:
        rows: The rows of the table, one for each fit of each run.
    """

    def __init__(
        self,
        runs: Mapping[int, RunResult],
        output: Path,
        command: Sequence[str],
        *,
        printed: str = "",
        left: FileWatch | None = None,
        is_whole: bool = True,
    ) -> None:
        self._runs, self._command, self._output = runs, command, output
        self._printed, self._left, self._is_whole = printed, left, is_whole
        self._counts = [run.processes for run in runs.values() if run.processes is not None]
        # Fits are matched by name, so that a missing fit does not shift the others.
        names = list(dict.fromkeys(name for run in runs.values() for name in run.fits))
        self._fits = len(names)
        first, fits = runs[1].fits, _name_fits(names)
        self.rows: list[RunRow] = []
        self._compared: list[FitOutcome] = []
        for number, run in runs.items():
            for name, ledger in run.fits.items():
                found, verdict = None, "no match"
                if number == 1:
                    verdict = "reference"
                elif name in first:
                    found = compare_ledgers(first[name], ledger)
                    verdict = _VERDICTS.get(found.verdict, "differs")
                facts: dict[str, object] = {}
                if run.processes is not None:  # records of all ranks, without the headers
                    records = sum(ledger.outcome(rank).records - 1 for rank in ledger.files)
                    facts |= {"processes": run.processes, "seconds": run.seconds}
                    facts |= {"records": records}
                row = make_run_row(number, fits[name], ledger, verdict, **facts)
                self.rows.append(row)
                if found is not None:
                    self._compared.append(FitOutcome(name, ledger, found, row))
        self._differing = [fit for fit in self._compared if fit.row["verdict"] == "differs"]
        self._differing_runs = {fit.row["run"] for fit in self._differing}
        self._partial = [fit for fit in self._compared if fit.row["verdict"] == "incomplete"]
        self._unmatched = [
            number for number, run in runs.items() if run.fits.keys() != first.keys()
        ]

    @property
    def verdict(self) -> Literal["equal", "different", "incomplete"]:
        """``"equal"`` if all runs were made, have the same fits and agree."""
        if self._differing or self._unmatched:
            return "different"
        return "equal" if self._is_whole and not self._partial else "incomplete"

    @property
    def shown(self) -> FitOutcome | None:
        """The fit to look at: the first that differs, else the last that was compared."""
        return next(iter([*self._differing, *self._compared[-1:]]), None)

    def print_out(self, chosen: str, *, verbose: bool = False) -> None:
        """Print the report as text, Markdown or one JSON object."""
        columns = list_run_columns(self.rows, verbose=verbose)
        # Each paragraph ends with a blank line, the last one too.
        lines = list(self._list_evidence(verbose=verbose))[:-1]
        markdown = format_markdown_table(columns, self.rows)
        if chosen == "text":
            table = format_table(columns, self.rows, plain=False)
            lines = [*table.splitlines(), "", *lines, *[""] * bool(lines)]
            lines.append(f"ledgers: {self._output}")
        steps = self._list_next_steps() if self._differing else []
        print_result(chosen, self._as_json(), lines, self.state_verdict(), markdown, steps)

    def _list_evidence(self, *, verbose: bool) -> Iterator[str]:
        """Yield the lines below the table; a blank line ends each paragraph."""
        for number in self._unmatched[:1]:
            fits, others = self._runs[1].fits, self._runs[number].fits
            yield f"Run 1 left {pluralize(len(fits), 'ledger')}, run {number} left {len(others)}:"
            yield f"  reference: {', '.join(fits)}"
            yield f"  this run:  {', '.join(others)}"
            yield from ("The ledgers that both left were compared.", "")
        for entry in self._differing[:1]:
            yield from (*format_evidence(entry.comparison, verbose=verbose), "")
        said = self._list_left()
        # Different runs have a reason already for what they printed.
        if self._printed and self.verdict != "different":
            said.append(
                f"note: the runs printed different output, {printable(self._printed)}. Printed "
                "output is not compared bit for bit. Call lightning_d9m.record_final(model, "
                "accuracy=...) where the program ends, to compare its result too."
            )
        if self.verdict != "different":
            said += self._list_uncompared()
        if self.verdict == "different":
            said += filter(None, [self._advise()])
        # Two runs are a look at the program; more of them ask about a race.
        elif self.verdict == "equal" and len(self._runs) > _SEVERAL and not self._counts:
            said.append(describe_power(len(self._runs), "-n"))
        for sentence in said:
            yield from (*wrap(printable(sentence)), "")

    def state_verdict(self) -> str:
        """Return the verdict in one or two sentences."""
        runs = len(self._runs)
        if self.verdict == "different":
            count = len(self._differing_runs | set(self._unmatched))
            verb = "differs" if count == 1 else "differ"
            first = ""
            for entry in self._differing[:1]:
                fit = f", {_describe_ledger(entry.row)}" if self._fits > 1 else ""
                first = state_verdict(entry.comparison).removeprefix("different: ")
                first = f"Run {entry.row['run']}{fit}: {first}"
            which = f"{count} of {runs} runs {verb} from run 1."
            return " ".join(filter(None, (f"different: {which}", first, self._describe_rate())))
        last = max(self._runs)
        records = sum(
            rank.records
            for entry in self._compared
            if entry.row["run"] == last
            for rank in entry.comparison.ranks
        )
        found = [entry.comparison for entry in self._compared]
        agree = f"the fits of {runs} runs agree bit for bit in {pluralize(records, 'record')} each"
        ended = self._describe_exceptions()
        cut = f", as far as they go; {CUT}" if self._partial else "."
        verdict = f"{self.verdict}: {agree}" + (f"; {ended}" if ended else cut)
        return " ".join([verdict, *list_limits(*found)])

    def _describe_exceptions(self) -> str:
        """Say of the first fit that an exception ended whether its state there was compared."""
        for entry in (*self._partial, *self._compared):
            fit = _describe_ledger(entry.row) if self._fits > 1 else "the fit"
            if said := describe_exception(entry.comparison, f"in each run {fit}"):
                return said
        return ""

    def _describe_rate(self) -> str:
        """Say so if the others agree, or if only some of several runs differ."""
        compared, differing = len(self._runs) - 1, len(self._differing_runs)
        if self._counts or not differing or compared < _SEVERAL:
            return ""
        if differing < compared:
            return f"{differing} of {compared} pairs differ, so one pair of runs may miss it."
        if self._first_alone:
            return (
                "All later runs end with the same weights: look for files that run 1 left and "
                "later runs read, such as a cache or a checkpoint."
            )
        return ""

    @property
    def _first_alone(self) -> bool:
        """True if several later runs end with the same weights, and run 1 with others."""
        final = [
            [row["weights"] for row in self.rows if row["fit"] == fit and row["run"] > 1]
            for fit in {entry.row["fit"] for entry in self._differing}
        ]
        return bool(final) and all(
            len(weights) >= _SEVERAL and len(set(weights)) == 1 and weights[0] for weights in final
        )

    def _list_left(self) -> list[str]:
        """Return a sentence on files that may have carried a difference from run to run."""
        if self._left is None or not self._differing:
            return []
        return list(filter(None, [self._left.describe(first_alone=self._first_alone)]))

    def _list_uncompared(self) -> list[str]:
        """Return notes on what was saved or written, and is in no ledger."""
        saved = (fit for fit in self._compared if fit.row["fit"] == SAVED)
        records = chain.from_iterable(fit.ledger.records(min(fit.ledger.files)) for fit in saved)
        found = [one for one in records if isinstance(one, Digests)]
        unread = {
            f"{one.moment.removeprefix(f'{SAVED} ')}: {', '.join(one.groups[UNREAD])}": None
            for one in found
            if one.groups and UNREAD in one.groups
        }
        compared = {one.moment for one in found}
        written = self._left and self._left.describe_written(
            lambda name: name_saved(name) in compared
        )
        said = [f"note: saved without a digest, so not compared: {'; '.join(unread)}."]
        return [*said * bool(unread), *[f"note: {written}"] * bool(written)]

    def _advise(self) -> str:
        """Return what to do about runs that had several numbers of processes."""
        ledgers = chain.from_iterable(run.fits.values() for run in self._runs.values())
        if not self._counts or any(LOGICAL_RANKS in ledger.header.stack for ledger in ledgers):
            return ""
        # The next power of two: a number of logical ranks that each of these numbers of processes
        # divides, if they are powers of two.
        number = 2 ** (max(self._counts) - 1).bit_length()
        return (
            "The runs have no logical ranks. Without them, the same bits on different numbers of "
            "processes are not promised: sums and batches depend on that number. Use the strategy "
            f'"ddp_d9m", and set LIGHTNING_D9M_LOGICAL_RANKS={number} before the command.'
        )

    def _list_next_steps(self) -> list[tuple[str, str]]:
        compared, path = len(self._runs) - 1, self._output
        # For a shell, relative to the current folder if it is below it.
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        runs = printable(shlex.quote(str(path)))
        # A pair of `d9m locate` would often agree, so it needs more of them.
        rare = len(self._differing_runs) < compared
        tries = f"--tries {2 * compared} " if rare else ""
        steps = list_next_steps(f"{tries}-- {printable(shlex.join(self._command))}", runs)
        # `d9m locate` runs on one number of processes, on which runs may well agree.
        return steps[1:] if self._counts else steps

    def _as_json(self) -> dict[str, object]:
        return {
            "verdict": self.verdict,
            "output": str(self._output),
            "runs": self.rows,
            "printed": self._printed,
            "left": self._list_left(),
            "uncompared": self._list_uncompared(),
            "ledgers": [list(run.fits) for run in self._runs.values()],
            "differing": [
                {name: entry.row[name] for name in ("run", "fit")}
                | {"comparison": entry.comparison.as_json()}
                for entry in self._differing
            ],
        }
