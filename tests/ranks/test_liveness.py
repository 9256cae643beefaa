"""Lost ranks: killed, stopped, hung, or ended by an error."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from torch import distributed

from lightning_d9m.ranks.liveness import RankLiveness, identify_process

HOST, OWN_PROCESS = identify_process()
OTHER_HOST = HOST ^ 1


class BlockedStore:
    """A store whose host is stopped: calls never return."""

    def set(self, key, value):
        threading.Event().wait()


class ClosedStore:
    """A store whose host has ended."""

    def set(self, key, value):
        raise RuntimeError("Broken pipe")


@pytest.fixture
def process():
    """Return a process that sleeps, and end it afterwards."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield sleeper
    sleeper.kill()
    sleeper.wait()


@pytest.fixture
def make_ranks():
    """Return a function that makes the liveness of each rank, given their processes."""

    def make(*processes, store=None, limit_seconds=0.3):
        shared = distributed.HashStore() if store is None else store
        return [
            RankLiveness(shared, rank, processes, limit_seconds=limit_seconds)
            for rank in range(len(processes))
        ]

    return make


def test_a_rank_that_raised_is_named_with_its_error(make_ranks):
    survivor, failed, other = make_ranks(*[(HOST, OWN_PROCESS)] * 3, limit_seconds=10)
    failed.report_error(ValueError("the third batch is bad\nwith details"))
    with_other = threading.Thread(target=other.find_lost)
    with_other.start()
    assert survivor.find_lost() == {1: "Rank 1 ended with ValueError: the third batch is bad."}
    with_other.join()


def test_a_killed_rank_is_named_at_once(make_ranks, process):
    """The limit does not pass: the state of the process is enough."""
    survivor, _ = make_ranks((HOST, OWN_PROCESS), (HOST, process.pid), limit_seconds=60)
    process.kill()
    process.wait()
    assert survivor.find_lost() == {1: f"Rank 1 (process {process.pid}) was killed or exited."}


def test_a_hung_and_a_stopped_rank_are_named(make_ranks, process):
    survivor, _ = make_ranks((HOST, OWN_PROCESS), (HOST, process.pid))
    expected = f"Rank 1 (process {process.pid}) runs, but did not respond within 0.3 s: it hangs."
    assert survivor.find_lost() == {1: expected}
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert survivor.find_lost() == {1: f"Rank 1 (process {process.pid}) is stopped."}


def test_a_silent_rank_of_another_host_is_named(make_ranks):
    survivor, _ = make_ranks((HOST, OWN_PROCESS), (OTHER_HOST, 5))
    (sentence,) = survivor.find_lost().values()
    assert sentence.endswith("did not respond within 0.3 s: it was killed, or it hangs.")


@pytest.mark.parametrize("store", [BlockedStore(), ClosedStore()])
def test_without_the_store_rank_0_and_the_processes_of_this_host_are_known(
    make_ranks, process, store
):
    """Rank 0 hosts the store; rank 1 is killed, rank 2 is on another host, rank 3 is this one."""
    processes = [(OTHER_HOST, 5), (HOST, process.pid), (OTHER_HOST, 6), (HOST, OWN_PROCESS)]
    *_, survivor = make_ranks(*processes, store=store, limit_seconds=0.1)
    process.kill()
    process.wait()
    assert list(survivor.find_lost()) == [0, 1]
    survivor.report_error(ValueError("unheard"))


def test_ranks_that_all_respond_are_not_lost(make_ranks):
    ranks = make_ranks(*[(HOST, OWN_PROCESS)] * 2, limit_seconds=10)
    found = []
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(rank.find_lost())) for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{}, {}]
