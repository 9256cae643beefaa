"""``d9m audit model -- COMMAND``: the same training with and without the recipe, several times."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from lightning_d9m.audit.training.report import (
    render_json,
    render_markdown,
    render_plot,
    render_text,
)
from lightning_d9m.audit.training.runs import CONDITIONS, Training
from lightning_d9m.cli.arguments import (
    MOST_RUNS,
    add_command_arguments,
    get_command,
    whole_number,
)
from lightning_d9m.errors import CommandError, LedgerError
from lightning_d9m.launch.subprocess_run import run_watched
from lightning_d9m.ledger.folder import list_fits, read_ledger

# Set for the command; `control.variables`, `testimony` and `kept_weights` read them.
CONTROL, LEDGERS = "LIGHTNING_D9M_CONTROL", "LIGHTNING_D9M_LEDGER_DIR"
WEIGHTS = "LIGHTNING_D9M_KEEP_WEIGHTS"
_FEWEST_RUNS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of ``d9m audit model``."""
    parser.usage = "d9m audit model [-n RUNS] [-o DIR] [--timeout SECONDS] [--json] -- COMMAND ..."
    parser.add_argument(
        "-n",
        "--runs",
        type=whole_number(_FEWEST_RUNS, MOST_RUNS),
        default=5,
        help="how many runs without and with (default: 5)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="new folder for the report, ledgers and logs (default: next free d9m-audit/model-NNN)",
    )
    add_command_arguments(parser, "a training with a Trainer")


def run(arguments: argparse.Namespace) -> int:
    """Train in both arms by turns; return 1 when the runs with the recipe differ."""
    words = get_command(arguments, "audit model")
    output = _make_output(arguments.output)
    trainings: dict[str, list[Training]] = {arm: [] for arm in CONDITIONS}
    for number in range(1, arguments.runs + 1):
        for arm in CONDITIONS:  # by turns, so that both see the machine in the same moods
            folder = output / f"{arm}-{number:03d}"
            folder.mkdir()
            print(f"run {number} of {arguments.runs}, {arm} the recipe", file=sys.stderr)
            training = _train(words, arm, folder, arguments.timeout)
            trainings[arm].append(training)
            training.measure(trainings[arm][0])
            if number > 1:  # they have been held against the first run's, and are large
                shutil.rmtree(folder / "weights", ignore_errors=True)
    result = render_json(trainings)
    for arm in CONDITIONS:
        shutil.rmtree(output / f"{arm}-001" / "weights", ignore_errors=True)
    (output / "model.json").write_text(json.dumps(result, indent=1) + "\n")
    for fit in result["fits"]:
        (output / f"{fit['fit']}.svg").write_text(render_plot(fit))
    (output / "model.md").write_text(render_markdown(result, words))
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print(render_text(result))
        print(f"audit: {output / 'model.md'}, model.json, *.svg")
    return 0 if all(fit["with"]["equal"] for fit in result["fits"]) else 1


def _train(words: list[str], arm: str, folder: Path, timeout: float | None) -> Training:
    begin = time.perf_counter()
    run_watched(
        words,
        environment=_environment(arm, folder),
        log=folder / "output.log",
        timeout=timeout,
        tick=lambda _: None,
    )
    seconds = time.perf_counter() - begin
    fits = {path.name: read_ledger(path) for path in list_fits(folder)}
    if not fits:
        raise CommandError(
            f"The command {' '.join(words)!r} ended well but wrote no ledger. Let it fit a model "
            "with a Trainer, in the environment in which lightning_d9m is installed; where "
            "LIGHTNING_D9M is 0, with lightning_d9m.DeterminismCallback() in Trainer(callbacks="
            f"[...]). Log: {folder / 'output.log'}."
        )
    return Training(folder, seconds, fits)


def _environment(arm: str, folder: Path) -> dict[str, str]:
    variables = {
        **os.environ,
        CONTROL: "off" if arm == "without" else "on",
        LEDGERS: str(folder),
        WEIGHTS: str(folder / "weights"),
    }
    # A program that does not mention us is audited all the same; LIGHTNING_D9M=0 is the user's no.
    variables.setdefault("LIGHTNING_D9M", "1")
    # In both arms: the order of sets is no rounding. Python reads it when it starts.
    if not variables.get("PYTHONHASHSEED", "").isdigit():
        variables["PYTHONHASHSEED"] = "0"
    return variables


def _make_output(chosen: Path | None) -> Path:
    """Make a new folder; never one that exists."""
    numbered = (Path("d9m-audit") / f"model-{number:03d}" for number in range(1000))
    candidates: Iterable[Path] = numbered if chosen is None else [chosen]
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
        f"The folder {chosen or 'd9m-audit'} exists already, and nothing is overwritten. Give a "
        "new one with --output, or remove it."
    )
