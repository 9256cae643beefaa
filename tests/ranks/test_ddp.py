"""Two processes with DDP on Gloo: ranks are compared, and all of them raise together."""

import json
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from rank_processes import RANK, call_on_ranks
from torch.distributed.distributed_c10d import _set_pg_timeout
from trainings import fit, make_loader, make_model

from lightning_d9m import read_ledger
from lightning_d9m.errors import D9mError


def switch_off():
    torch.use_deterministic_algorithms(False)


def hang(_, *__):
    """Lose rank 1, for which rank 0 need not wait for long."""
    if RANK == 1:
        threading.Event().wait()
    _set_pg_timeout(timedelta(seconds=2))


def train(folder, **overrides):
    loaders = make_loader(), make_loader(shuffle=False)
    fit(make_model(**overrides), *loaders, folder=folder, strategy="ddp", devices=2)


def find_error(folder, **overrides):
    try:
        train(folder, **overrides)
    except D9mError as error:
        return {"message": str(error), **vars(error)}
    raise AssertionError("no error was raised")


def train_all(folder):
    """Train with a fault on rank 1, which hangs in the last training; write what was found."""
    folder, found = Path(folder), {}
    found["switch_off"] = find_error(
        folder / "switch_off", on_train_batch_end=lambda *_: RANK and switch_off()
    )
    (folder / "file").write_text("")
    found["no folder"] = find_error(folder / "file" / "below")
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))
    (folder / f"pid-{RANK}").write_text(str(os.getpid()))
    try:
        train(folder / "hung", on_train_batch_start=hang)
    except RuntimeError as error:
        (folder / "error-0").write_text(str(error))
        os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train in two processes once for all tests; rank 0 kills rank 1 at the end."""
    folder = tmp_path_factory.mktemp("ddp")
    statuses, outputs = call_on_ranks(train_all, 2, folder, fails=True)
    assert statuses == [0, -signal.SIGKILL], outputs
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


def test_a_folder_that_cannot_be_made_stops_all(found):
    for error in (entry["no folder"] for entry in found):
        assert "No ledger can be made" in error["message"]


def test_a_switch_that_one_rank_lost_stops_all(found):
    first, second = (entry["switch_off"]["message"] for entry in found)
    assert "Rank 1 failed, so this rank 0 stops too" in first
    assert "deterministic" in second


def test_a_rank_that_hangs_is_named_by_the_survivor_and_in_its_ledger(folder):
    """Whatever the load: rank 0 never gets an answer, and reads the state of the process."""
    process = (folder / "pid-1").read_text()
    sentence = f"Rank 1 (process {process}) runs, but did not respond within 3 s: it hangs."
    assert sentence in (folder / "error-0").read_text().splitlines()[-1]
    (run,) = (folder / "hung").iterdir()
    assert sentence in read_ledger(run).outcome(0).end.error
