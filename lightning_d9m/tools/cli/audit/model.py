"""``d9m audit model -- COMMAND``: repeat a training with and without determinism."""

import argparse
import json
import shlex

from lightning_d9m.tools.audit.training import CONDITIONS, render_markdown, render_text, summarize
from lightning_d9m.tools.cli.arguments import COMMAND, MOST_RUNS, get_command, whole_number
from lightning_d9m.tools.launch.run import Run, Runs, make_output
from lightning_d9m.tools.output.columns import print_result
from lightning_d9m.tools.output.terminal import format_next_steps

# Set for the command; `control.environment` reads it.
CONTROL = "LIGHTNING_D9M_CONTROL"
_FEWEST_RUNS = 2
ARGUMENTS = f"""
-n, --runs RUNS  number of runs in each condition (default: 5)
-o, --output DIR  new folder for the report, ledgers and logs (default: next free
    d9m-audit/model-NNN)
{COMMAND.replace("a training", "a training with a Trainer")}"""
EXAMPLE = "d9m audit model -n 3 -- python train.py"
SETTINGS = {"runs": {"type": whole_number(_FEWEST_RUNS, MOST_RUNS), "default": 5}}


def run(arguments: argparse.Namespace) -> int:
    """Train in both conditions; return 1 if the runs with determinism differ."""
    command = get_command(arguments)
    output = make_output(arguments.output, "d9m-audit", "model-")
    made = {
        name: Runs(command, output, arguments.timeout, evaluations=False) for name in CONDITIONS
    }
    trainings: dict[str, list[Run]] = {condition: [] for condition in CONDITIONS}
    for number in range(1, arguments.runs + 1):
        # They alternate, so that machine load affects both alike.
        for first, condition in zip((1, 0), CONDITIONS, strict=True):
            training = made[condition].run(
                f"{condition}-{number:03d}",
                f"run {number} of {arguments.runs}, {condition} determinism",
                later=2 * (arguments.runs - number) + first,
                variables={CONTROL: "off" if condition == "without" else "on"},
            )
            trainings[condition].append(training)
            # The first training of all names the fits.
            made["with"].fits = made["without"].fits
    result = summarize(trainings)
    (output / "model.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / "model.md").write_text(render_markdown(result, command))
    step = (f"d9m locate -- {shlex.join(command)}", "finds the step, module and source line")
    lines = [*render_text(result).splitlines(), f"audit: {output / 'model.md'}, model.json"]
    lines += [] if result["equal"] else format_next_steps([step])
    print_result(arguments.format, result, lines)
    return 0 if result["equal"] else 1
