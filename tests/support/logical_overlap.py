"""One rank of trainings whose exchanges overlap the backward pass; see test_overlap.py.

Usage: logical_overlap.py FOLDER HOW, "steps" to write what happens, or "lost" to fail on rank 1.
"""

import json
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import lightning as L
from logical_trainings import PROCESSES, fit

from lightning_d9m.logical_ranks.exchange import RootExchange
from lightning_d9m.logical_ranks.gradients import LogicalGradients

RANK = int(os.environ.get("RANK", "0"))
RANKS = 2  # logical ones


class Events(L.Callback):
    """Notes when exchanges start and when the last gradient of each backward pass arrives.

    Args:
        raises_at: The number of the backward pass that raises an error.
    """

    def __init__(self, raises_at=None):
        self.raises_at = raises_at
        self.names = []

    def on_fit_start(self, trainer, module):
        module.net[0].weight.register_hook(self.note_last_gradient)

    def note_last_gradient(self, _):
        self.names.append("last gradient")
        if self.names.count("last gradient") == self.raises_at:
            raise ValueError("this backward pass fails")

    def note_exchange(self, start, *args, **words):
        self.names.append("exchange")
        return start(*args, **words)


def train(folder, name, **words):
    """Train, and return the events of the first two steps and the digest of the weights."""
    events, start = Events(**words), RootExchange.start
    with mock.patch.object(
        RootExchange, "start", lambda *args, **words: events.note_exchange(start, *args, **words)
    ):
        fit(folder / name, "deep", RANKS, callbacks=[events], max_epochs=1)
    return events.names


def main():
    """Train in each way."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    warnings.filterwarnings("ignore")
    if how == "lost":
        train(folder, "lost", raises_at=2 if RANK == 1 else None)
    found = {"overlapped": train(folder, "overlapped")}
    with mock.patch.object(LogicalGradients, "backward", nullcontext):
        found["one after the other"] = train(folder, "one after the other")
    try:
        train(folder, "failed", raises_at=RANKS // PROCESSES + 1)
    except ValueError:
        found["after an error"] = train(folder, "after an error")
    Path(folder, f"{PROCESSES}-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
