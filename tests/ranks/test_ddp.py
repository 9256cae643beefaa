"""Two processes with DDP on Gloo: a rank that hangs is named by the other one."""

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

from rank_processes import RANK, call_on_ranks
from torch.distributed.distributed_c10d import _set_pg_timeout
from trainings import fit, make_loader, make_model

from lightning_d9m import read_ledger


def hang(_, *__):
    """Lose rank 1, for which rank 0 need not wait for long."""
    if RANK == 1:
        threading.Event().wait()
    _set_pg_timeout(timedelta(seconds=2))


def train(folder):
    """Train until rank 1 hangs; rank 0 writes its error, and kills it."""
    (Path(folder) / f"pid-{RANK}").write_text(str(os.getpid()))
    model = make_model(on_train_batch_start=hang)
    try:
        fit(model, make_loader(), folder=Path(folder, "hung"), strategy="ddp", devices=2)
    except RuntimeError as error:
        (Path(folder) / "error-0").write_text(str(error))
        os.kill(int((Path(folder) / "pid-1").read_text()), signal.SIGKILL)


def test_a_rank_that_hangs_is_named_by_the_survivor_and_in_its_ledger(tmp_path):
    """Whatever the load: rank 0 never gets an answer, and reads the state of the process."""
    statuses, outputs = call_on_ranks(train, 2, tmp_path, fails=True)
    assert statuses == [0, -signal.SIGKILL], outputs
    process = (tmp_path / "pid-1").read_text()
    sentence = f"Rank 1 (process {process}) runs, but did not respond within 3 s: it hangs."
    assert sentence in (tmp_path / "error-0").read_text().splitlines()[-1]
    (run,) = (tmp_path / "hung").iterdir()
    assert sentence in read_ledger(run).outcome(0).end.error
