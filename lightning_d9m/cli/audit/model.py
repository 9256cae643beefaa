"""``d9m audit model -- COMMAND``: repeat a training with and without determinism."""

import argparse
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
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
from lightning_d9m.errors import CommandError
from lightning_d9m.launch.fit_pairs import pair_fits
from lightning_d9m.launch.output_folder import make_output
from lightning_d9m.launch.progress import RunProgress
from lightning_d9m.launch.subprocess_run import ProcessStart, run_processes
from lightning_d9m.ledger.folder import Ledger, list_fits, read_ledger
from lightning_d9m.output.next_steps import format_next_steps
from lightning_d9m.output.terminal import print_lines

# Set for the command; `control.environment`, `ledger_location` and `weight_snapshots` read them.
CONTROL, LEDGERS = "LIGHTNING_D9M_CONTROL", "LIGHTNING_D9M_LEDGER_DIR"
WEIGHTS = "LIGHTNING_D9M_KEEP_WEIGHTS"
_FEWEST_RUNS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m audit model``."""
    parser.usage = (
        "d9m audit model [-n RUNS] [-o DIR] [--timeout SECONDS] [--json]\n"
        "                       -- COMMAND ..."
    )
    parser.add_argument(
        "-n",
        "--runs",
        type=whole_number(_FEWEST_RUNS, MOST_RUNS),
        default=5,
        help="number of runs in each condition (default: 5)",
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
    """Train in both conditions; return 1 if the runs with determinism differ."""
    command = get_command(arguments, "audit model")
    output = make_output(arguments.output, "d9m-audit", "model-")
    trainings: dict[str, list[Training]] = {condition: [] for condition in CONDITIONS}
    for number in range(1, arguments.runs + 1):
        for condition in CONDITIONS:  # alternate, so that machine load affects both alike
            folder = output / f"{condition}-{number:03d}"
            folder.mkdir()
            # The first training of all names the fits.
            named = trainings[condition] or trainings[CONDITIONS[0]]
            known = named[0].ledgers if named else None
            before = trainings[condition][-1].seconds if trainings[condition] else None
            title = f"run {number} of {arguments.runs}, {condition} determinism"
            with RunProgress(title, folder, before) as progress:
                training = _train(
                    command, condition, folder, arguments.timeout, progress.tick, known
                )
            trainings[condition].append(training)
            training.measure(trainings[condition][0])
            if number > 1:  # they are large, and have been compared with the first run's
                shutil.rmtree(folder / "weights", ignore_errors=True)
    result = render_json(trainings)
    for condition in CONDITIONS:
        shutil.rmtree(output / f"{condition}-001" / "weights", ignore_errors=True)
    (output / "model.json").write_text(json.dumps(result, indent=1) + "\n")
    for fit in result["fits"]:
        (output / f"{fit['fit']}.svg").write_text(render_plot(fit))
    (output / "model.md").write_text(render_markdown(result, command))
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print_lines(render_text(result).splitlines())
        print(f"audit: {output / 'model.md'}, model.json, *.svg")
        if not result["equal"]:
            step = (
                f"d9m locate -- {shlex.join(command)}",
                "finds the step, module and source line",
            )
            print("\n".join(format_next_steps([step])))
    return 0 if result["equal"] else 1


def _train(
    command: list[str],
    condition: str,
    folder: Path,
    timeout: float | None,
    tick: Callable[[float], None],
    known: Mapping[str, Ledger] | None = None,
) -> Training:
    """Train once; fits get the names of their counterparts among the known ones."""
    begin = time.perf_counter()
    start = ProcessStart(_environment(condition, folder), folder / "output.log")
    run_processes(command, [start], timeout=timeout, tick=tick)
    seconds = time.perf_counter() - begin
    fits = {path.name: read_ledger(path) for path in list_fits(folder)}
    if not fits:
        raise CommandError(
            f"The command {' '.join(command)!r} succeeded but wrote no ledger. Let it fit a model "
            "with a Trainer, in the environment in which lightning_d9m is installed; if "
            "LIGHTNING_D9M is 0, with lightning_d9m.DeterminismCallback() in Trainer(callbacks="
            f"[...]). Log: {folder / 'output.log'}."
        )
    return Training(folder, seconds, fits if known is None else pair_fits(known, fits))


def _environment(condition: str, folder: Path) -> dict[str, str]:
    variables = {
        **os.environ,
        CONTROL: "off" if condition == "without" else "on",
        LEDGERS: str(folder),
        WEIGHTS: str(folder / "weights"),
    }
    # Audit programs that do not mention the package too; respect an explicit LIGHTNING_D9M=0.
    variables.setdefault("LIGHTNING_D9M", "1")
    # In both conditions: the order of sets is not a rounding effect. Python reads it at startup.
    if not variables.get("PYTHONHASHSEED", "").isdigit():
        variables["PYTHONHASHSEED"] = "0"
    return variables
