"""One rank of trainings under strategies and precisions; see lightning/test_strategies.py.

``python strategy_training.py FOLDER CELL...`` runs each cell: the same training twice, with probes,
the second one with patched operations; resumed from a checkpoint of the first one, with a fault on
one rank; and those of ``d9m locate``. Of the cells in ``LAUNCHED`` this is the process that starts
two ranks for each training, of those of Fabric for all.
"""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import strategies
import strategy_cells as cells
from lightning.fabric import Fabric
from located_runs import locate
from strategies import SHORTEST, WORLD, Fault, describe

from lightning_d9m import deterministic
from lightning_d9m.engine.control import session

COPIED = "layers.3.bias"  # each rank of tensor parallelism has it
LAST_STEP = 4
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


class Runs:
    """The runs of a cell, and what was found by each rank whose process this is or starts."""

    def __init__(self, folder, cell, launched=None):
        self.folder, self.cell = folder, cell
        self.fit = partial(strategies.fit, folder, cell)
        self.rank, self.world = strategies.RANK, WORLD
        self.found = [{} for _ in range(2 if cell in cells.LAUNCHED else 1)]
        if cell.startswith(cells.FABRIC):
            self.fit = partial(strategies.fit_with_fabric, folder, cell, launched=launched)
        if launched is not None:
            self.rank, self.world = launched.global_rank, launched.world_size
        self.last = max(self.world, len(self.found)) - 1

    def train(self, name, **words):
        """Train as a run of its own would."""
        session.restart_fits()
        return self.fit(name, **words)

    def attempt(self, name, **words):
        """Train; keep for each rank the facts of the error that was raised; None without one."""
        outcomes = [None] * len(self.found)
        try:
            self.train(name, **words)
        except Exception as error:  # noqa: BLE001 - the tests read what it says
            outcomes = [describe(error)] * len(self.found)
            for rank in range(len(self.found) if self.cell in cells.LAUNCHED else 0):
                file = self.folder / name / f"error-{rank}"
                outcomes[rank] = json.loads(file.read_text()) if file.exists() else outcomes[rank]
        for found, outcome in zip(self.found, outcomes, strict=True):
            found[name] = outcome

    def locate(self, name, fault):
        """Locate a fault that one rank has in each second run, or in all."""

        def train(number):
            present = {"fault": fault} if name != "located" or number % 2 == 0 else {}
            self.train(name, limits=SHORTEST, **present)

        output = self.folder / f"{name} runs"
        # A line of it is suspect, so that the first look has probes of steps.
        program = strategies.__file__
        self.found[0][name] = locate(
            train, output, rank=self.rank, ranks=self.world, program=program
        )

    def run(self):
        """Run all, and write what was found."""
        cell, folder, attempt = self.cell, self.folder, self.attempt
        probed = {"probes": "all", **({"replay_every": 2} if cell in cells.REPEATED else {})}
        last = [LAST_STEP] if cell in cells.SHARDED else []
        first = self.train("first", saves=[1, *last], **probed)
        compared = {"reference": folder / "first" / "fit-000", **probed}
        if cell in cells.LAUNCHED:
            variables = [name for name in VARIABLES if name in os.environ]
            self.found[0]["left"] = [str(first.ledger), first.digest, variables]
            with deterministic(seed=5, repeat_fits=False):  # each fit seeds its model
                attempt("second", **compared, patched=True, seed=None)
                self.fit("next", seed=None)
        else:
            # The second step ends an epoch of four ranks.
            full = {"saves": [WORLD // 2, *last], "full": True} if cell in cells.FULL else {}
            attempt("second", **compared, patched=True, **full)
        resumed = {"resume_from": folder / "checkpoints" / "step=1.ckpt", **compared}
        if cell in cells.HYBRIDS:
            attempt("refused", **resumed)
            resumed = compared
        # The check of the resume would end it in the step of the fault, before the reference.
        attempt("fault", fault=Fault(self.last), on_inexact_resume="warn", **resumed)
        if cell in cells.FULL:
            path = folder / "full checkpoints" / f"step={WORLD // 2}.ckpt"
            attempt("resumed from full", resume_from=path, full=True, **compared)
        self.run_faults(Fault(self.last, epoch=0))
        for rank, found in enumerate(self.found, self.rank):
            (folder / f"found-{rank}.json").write_text(json.dumps(found))

    def run_faults(self, fault):
        """Run what is neither compared nor resumed."""
        cell, attempt = self.cell, self.attempt
        short = {"limits": SHORTEST}
        if cell in cells.COPIES:
            attempt("fault without reference", fault=fault, **short)
        if cell in cells.TENSOR_PARALLEL:
            attempt("fault of a copy", fault=fault._replace(name=COPIED), **short)
        if cell in cells.REFUSED:
            attempt("replayed", replay_every=2, **short)
        if cell in cells.REFERRED:
            # The second rank cannot read it.
            reference = self.folder / ("first/fit-000", "missing")[self.rank]
            attempt("other reference", reference=reference)
        if cell == cells.DDP:
            race = fault._replace(races=True)
            attempt("plain")
            attempt("race", fault=race, replay_every=1, probes="loss", probe_ranks=1)
        if cell in cells.LOCATED:
            self.locate("located", fault._replace(batch=0))
        if cell in cells.RACING:
            self.locate("located op", fault._replace(races=True))
        if cell in cells.DRIFTING:
            self.locate("located drift", fault._replace(batch=0, name=COPIED))


def run_launched(fabric, folder, cell):
    """Run a cell in a process that Fabric has started."""
    warnings.filterwarnings("ignore")
    Runs(folder, cell, fabric).run()


def main():
    """Run cells, one after the other."""
    warnings.filterwarnings("ignore")
    folders = Path(sys.argv[1]).absolute()
    (folders / "empty").mkdir(exist_ok=True)
    os.chdir(folders / "empty")  # `d9m locate` looks for files that runs leave there
    for cell in sys.argv[2:]:
        folder = folders / cell
        folder.mkdir(exist_ok=True)
        strategy = cell.removeprefix(cells.FABRIC)
        if strategy != cell and strategy in cells.LAUNCHED:
            fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
            fabric.launch(run_launched, folder, cell)
        else:
            Runs(folder, cell).run()


if __name__ == "__main__":
    main()
