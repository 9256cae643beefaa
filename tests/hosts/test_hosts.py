"""Trainings on several hosts, which are network namespaces of this machine."""

import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from network_hosts import explain_missing, make_hosts, wait_for
from forking_python import TRAINING, shared_python
from rank_processes import run_ranks

from lightning_d9m import compare

SCRIPT = Path(__file__).parents[1] / "support" / "hosts_training.py"
AGENT = (*TRAINING, "torch.distributed.run")
MISSING = explain_missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def start_training(hosts, *arguments, backend="static"):
    """Start an agent of torchrun on each host, with one worker."""
    first = hosts[0].name
    place = [f"--master-addr={first}", "--master-port=29511"]
    if backend == "c10d":
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:29511", "--rdzv-id=run"]
    agent = [shared_python(*AGENT), "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
    agent += ["--nproc-per-node=1", *place]
    numbers = [[f"--node-rank={number}"] * (backend == "static") for number in range(len(hosts))]
    return [
        host.start([*agent, *number, SCRIPT, *arguments])
        for host, number in zip(hosts, numbers, strict=True)
    ]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return the ledger of the training on one process."""
    folder = tmp_path_factory.mktemp("one")
    run_ranks(SCRIPT, 1, folder)
    return folder / "1" / "fit-000"


def test_hosts_end_with_the_bits_of_one_process(tmp_path, one_process):
    """Without a shared file system each host has the file of its rank; they can be collected."""
    with make_hosts(3, tmp_path) as hosts:
        statuses, outputs = wait_for(start_training(hosts, "runs", backend="c10d"))
    assert statuses == [0] * 3, "\n".join(outputs)
    for host in hosts:
        ledger = host.folder / "runs" / "3" / "fit-000"
        assert len(list(ledger.iterdir())) == 1
        shutil.copytree(ledger, tmp_path / "collected", dirs_exist_ok=True)
    assert len(list((tmp_path / "collected").iterdir())) == 3
    assert compare(one_process, tmp_path / "collected").equal


def test_every_rank_ends_with_an_error_when_a_link_is_cut(tmp_path):
    seconds = 10
    with make_hosts(2, tmp_path) as hosts:
        agents = start_training(hosts, "runs", seconds)
        while not all((host.folder / "waiting").exists() for host in hosts):
            assert all(agent.poll() is None for agent in agents)
            time.sleep(0.05)
        hosts[1].set_link("down")
        for host in hosts:
            (host.folder / "go").touch()
        statuses, outputs = wait_for(agents)
    assert 0 not in statuses
    for rank, output in enumerate(outputs):
        assert "ended by " in output
        assert re.search(rf"Rank {1 - rank} \(process \d+\) did not respond within", output)
