"""Bytes of a group arrive whole; a process that closes lets nothing wait; lost ranks are named."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rank_threads import run_processes
from torch import distributed

from lightning_d9m.engine.ranks.groups import (
    RankLiveness,
    close_connections,
    identify_process,
    lost_ranks_named,
    ranks_of_group,
)
from lightning_d9m.engine.ranks.ranks import _FIRST_BYTES
from lightning_d9m.errors import RankLostError

HOST, OWN_PROCESS = identify_process()
OTHER_HOST = HOST ^ 1
GLOO_ERROR = "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize("length", [0, 1, _FIRST_BYTES - 8, _FIRST_BYTES - 7, 10**5])
def test_bytes_of_any_length_arrive_also_in_inference_mode(length):
    parts = [b"a" * length, b"b" * (length // 2)]

    def gather(process, group):
        with torch.inference_mode():
            return ranks_of_group(group).gather_bytes(parts[process])

    assert run_processes(2, gather) == [parts] * 2


def start_all(group):
    """Start operations of each kind with another process, which starts none."""
    peer, ones = 1 - group.rank(), torch.ones(100_000)
    yield lambda: group.recv([torch.empty(10)], peer, 1)
    yield lambda: group.send([ones], peer, 2)
    yield lambda: group.allgather([[torch.empty(100_000) for _ in range(2)]], [ones])
    yield lambda: group.alltoall_base(torch.empty(100_000), ones, [], [])


@pytest.mark.parametrize("place", range(4))
def test_an_operation_that_waits_fails_in_the_process_and_in_its_peer(place):
    """What was sent before has arrived."""

    def run(process, group):
        value = torch.full((1000,), float(process))
        group.allreduce([value]).wait()
        start = list(start_all(group))[place]
        if process == 1:
            work = start() if place < 2 else None
            close_connections(group)
        with pytest.raises(RuntimeError, match=r"pair closure|by peer|Broken pipe"):
            (start() if process == 0 or work is None else work).wait()
        return value.unique().tolist()

    assert run_processes(2, run, closes=True) == [[1.0], [1.0]]


# Runs what the interpreter runs at its end, and says whether a group is left then.
PROGRAM = """
import atexit
import sys
import torch.distributed as dist
from lightning_d9m.engine.ranks.groups import close_group_at_exit

for closes in (False, True):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if closes:
        close_group_at_exit()
        close_group_at_exit()
    atexit._run_exitfuncs()
    print(dist.is_initialized())
    if dist.is_initialized():
        dist.destroy_process_group()
"""


def test_the_group_is_closed_before_the_interpreter_ends(forking_python):
    command = [forking_python, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout.split()) == (0, ["True", "False"]), ended.stderr


@pytest.fixture
def process():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield sleeper
    sleeper.kill()
    sleeper.wait()


def make_ranks(*processes, store=None, limit_seconds=0.3):
    shared = distributed.HashStore() if store is None else store
    return [
        RankLiveness(shared, rank, processes, limit_seconds=limit_seconds)
        for rank in range(len(processes))
    ]


def test_a_rank_that_raised_is_named_with_its_error_and_no_rank_that_responds():
    survivor, failed, other = make_ranks(*[(HOST, OWN_PROCESS)] * 3, limit_seconds=10)
    failed.add_lost_ranks(ValueError("the third batch is bad\nwith details"))
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(RankLiveness.find_lost, (survivor, other)))
    assert found == [{1: "Rank 1 ended with ValueError: the third batch is bad."}] * 2
    error = RuntimeError(GLOO_ERROR)
    survivor.add_lost_ranks(error)
    assert str(error) == f"{GLOO_ERROR}\nRank 1 ended with ValueError: the third batch is bad."


def test_a_killed_rank_is_named_at_once(process):
    """The limit does not pass: the state of the process is enough."""
    survivor, _ = make_ranks((HOST, OWN_PROCESS), (HOST, process.pid), limit_seconds=60)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has read its status
    expected = {1: f"Rank 1 (process {process.pid}) was killed or exited."}
    assert survivor.find_lost() == expected
    process.wait()
    assert survivor.find_lost() == expected


def test_a_hung_and_a_stopped_rank_are_named(process):
    survivor, _ = make_ranks((HOST, OWN_PROCESS), (HOST, process.pid))
    expected = f"Rank 1 (process {process.pid}) runs, but did not respond within 0.3 s: it hangs."
    assert survivor.find_lost() == {1: expected}
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert survivor.find_lost() == {1: f"Rank 1 (process {process.pid}) is stopped."}


def test_a_silent_rank_of_another_host_is_named():
    survivor, _ = make_ranks((HOST, OWN_PROCESS), (OTHER_HOST, 5))
    (sentence,) = survivor.find_lost().values()
    assert sentence.endswith("did not respond within 0.3 s: it was killed, or it hangs.")


@pytest.mark.parametrize("call", [lambda *_: threading.Event().wait(), RuntimeError("Broken pipe")])
def test_without_the_store_rank_0_and_the_processes_of_this_host_are_known(process, call):
    """Rank 0 hosts the store, which is stopped or has ended.

    Rank 1 is killed, rank 2 is on another host, rank 3 is this one.
    """
    store = SimpleNamespace(set=mock.Mock(side_effect=call))
    processes = [(OTHER_HOST, 5), (HOST, process.pid), (OTHER_HOST, 6), (HOST, OWN_PROCESS)]
    *_, survivor = make_ranks(*processes, store=store, limit_seconds=0.1)
    process.kill()
    process.wait()
    assert list(survivor.find_lost()) == [0, 1]
    survivor.report_error(ValueError("unheard"))


@pytest.mark.parametrize("error", [RuntimeError("a bad shape"), ValueError(GLOO_ERROR)])
def test_an_error_that_no_collective_raised_is_left_alone(error):
    before = str(error)
    make_ranks(identify_process(), identify_process())[0].add_lost_ranks(error)
    assert str(error) == before


def test_without_a_table_of_ranks_the_error_of_a_collective_says_where_to_look():
    words = r"Rank 0 waited for the sum, .* Another rank has ended"
    with pytest.raises(RankLostError, match=words), lost_ranks_named("the sum", 0, None):
        raise RuntimeError(GLOO_ERROR)
    with pytest.raises(RuntimeError, match=r"^out of"), lost_ranks_named("the sum", 0, None):
        raise RuntimeError("out of memory")
