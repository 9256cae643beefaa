"""One rank of trainings with DDP on Gloo; rank 1 hangs in the last one. See ranks/test_ddp.py."""

import json
import os
import signal
import sys
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout
from trainings import QUIET, make_loader, make_model

from lightning_d9m import D9mError, DeterminismCallback

RANK = int(os.environ["RANK"])


def fit(folder, model=None):
    """Train with a ledger."""
    callback = DeterminismCallback(seed=5, ledger_dir=folder)
    trainer = L.Trainer(max_epochs=1, strategy="ddp", devices=2, callbacks=[callback], **QUIET)
    trainer.fit(model or make_model(), make_loader(), make_loader(shuffle=False))


def error_of(*arguments):
    """Return the facts of the error that a training raises."""
    try:
        fit(*arguments)
    except D9mError as error:
        return {"message": str(error), **vars(error)}
    raise AssertionError("no error was raised")


def change_moment(self):
    """Change Adam's first moment by one unit in the last place, after the last step."""
    if not self.trainer.sanity_checking:
        moment = self.optimizers().state[self.layers[0].weight]["exp_avg"]
        moment.view(torch.int32)[2, 3] += 1


def switch_off(_):
    """Switch deterministic algorithms off."""
    torch.use_deterministic_algorithms(False)


def hang(_, *__):
    """Lose rank 1, for which rank 0 need not wait for long."""
    if RANK == 1:
        threading.Event().wait()
    _set_pg_timeout(timedelta(seconds=2))


def main():
    """Train several times, with a fault on rank 1, and write what was found."""
    folder = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    found = {}
    for change, hook in {
        change_moment: "on_validation_epoch_end",
        switch_off: "on_train_batch_end",
    }.items():
        model = make_model(**{hook: lambda self, *_, act=change: RANK and act(self)})
        found[change.__name__] = error_of(folder / change.__name__, model)
    (folder / "file").write_text("")
    found["no folder"] = error_of(folder / "file" / "below")
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))
    (folder / f"pid-{RANK}").write_text(str(os.getpid()))
    try:
        fit(folder / "hung", make_model(on_train_batch_start=hang))
    except RuntimeError as error:
        (folder / "error-0").write_text(str(error))
        os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)


if __name__ == "__main__":
    main()
