"""Runs that a signal ends, and runs of several processes, end at the bits of a straight run."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from forking_python import shared_python
from ledger_runs import find_breaks
from rank_processes import run_ranks, start_ranks

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.tools.comparison.ledgers import compare_ledgers

SCRIPT = Path(__file__).parents[2] / "support" / "resume_training.py"


def agree(folder, ranks, place=(1, 3)):
    """Hold the resumed run against the straight one."""
    straight, resumed = (read_ledger(folder / name / "fit-000") for name in ("straight", "resumed"))
    comparison = compare_ledgers(straight, resumed)
    assert comparison.equal, comparison
    assert [rank.rank for rank in comparison.ranks] == list(range(ranks))
    for file in resumed.files.values():
        (found,), problem = find_breaks(file)
        assert (found.epoch, found.batch, problem) == (*place, "")


@pytest.mark.parametrize(
    ("ending", "status"),
    [("killed", -signal.SIGKILL), ("terminated", 0)],
    ids=["kill", "term"],
)
def test_a_signal_ends_a_run(tmp_path, ending, status):
    statuses, outputs = start_ranks(SCRIPT, 1, tmp_path, "auto", "straight", ending)
    assert statuses == [status], outputs
    run_ranks(SCRIPT, 1, tmp_path, "auto", "resumed+workers")
    agree(tmp_path, 1)


def test_two_processes_of_ddp(tmp_path):
    """They are killed, and others go on, which load with workers."""
    statuses, outputs = start_ranks(SCRIPT, 2, tmp_path, "ddp", "straight", "killed")
    assert -signal.SIGKILL in statuses, outputs
    assert 0 not in statuses, outputs
    run_ranks(SCRIPT, 2, tmp_path, "ddp", "resumed+workers")
    agree(tmp_path, 2)
    checkpoint = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    for rank in checkpoint["callbacks"]["lightning_d9m"]["ranks"]:
        torch.save(rank, tmp_path / "rank.pt")
        # With the gradients, for it was saved between two micro-batches.
        assert (tmp_path / "rank.pt").stat().st_size < 100 * 1024


def test_each_process_of_ddp_has_its_own_buffers_until_the_next_batch(tmp_path):
    """Lightning saves those of rank 0. The validation, and the record of the epoch, come first."""
    statuses, outputs = start_ranks(SCRIPT, 2, tmp_path, "ddp", "straight", "late")
    assert -signal.SIGKILL in statuses, outputs
    run_ranks(SCRIPT, 2, tmp_path, "ddp", "resumed")
    agree(tmp_path, 2, (0, 6))


@pytest.mark.horovod
def test_two_processes_of_horovod(tmp_path):
    python = shared_python()
    command = [python, "-m", "horovod.runner.launch", "-np", "2", "--gloo"]
    command += [python, str(SCRIPT), str(tmp_path), "horovod_d9m"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    for whats in (["straight", "killed"], ["resumed+workers"]):
        done = subprocess.run([*command, *whats], env=variables, check=False, timeout=240)
        assert (done.returncode == 0) == ("killed" not in whats)
    agree(tmp_path, 2)
