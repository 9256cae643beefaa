"""``d9m locate`` whose runs are trainings of this process, and of the ranks beside it."""

import io
import itertools
import json
import os
import sys
from contextlib import redirect_stdout, suppress
from unittest import mock

from torch.distributed import FileStore

from lightning_d9m.engine.ledger.folder import LEDGER_VARIABLE
from lightning_d9m.errors import CommandError
from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.launch import runs as launched
from lightning_d9m.tools.locate.search import Search


def locate(train, output, *, rank=0, ranks=1, program=__file__):
    """Locate what differs between trainings, which all ranks run together.

    Args:
        train: Trains once; it gets the number of the run, from 1. Variables say where its ledger
            goes and what is probed, as those of a process.
        output: The new folder of all runs.
        rank: This rank; rank 0 runs the command.
        ranks: The number of ranks.
        program: The source that the command scans.

    Returns:
        What the command prints as JSON; None on the other ranks.
    """
    # Not through the ranks' process group: an error may close its connections.
    store, steps = FileStore(f"{output} requested", ranks), itertools.count()

    def request(what):
        step = next(steps)
        store.set(str(step), json.dumps(what))
        return step

    def run(number, variables):
        with mock.patch.dict(os.environ, variables):
            try:
                train(number)
            except Exception as error:
                raise CommandError(str(error)) from error

    def run_here(_, folder, *, variables, **__):
        own = {LEDGER_VARIABLE: str(folder), **variables}
        what = (int(folder.name.rpartition("-")[2]), own)
        step = request(what)
        try:
            run(*what)
        finally:  # the command compares when all processes have ended, and their files are whole
            for other in range(1, ranks):
                store.get(f"{step} {other}")

    if rank == 0:
        words = ["locate", "--json", "--one-by-one", "--tries", "1", "-o"]
        words += [str(output), "--", sys.executable]
        printed = io.StringIO()
        try:
            with (
                mock.patch.object(launched, "run_once", run_here),
                # A segment ends its process, which is this one.
                mock.patch.object(Search, "_choose_segment", return_value=None),
                redirect_stdout(printed),
            ):
                assert main([*words, program]) < 2
        finally:
            request(None)
        return json.loads(printed.getvalue())
    for step in steps:
        if (what := json.loads(store.get(str(step)))) is None:
            return None
        with suppress(CommandError):  # rank 0 has it too
            run(*what)
        store.set(f"{step} {rank}", "")
    return None
