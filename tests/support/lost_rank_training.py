"""One rank of a DDP training in which rank 1 is lost; see lightning/test_lost_ranks.py.

Usage: lost_rank_training.py FOLDER, which ends in the way in which rank 1 is lost: "killed",
with logical ranks, or "hung". Rank 0 writes the message of its error and kills rank 1.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import lightning as L
from torch.distributed.distributed_c10d import _set_pg_timeout
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DDPDeterministicStrategy, DeterminismCallback, RankLostError

RANK = int(os.environ["RANK"])
folder = Path(sys.argv[1])
hangs = folder.name == "hung"


def lose_rank_1(self, *_):
    """Lose rank 1 in its second epoch, in which rank 0 need not wait for long."""
    if self.current_epoch != 1:
        return
    if RANK == 1:
        threading.Event().wait() if hangs else os.kill(os.getpid(), signal.SIGKILL)
    _set_pg_timeout(timedelta(seconds=2))


if __name__ == "__main__":
    callback = DeterminismCallback(seed=5, ledger_dir=folder / "d9m")
    strategy = "ddp" if hangs else DDPDeterministicStrategy(logical_ranks=4)
    trainer = L.Trainer(max_epochs=2, strategy=strategy, devices=2, callbacks=[callback], **QUIET)
    model = make_model(on_train_batch_start=lose_rank_1)
    (folder / f"pid-{RANK}").write_text(str(os.getpid()))
    try:
        trainer.fit(model, make_loader())
    except RuntimeError as error:
        lost = f"lost {error.lost}: " if isinstance(error, RankLostError) else ""
        (folder / f"error-{RANK}").write_text(f"{lost}{error}")
        with suppress(ProcessLookupError):
            os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
