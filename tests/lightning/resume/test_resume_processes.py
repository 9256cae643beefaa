"""Runs that a signal ends, and runs of several processes, end at the bits of a straight run."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from forking_python import HOROVOD, shared_python
from ledger_runs import find_breaks

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger

SCRIPT = Path(__file__).parents[2] / "support" / "resume_training.py"


def run(commands):
    """Run commands side by side; return their statuses and outputs."""
    processes = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, environment in commands
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(outputs)


def environment(**extra):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **extra}


def agree(folder, ranks):
    """Hold the resumed run against the straight one."""
    straight, resumed = (read_ledger(folder / name / "fit-000") for name in ("straight", "resumed"))
    comparison = compare_ledgers(straight, resumed)
    assert comparison.equal, comparison
    assert [rank.rank for rank in comparison.ranks] == list(range(ranks))
    for file in resumed.files.values():
        (found,) = find_breaks(file)
        assert (found.epoch, found.batch, found.problem) == (1, 3, None)


@pytest.mark.parametrize(
    ("ending", "status"),
    [("killed", -signal.SIGKILL), ("terminated", 0), ("asked", 1)],
    ids=["kill", "term", "int"],
)
def test_a_signal_ends_a_run(tmp_path, ending, status):
    command = [shared_python(), str(SCRIPT), str(tmp_path), "auto"]
    statuses, output = run([([*command, "straight", ending], environment())])
    assert statuses == [status], output
    statuses, output = run([([*command, "resumed+workers"], environment())])
    assert statuses == [0], output
    agree(tmp_path, 1)


def run_ddp(tmp_path, *whats):
    """Train on two ranks, which meet at a port of their own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    shared |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "d9m"}
    command = [shared_python(), str(SCRIPT), str(tmp_path), "ddp", *whats]
    return run([(command, environment(**shared, RANK=rank, LOCAL_RANK=rank)) for rank in "01"])


def test_two_processes_of_ddp(tmp_path):
    """They are killed, and others go on, which load with workers."""
    statuses, output = run_ddp(tmp_path, "straight", "killed")
    assert -signal.SIGKILL in statuses, output
    assert 0 not in statuses, output
    statuses, output = run_ddp(tmp_path, "resumed+workers")
    assert statuses == [0, 0], output
    agree(tmp_path, 2)
    checkpoint = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    for rank in checkpoint["callbacks"]["lightning_d9m"]["ranks"]:
        torch.save(rank, tmp_path / "rank.pt")
        # With the gradients, for it was saved between two micro-batches.
        assert (tmp_path / "rank.pt").stat().st_size < 100 * 1024


@pytest.mark.horovod
def test_two_processes_of_horovod(tmp_path):
    python = shared_python(*HOROVOD)
    command = [python, "-m", "horovod.runner.launch", "-np", "2", "--gloo"]
    command += [python, str(SCRIPT), str(tmp_path), "horovod_d9m"]
    for whats in (["straight", "killed"], ["resumed+workers"]):
        (status,), output = run([([*command, *whats], environment())])
        assert (status == 0) == ("killed" not in whats), output
    agree(tmp_path, 2)
