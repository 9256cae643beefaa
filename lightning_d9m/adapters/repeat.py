"""``d9m repeat``: run a command several times and say whether the runs agree bit for bit."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_d9m.adapters.compare import as_json, format_comparison
from lightning_d9m.adapters.process import run_watched
from lightning_d9m.adapters.verdict import RunRow, format_table
from lightning_d9m.errors import CommandError, LedgerError, SettingError
from lightning_d9m.evidence.compare import Comparison, compare_ledgers
from lightning_d9m.evidence.ledger import Ledger, list_evaluations, list_fits, read_ledger

if TYPE_CHECKING:
    from typing_extensions import Self

LEDGER_VARIABLE = "LIGHTNING_D9M_LEDGER_DIR"
_FEWEST_RUNS = 2
_MOST_RUNS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of ``d9m repeat``."""
    parser.usage = "d9m repeat [-n RUNS] [-o DIR] [--timeout SECONDS] [--json] -- COMMAND ..."
    parser.add_argument("-n", "--runs", type=int, default=2, help="how many runs (default: 2)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="new folder for ledgers and logs (default: the next free d9m-runs/NNN)",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="end a run that takes longer, as hanging"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="a training with Lightning, such as: python train.py",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 0 when all runs agree, 1 when they differ."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    _check(arguments, words)
    output = _make_output(arguments.output)
    ledgers = []
    for number in range(1, arguments.runs + 1):
        folder = output / f"run-{number:03d}"
        folder.mkdir()
        with _Progress(number, arguments.runs, folder) as progress:
            run_watched(
                words,
                environment=_environment(folder),
                log=folder / "output.log",
                timeout=arguments.timeout,
                tick=progress.tick,
            )
        ledgers.append(_read_fits(folder, words))
    return _conclude(ledgers, output, print_json=arguments.json)


def _check(arguments: argparse.Namespace, words: list[str]) -> None:
    if not words:
        raise SettingError(
            "There is no command to repeat. Give it after `--`: d9m repeat -- python train.py"
        )
    if not _FEWEST_RUNS <= arguments.runs <= _MOST_RUNS:
        raise SettingError(
            f"--runs is {arguments.runs}; allowed: {_FEWEST_RUNS} to {_MOST_RUNS}. One run has "
            "nothing to be compared with."
        )
    if arguments.timeout is not None and not arguments.timeout > 0:
        raise SettingError(f"--timeout is {arguments.timeout:g}; allowed: more than 0 seconds.")


def _make_output(chosen: Path | None) -> Path:
    """Make a new folder for this repetition; never one that exists."""
    candidates = (
        (Path("d9m-runs") / f"{number:03d}" for number in range(1000))
        if chosen is None
        else [chosen]
    )
    for folder in candidates:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise LedgerError(
                f"The folder {folder} cannot be made: {error.strerror}. Give one that can be with "
                "--output."
            ) from error
        return folder.resolve()
    raise LedgerError(
        f"The folder {chosen or 'd9m-runs'} exists already, and nothing is overwritten. Give a new "
        "one with --output, or remove it."
    )


def _environment(folder: Path) -> dict[str, str]:
    """Return the variables of a run: where its ledgers go, and a fixed hash seed."""
    variables = {**os.environ, LEDGER_VARIABLE: str(folder)}
    # A project that does not mention us is repeated all the same; LIGHTNING_D9M=0 is the user's no.
    variables.setdefault("LIGHTNING_D9M", "1")
    # Python reads it when it starts; left random, the order of sets of strings changes by run.
    if not variables.get("PYTHONHASHSEED", "").isdigit():
        variables["PYTHONHASHSEED"] = "0"
    return variables


def _read_fits(folder: Path, words: list[str]) -> list[Ledger]:
    fits = [read_ledger(path) for path in (*list_fits(folder), *list_evaluations(folder))]
    if not fits:
        raise CommandError(
            f"The command {' '.join(words)!r} ended well but wrote no ledger. Let it fit a model "
            "with a Trainer, in the environment in which lightning_d9m is installed; where "
            "LIGHTNING_D9M is 0, with lightning_d9m.DeterminismCallback() in Trainer(callbacks="
            f"[...]). Log: {folder / 'output.log'}."
        )
    return fits


class _Progress:
    """One line for each run, with seconds and epochs while it goes on when a person watches."""

    def __init__(self, number: int, runs: int, folder: Path) -> None:
        self._title = f"run {number} of {runs}"
        self._folder = folder
        self._seconds = 0.0
        self._live = sys.stderr.isatty()

    def __enter__(self) -> "Self":
        self._show("started", end="" if self._live else "\n")
        return self

    def tick(self, seconds: float) -> None:
        self._seconds = seconds
        if self._live:
            self._show(f"{seconds:.0f} s, {self._epochs()} epochs", end="")

    def __exit__(self, kind: object, *_: object) -> None:
        ending = "done" if kind is None else "stopped"
        self._show(f"{ending}, {self._epochs()} epochs", end="\n")

    def _show(self, text: str, *, end: str) -> None:
        start, rest = ("\r", "\x1b[K") if self._live else ("", "")
        print(f"{start}{self._title}: {text}{rest}", end=end, file=sys.stderr, flush=True)

    def _epochs(self) -> int:
        """Count the epochs that the run's ledgers hold so far."""
        return sum(
            path.read_bytes().count(b'"moment":"epoch"')
            for path in self._folder.glob("fit-*/rank-0.jsonl")
        )


def _conclude(runs: list[list[Ledger]], output: Path, *, print_json: bool) -> int:
    """Compare every run with the first, print table and verdict, return the exit status."""
    counts = {len(fits) for fits in runs}
    if len(counts) > 1:
        raise CommandError(
            f"The runs left different numbers of ledgers: {[len(fits) for fits in runs]}. Each run "
            "must fit the same models in the same order."
        )
    rows, comparisons = [], []
    for number, fits in enumerate(runs, start=1):
        for fit, ledger in enumerate(fits, start=1):
            comparison = None if number == 1 else compare_ledgers(runs[0][fit - 1], ledger)
            rows.append(_row(number, fit, ledger, comparison))
            if comparison is not None:
                comparisons.append((number, fit, comparison))
    differing = [entry for entry in comparisons if not entry[2].equal]
    if print_json:
        print(json.dumps(_as_json(rows, differing, output), indent=2))
    else:
        print(format_table(rows), end="\n\n")
        _print_verdict(rows, comparisons, differing, output)
    return 1 if differing else 0


def _row(number: int, fit: int, ledger: Ledger, comparison: Comparison | None) -> RunRow:
    outcome = ledger.outcome(min(ledger.files))
    last = outcome.final
    verdict = "equal" if comparison is None or comparison.equal else "differs"
    return RunRow(
        run=number,
        fit=fit,
        seed=ledger.header.seed,
        weights="" if last is None else last.totals.get("weights", ""),
        loss=None if last is None else last.loss,
        verdict="expected" if comparison is None else verdict,
    )


def _print_verdict(
    rows: list[RunRow],
    comparisons: list[tuple[int, int, Comparison]],
    differing: list[tuple[int, int, Comparison]],
    output: Path,
) -> None:
    runs = rows[-1].run
    if not differing:
        records = sum(rank.records for rank in comparisons[0][2].ranks)
        print(f"equal: {runs} runs agree bit for bit in {records:,} records each.")
        print(f"weights: {rows[-1].weights}")
    else:
        number, fit, comparison = differing[0]
        many = {run for run, _, _ in differing}
        print("\n".join(format_comparison(comparison)))
        which = f"run {number}" + (f", fit {fit}" if rows[-1].fit > 1 else "")
        print(f"\ndifferent: {len(many)} of {runs} runs differ from run 1; above: {which}.")
    print(f"ledgers: {output}")


def _as_json(
    rows: list[RunRow], differing: list[tuple[int, int, Comparison]], output: Path
) -> dict[str, object]:
    return {
        "verdict": "different" if differing else "equal",
        "output": str(output),
        "runs": [row.as_json() for row in rows],
        "differing": [
            {"run": run, "fit": fit, "comparison": as_json(comparison)}
            for run, fit, comparison in differing
        ],
    }
