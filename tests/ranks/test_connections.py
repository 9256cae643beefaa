"""A process that closes its connections lets nothing wait, in no process."""

import pytest
import torch
from gloo_threads import run_processes

from lightning_d9m.ranks.groups import close_connections


def start_all(group):
    """Start operations of each kind with another process, which starts none."""
    peer, ones = 1 - group.rank(), torch.ones(100_000)
    yield lambda: group.recv([torch.empty(10)], peer, 1)
    yield lambda: group.send([ones], peer, 2)
    yield lambda: group.allgather([[torch.empty(100_000) for _ in range(2)]], [ones])
    yield lambda: group.allreduce([torch.ones(100_000)])


FAILS = {"match": r"pair closure|by peer|Broken pipe"}


@pytest.mark.parametrize("place", range(4))
def test_an_operation_that_waits_fails_in_the_process_and_in_its_peer(place):
    def run(process, group):
        start = list(start_all(group))[place]
        if process == 1:
            work = start() if place < 2 else None
            close_connections(group)
        with pytest.raises(RuntimeError, **FAILS):
            (start() if process == 0 or work is None else work).wait()

    run_processes(2, run, closes=True)


def test_what_was_sent_before_arrives():
    def run(process, group):
        value = torch.full((1000,), float(process))
        group.allreduce([value]).wait()
        if process == 1:
            close_connections(group)
        return value.unique().tolist()

    assert run_processes(2, run, closes=True) == [[1.0], [1.0]]
