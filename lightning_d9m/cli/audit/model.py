"""``d9m audit model -- COMMAND``: repeat a training with and without determinism."""

import argparse
import json
import shlex
import shutil
import time
from pathlib import Path

from lightning_d9m.audit.training import (
    CONDITIONS,
    Training,
    render_json,
    render_markdown,
    render_plot,
    render_text,
)
from lightning_d9m.cli.arguments import (
    MOST_RUNS,
    add_command_arguments,
    get_command,
    whole_number,
)
from lightning_d9m.launch.run import make_output, make_run_folder, pair_fits, read_fits, run_once
from lightning_d9m.output.terminal import format_next_steps, print_lines

# Set for the command; `control.environment` and `trainer_recorder` read them.
CONTROL, WEIGHTS = "LIGHTNING_D9M_CONTROL", "LIGHTNING_D9M_KEEP_WEIGHTS"
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
    trainings = _train(command, output, arguments.runs, arguments.timeout)
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
    command: list[str], output: Path, runs: int, timeout: float | None
) -> dict[str, list[Training]]:
    """Train in both conditions, and measure each training against the first of its condition."""
    trainings: dict[str, list[Training]] = {condition: [] for condition in CONDITIONS}
    for number in range(1, runs + 1):
        for condition in CONDITIONS:  # alternate, so that machine load affects both alike
            folder = make_run_folder(output, f"{condition}-{number:03d}")
            before = trainings[condition]
            # The first training of all names the fits.
            named = before or trainings[CONDITIONS[0]]
            began = time.perf_counter()
            run_once(
                command,
                folder,
                title=f"run {number} of {runs}, {condition} determinism",
                timeout=timeout,
                variables={
                    CONTROL: "off" if condition == "without" else "on",
                    WEIGHTS: str(folder / "weights"),
                },
                expected_seconds=before[-1].seconds if before else None,
            )
            seconds = time.perf_counter() - began
            fits = read_fits(folder, command, with_weights=True)
            before.append(
                Training(folder, seconds, pair_fits(named[0].ledgers, fits) if named else fits)
            )
            before[-1].measure(before[0])
            if number > 1:  # they are large, and have been compared with the first run's
                shutil.rmtree(folder / "weights", ignore_errors=True)
    return trainings
