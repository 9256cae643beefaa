"""One rank of a DDP training in which rank 1 is killed; see lightning/test_lost_ranks.py.

Rank 0 writes the message of its error, and both end with the status 0 or by the signal.
"""

import os
import signal
import sys
from pathlib import Path

import lightning as L
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback

RANK = int(os.environ["RANK"])


def kill_rank_1(self, *_):
    """Kill rank 1 in its second epoch."""
    if RANK == 1 and self.current_epoch == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    callback = DeterminismCallback(seed=5, ledger_dir=folder / "d9m")
    trainer = L.Trainer(max_epochs=2, strategy="ddp", devices=2, callbacks=[callback], **QUIET)
    model = make_model(on_train_batch_start=kill_rank_1)
    (folder / f"pid-{RANK}").write_text(str(os.getpid()))
    try:
        trainer.fit(model, make_loader())
    except RuntimeError as error:
        (folder / f"error-{RANK}").write_text(str(error))
