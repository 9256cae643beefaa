"""Trainings on several hosts, which are network namespaces of this machine."""

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from forking_python import shared_python
from network_hosts import explain_missing, make_hosts, start_rank, start_sshd, wait_for, wait_until
from rank_processes import read_records

from lightning_d9m import compare
from lightning_d9m.engine.ledger.format.records import Digests

SCRIPT = Path(__file__).parents[1] / "support" / "hosts_training.py"
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
MISSING = explain_missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def training(*words):
    return [shared_python(), SCRIPT, "runs", *words]


def start_agents(hosts, nodes, *words, first):
    """Start an agent of torchrun on each host, with one worker; the first host has the store."""
    agent = ["-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"]
    agent += ["--max-restarts=3", "--monitor-interval=0.1", "--no-python", "--rdzv-backend=c10d"]
    agent += [f"--rdzv-endpoint={first.name}:29511", "--rdzv-id=run"]
    timeouts = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
    agents = []
    for host in hosts:
        own = [f"--local-addr={host.address}"]
        own += [f"--rdzv-conf=is_host={str(host is first).lower()},{timeouts}"]
        command = [shared_python(), *agent, *own, *training(*words)]
        agents.append(host.start(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
    return agents


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    subprocess.run(training(), cwd=folder, check=True)
    return folder / "runs" / "1" / "fit-000"


def wait_at_epoch(hosts, processes):
    """Wait until both ranks wait between two epochs."""
    wait_until(lambda: all((host.folder / "waiting2").exists() for host in hosts), processes)


def find_last(host, processes):
    """Return the ledger of the last training of a host on so many processes."""
    return max((host.folder / "runs" / str(processes)).iterdir())


def read_final(ledger):
    """Return the digests at the end of each rank's file."""
    finals = [records[-1] for records in read_records(ledger, Digests).values()]
    assert {record.moment for record in finals} == {"final"}
    return finals


def test_a_host_is_lost_and_another_is_added(tmp_path, one_process):
    """Torchrun restarts the workers; each time they continue from the checkpoint."""
    words = ("wait=1", f"kept={tmp_path / 'kept'}")
    with make_hosts(3, tmp_path) as hosts:
        first, lost, added = hosts
        agents = start_agents([first, lost], "1:2", *words, first=first)
        wait_at_epoch((first, lost), agents)  # the first may have begun alone
        lost.send_signal(signal.SIGKILL)
        (first.folder / "waiting1").unlink(missing_ok=True)
        (first.folder / "go2").touch()
        wait_until((first.folder / "waiting1").exists, agents[:1])
        assert not (added.folder / "runs").exists()
        (added.folder / "go2").touch()
        agents += start_agents([added], "1:2", *words, first=first)
        statuses, outputs = wait_for(agents)
        assert [statuses[0], statuses[2]] == [0, 0], "\n".join(outputs)
        assert re.search(r"Rank 1 \(process \d+\) did not respond", outputs[0])
        for host in (first, added):
            assert read_final(find_last(host, 2)) == read_final(one_process)


@pytest.mark.horovod
@pytest.mark.skipif(not HAS_HOROVOD, reason="needs Horovod, which `d9m install-horovod` builds")
@pytest.mark.skipif(shutil.which("sshd") is None, reason="needs sshd")
def test_horovodrun_trains_on_two_hosts(tmp_path, one_process):
    """Logical ranks give the bits of one process; fixed buckets those of two on one host."""
    python = shared_python()
    run = [python, "-m", "horovod.runner.launch", "-np", "2", "--gloo"]
    with make_hosts(2, tmp_path) as hosts:
        start_sshd(hosts)
        places = ["-H", ",".join(f"{host.name}:1" for host in hosts)]
        trainings = [
            hosts[0].start([*run, *where, python, SCRIPT, *words])
            for where, words in [
                (places, ["logical", "logical=4"]),
                (places, ["fixed"]),
                (["-H", f"{hosts[0].name}:2"], ["alone"]),
            ]
        ]
        statuses, outputs = wait_for(trainings)
        assert statuses == [0] * 3, "\n".join(outputs)
        for name in ("logical", "fixed"):
            for host in hosts:
                ledger = host.folder / name / "1" / "fit-000"
                assert len(list(ledger.iterdir())) == 1
                shutil.copytree(ledger, tmp_path / name, dirs_exist_ok=True)
    assert compare(one_process, tmp_path / "logical").equal
    assert read_final(tmp_path / "fixed") == read_final(hosts[0].folder / "alone" / "1" / "fit-000")


def test_slurm_requeues_a_job(tmp_path, one_process):
    """The signal of ``#SBATCH --signal=SIGUSR1@90`` saves; the next run of the job continues."""
    with make_hosts(2, tmp_path) as hosts:
        scontrol = tmp_path / "bin" / "scontrol"
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
        scontrol.chmod(0o755)
        common = {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "train",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_NNODES": "2",
            "SLURM_NODELIST": ",".join(host.name for host in hosts),
            "SLURM_LOCALID": "0",
        }

        def srun(*words):
            command = training(f"kept={tmp_path / 'kept'}", *words)
            return [
                host.start(command, SLURM_PROCID=str(rank), SLURM_NODEID=str(rank), **common)
                for rank, host in enumerate(hosts)
            ]

        tasks = srun("wait=1")
        wait_at_epoch(hosts, tasks)
        for task in tasks:
            task.send_signal(signal.SIGUSR1)
        wait_until((tmp_path / "requeued").exists, tasks)
        for host in hosts:
            host.send_signal(signal.SIGKILL)
        wait_for(tasks)
        statuses, outputs = wait_for(srun())
        assert statuses == [0, 0], "\n".join(outputs)
        assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
        for host in hosts:
            # The variable that names the folder is not set by srun.
            assert read_final(find_last(host, 1)) == read_final(one_process)


FAKE_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
typedef int get(clockid_t, struct timespec *);
int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = ((get *)dlsym(RTLD_NEXT, "clock_gettime"))(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += 600;
  return status;
}
time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
"""


def test_lost_packets_and_a_wrong_clock_change_nothing(tmp_path, one_process):
    """One host loses two packets in a hundred; the clock of another is ten minutes ahead.

    Without a shared file system each host has the file of its rank; they can be collected. Rank 0
    saves a checkpoint, in a folder that the others do not share, so all refuse to go on.
    """
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(FAKE_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    with make_hosts(3, tmp_path) as hosts:
        hosts[0].lose_packets(0.02)
        command = training("kept=kept")
        ranks = [start_rank(hosts, rank, command) for rank in (0, 2)]
        new = [sys.executable, *command[1:]]
        ranks.append(start_rank(hosts, 1, new, LD_PRELOAD=str(library)))
        statuses, outputs = wait_for(ranks)
        assert statuses == [0, 0, 0], "\n".join(outputs)
        assert hosts[0].count_lost()
        for host in hosts:
            ledger = host.folder / "runs" / "3" / "fit-000"
            assert len(list(ledger.iterdir())) == 1
            shutil.copytree(ledger, tmp_path / "all", dirs_exist_ok=True)
        statuses, outputs = wait_for([start_rank(hosts, rank, command) for rank in range(3)])
    assert compare(one_process, tmp_path / "all").equal
    assert statuses == [1, 1, 1]
    for output in outputs:
        assert "CheckpointError Ranks would resume from different states: rank 0 loads" in output
        assert "and rank 1 found no checkpoint" in output


LIMIT = 5


def cut(hosts):
    hosts[-1].set_link("down")


def pause(hosts):
    """Stop all processes of the last host, and continue them when the others have ended."""
    hosts[-1].send_signal(signal.SIGSTOP)


def fill(hosts):
    with suppress(OSError), (hosts[-1].folder / "rest").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def mend(hosts):
    hosts[-1].set_link("up")
    hosts[-1].send_signal(signal.SIGCONT)
    (hosts[-1].folder / "rest").unlink(missing_ok=True)


FAULTS = {
    cut: (r"Rank 1 \(process \d+\) did not", r"Rank 0 \(process \d+\) did not"),
    pause: (r"Rank 1 \(process \d+\) did not", r"Rank 0 "),
    fill: (r"Rank 1 failed", r"No space left on device"),
}


def test_every_rank_ends_with_an_error_and_a_resume_is_exact(tmp_path, one_process):
    """Fault after fault, each within the same epoch, from the checkpoint before it."""
    program = training(f"limit={LIMIT}", f"kept={tmp_path / 'kept'}")
    with make_hosts(2, tmp_path, small_disk=2**20) as hosts:
        for fault, messages in FAULTS.items():
            ranks = [start_rank(hosts, rank, [*program, "wait=1"]) for rank in range(2)]
            wait_at_epoch(hosts, ranks)
            for host in hosts:
                (host.folder / "waiting2").unlink()
                (host.folder / "go2").touch()
                if host is hosts[0]:
                    fault(hosts)
            began = time.monotonic()
            ended = wait_for(ranks[:1])
            if fault is pause:
                mend(hosts)
            ended = [*zip(*ended, strict=True), *zip(*wait_for(ranks[1:]), strict=True)]
            assert time.monotonic() - began < LIMIT + 60
            for message, (status, output) in zip(messages, ended, strict=True):
                assert status == 1
                assert re.search(message, output), output
            mend(hosts)
            for host in hosts:
                for records in read_records(find_last(host, 2), Digests).values():
                    moments = [record.moment for record in records]
                    assert moments[:2] == ["initial", "epoch"]
                (host.folder / "go2").unlink()
        statuses, outputs = wait_for([start_rank(hosts, rank, program) for rank in range(2)])
        assert statuses == [0, 0], "\n".join(outputs)
        for host in hosts:
            assert read_final(find_last(host, 2)) == read_final(one_process)
