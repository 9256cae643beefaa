"""One rank of trainings whose exchanges overlap the backward pass; see test_overlap.py.

Usage: logical_overlap.py FOLDER
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
        hook: The name of a hook that raises an error instead.
    """

    def __init__(self, raises_at=None, hook=None):
        self.raises_at = raises_at
        self.names = []
        if hook is not None:
            setattr(self, hook, self.fail)

    def on_fit_start(self, trainer, module):
        module.net[0].weight.register_hook(self.note_last_gradient)

    def fail(self, *_):
        raise ValueError("this hook fails")

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


def find_error(folder, **words):
    """Return the error of a training."""
    try:
        train(folder, "failed", **words)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def main():
    """Train in each way."""
    folder = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    found = {"overlapped": train(folder, "overlapped")}
    with mock.patch.object(LogicalGradients, "backward", nullcontext):
        found["one after the other"] = train(folder, "one after the other")
    found["error"] = find_error(folder, raises_at=RANKS // PROCESSES + 1)
    found["after an error"] = train(folder, "after an error")
    last = RANK == PROCESSES - 1
    found["errors"] = [
        find_error(folder, **(words if last else {}))
        for words in ({"raises_at": RANKS // PROCESSES + 1}, {"hook": "on_validation_end"})
    ]
    found["after errors of one rank"] = train(folder, "after errors of one rank")
    Path(folder, f"{PROCESSES}-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
