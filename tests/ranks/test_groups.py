"""The bytes of all processes of a group arrive whole; one that closes lets nothing wait."""

import subprocess

import pytest
import torch
from gloo_threads import run_processes

from lightning_d9m.ranks.groups import close_connections, gather_bytes
from lightning_d9m.ranks.ranks import _FIRST_BYTES


def test_bytes_are_gathered_in_inference_mode():
    def gather(process, group):
        with torch.inference_mode():
            return gather_bytes(bytes([process]), group)

    assert run_processes(2, gather) == [[b"\0", b"\1"]] * 2


def test_bytes_of_any_length_arrive():
    for length in (0, 1, _FIRST_BYTES - 8, _FIRST_BYTES - 7, 10**5):
        parts = [b"a" * length, b"b" * (length // 2)]
        assert run_processes(2, lambda p, group, s=parts: gather_bytes(s[p], group)) == [parts] * 2


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


# Runs what the interpreter runs at its end, and says whether a group is left then.
PROGRAM = """
import atexit
import sys
import torch.distributed as dist
from lightning_d9m.ranks.groups import close_group_at_exit

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "asked":
    close_group_at_exit()
    close_group_at_exit()
atexit._run_exitfuncs()
print(dist.is_initialized())
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("asked", "left"), [("asked", "False"), ("not asked", "True")])
def test_the_group_is_closed_before_the_interpreter_ends(forking_python, asked, left):
    ended = subprocess.run(
        [forking_python, "-c", PROGRAM, asked],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, left), ended.stderr
