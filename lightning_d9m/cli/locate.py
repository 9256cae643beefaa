"""``d9m locate``: run a command several times and narrow down where its runs diverge.

It narrows from the whole run to the steps of the epoch that differs, the modules of the step and
the operations of the module. Each look is a pair of runs that environment variables control, so
the program is not edited. A divergence that does not occur again in a narrower look is reported as
far as it was narrowed down.
"""

import argparse
import json
import os

from lightning_d9m.cli.arguments import COMMAND, get_command
from lightning_d9m.history.bundle import LOCATE_JSON
from lightning_d9m.launch.run import Runs, make_output
from lightning_d9m.locate.search import Runner, Search, find_cause_lines
from lightning_d9m.output.columns import print_result
from lightning_d9m.output.locate_text import describe
from lightning_d9m.output.terminal import print_lines, wrap

_MOST_SUSPECTS = 5
ARGUMENTS = f"""
--no-determinism  seed and record, but leave the determinism settings alone: shows what differs
    without lightning_d9m
--tries N  most pairs of runs for each look (default: 2)
-o, --output DIR  new folder for ledgers, logs and dumps
-v, --verbose  show more values that differ, and their bits
{COMMAND}"""
SETTINGS = {"tries": {"default": 2}}


def run(arguments: argparse.Namespace) -> int:
    """Locate; return 0 if no runs differ, 1 if something was found."""
    command = get_command(arguments, "locate")
    variables = {"LIGHTNING_D9M_CONTROL": "off"} if arguments.no_determinism else {}
    if arguments.no_determinism and "PYTHONHASHSEED" not in os.environ:
        variables["PYTHONHASHSEED"] = "random"  # Python's default; run_once sets 0 otherwise
    output = make_output(arguments.output)
    runner = Runner(Runs(command, output, arguments.timeout), variables)
    suspects = find_cause_lines(command, "")
    if suspects and arguments.format == "text":
        # What the source shows already, before the first of many trainings ends.
        for one in suspects[:_MOST_SUSPECTS]:
            print_lines(wrap(f"suspect: {one.location}: {one.code} ({one.reason})", "  "))
        print("The first look tests whether they matter:\n", flush=True)
    found = Search(runner, arguments.tries, suspects=bool(suspects)).locate()
    determinism = not arguments.no_determinism
    lines = list(describe(found, determinism=determinism, verbose=arguments.verbose))
    # For `d9m bundle`.
    facts = found.as_json() | {"report": lines}
    if found.pair is not None:
        ledgers = (found.pair.comparison.expected, found.pair.comparison.actual)
        facts["ledgers"] = [os.path.relpath(ledger, output) for ledger in ledgers]
    (output / LOCATE_JSON).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    shown = found.as_json() | {"output": str(output)}
    print_result(arguments.format, shown, [*lines, f"ledgers:  {output}"])
    return 1 if found.cause is not None else 0
