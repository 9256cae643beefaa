"""One rank of a training with DDP on Gloo; see lightning/test_ddp.py."""

import contextlib
import json
import os
import pickle
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed.distributed_c10d as collectives
from trainings import QUIET, make_loader, make_model

from lightning_d9m import D9mError, DeterminismCallback
from lightning_d9m.control import session

RANK = int(os.environ["RANK"])


def fit(folder, name, model=None, **words):
    """Train as a run of its own would."""
    session._fits = 0
    callback = DeterminismCallback(seed=5, ledger_dir=folder / name, **words)
    trainer = L.Trainer(max_epochs=2, strategy="ddp", devices=2, callbacks=[callback], **QUIET)
    trainer.fit(model or make_model(), make_loader(), make_loader(shuffle=False))
    return trainer


@contextlib.contextmanager
def unpickling_watched():
    """Yield a list that gets the file of whoever unpickles what a rank has sent.

    Functions of torch and of Lightning's strategies do it on behalf of their caller.
    """
    callers = []

    class Watched(pickle.Unpickler):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            frame = sys._getframe(1)
            while "/torch/" in (name := frame.f_code.co_filename) or "/strategies/" in name:
                frame = frame.f_back
            callers.append(name)

    original, collectives._unpickler = collectives._unpickler, Watched
    try:
        yield callers
    finally:
        collectives._unpickler = original


def error_of(*arguments, **words):
    """Return the facts of the error that a training raises."""
    try:
        fit(*arguments, **words)
    except D9mError as error:
        return {"message": str(error), **vars(error)}
    raise AssertionError("no error was raised")


def other_moment_on_rank_1(self):
    """Change Adam's first moment of rank 1 by one unit in the last place, after the last step."""
    if RANK == 1 and not self.trainer.sanity_checking:
        moment = self.optimizers().state[self.layers[0].weight]["exp_avg"]
        moment.view(torch.int32)[2, 3] += 1


def other_rate_on_rank_1(self):
    """Change the learning rate of rank 1 when an epoch ends."""
    if RANK == 1 and not self.trainer.sanity_checking:
        self.optimizers().param_groups[0]["lr"] = 0.02


def other_statistics_on_rank_1(self):
    """Change a buffer of rank 1 when an epoch ends: the next batch brings rank 0's again."""
    if RANK == 1:
        self.layers[1].running_mean += 0.5


def switched_off_on_rank_1(self):
    """Switch deterministic algorithms off on rank 1 only."""
    if RANK == 1:
        torch.use_deterministic_algorithms(False)


def main():
    """Train several times, and write what was found."""
    folder = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    before = dict(os.environ)
    fit(folder, "first")
    changed = {
        name for name in before.keys() | os.environ if before.get(name) != os.environ.get(name)
    }
    found = {
        "left": sorted(changed - {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"})
        + [name for name in ("deterministic",) if torch.are_deterministic_algorithms_enabled()],
    }
    with unpickling_watched() as callers:
        fit(folder, "second").save_checkpoint(folder / "second.ckpt")
    found["unpickles"] = callers
    moment = make_model(on_validation_epoch_end=other_moment_on_rank_1)
    found["other moment on rank 1"] = error_of(folder, "moment", moment)
    rate = make_model(on_validation_epoch_end=other_rate_on_rank_1)
    found["other rate on rank 1"] = error_of(folder, "rate", rate)
    other = make_model(on_validation_epoch_end=other_statistics_on_rank_1)
    found["other statistics on rank 1"] = error_of(
        folder, "data", other, reference=folder / "first" / "fit-000"
    )
    off = make_model(on_train_batch_end=lambda self, *_: switched_off_on_rank_1(self))
    found["switched off on rank 1"] = error_of(folder, "off", off)
    (folder / "file").write_text("")
    found["no folder"] = error_of(folder, "file/below")
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
