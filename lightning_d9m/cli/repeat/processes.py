"""``d9m repeat --processes``: run a command on several numbers of processes and compare the runs.

With logical ranks (see docs/logical-ranks.md) all runs have the same bits.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_d9m.launch.processes import count_threads
from lightning_d9m.text import pluralize

RANKS_VARIABLE = "LIGHTNING_D9M_LOGICAL_RANKS"
_THREADS = "OMP_NUM_THREADS"
# A word of the command that stands for the number of processes.
_PLACEHOLDER = "{processes}"
_FEWEST_COUNTS = 2
_MOST_PROCESSES = 1024


def process_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of processes, separated by commas; an argparse ``type``.

    >>> process_counts("1,2,4")
    (1, 2, 4)
    """
    counts = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not all(1 <= count <= _MOST_PROCESSES for count in counts):
        problem = f"allowed: whole numbers from 1 to {_MOST_PROCESSES}, separated by commas."
    elif len(set(counts)) < len(counts):
        problem = "a number occurs twice. Give each number once."
    elif len(counts) < _FEWEST_COUNTS:
        problem = "one run cannot be compared. Give at least two numbers, such as 1,2,4."
    else:
        return tuple(counts)
    raise argparse.ArgumentTypeError(f"{text} is not valid; {problem}")


@dataclass(frozen=True)
class PlannedRun:
    """A run that ``d9m repeat`` makes.

    Attributes:
        command: The command.
        title: Name of the run, for the progress line and errors.
        processes: The number of processes; None if the command decides.
        started: How many processes to start as ranks; None starts one, without variables for ranks.
        variables: Further environment variables.
    """

    command: list[str]
    title: str
    processes: int | None = None
    started: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def plan_runs(argv: list[str], counts: Sequence[int]) -> list[PlannedRun]:
    """Return one run for each number of processes.

    Args:
        argv: The command. If a word contains ``{processes}``, the command is started once with the
            number in its place, and starts the processes itself; otherwise it is started so many
            times, as torchrun does.
        counts: The numbers of processes.
    """
    starts_itself = any(_PLACEHOLDER in word for word in argv)
    # Sums depend on the number of threads, so all runs have the same.
    variables = {_THREADS: os.environ.get(_THREADS) or str(count_threads(max(counts)))}
    return [
        PlannedRun(
            [word.replace(_PLACEHOLDER, str(count)) for word in argv],
            f"run {number} of {len(counts)}, on {pluralize(count, 'process', 'processes')}",
            processes=count,
            started=None if starts_itself else count,
            variables=variables,
        )
        for number, count in enumerate(counts, start=1)
    ]
