"""Processes on one host sum in shared memory; all find out together if one of them cannot."""

import errno
import gc
import mmap
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import current_thread
from typing import NamedTuple

import pytest
import torch
from logical_sums import average_leaves, bits, complete, make_leaf
from rank_threads import run_processes

from lightning_d9m.integrations.strategies.sums import exchange, shared_memory
from lightning_d9m.integrations.strategies.sums.exchange import RootExchange
from lightning_d9m.integrations.strategies.sums.shared_memory import SharedMemory
from lightning_d9m.integrations.strategies.sums.tree import Blocks

FULL = OSError(errno.ENOSPC, "No space left on device")


def sum_ones(process, group, processes):
    """Return the kinds of the exchange of a small and a large sum, which must be right."""
    it = RootExchange(Blocks(processes, processes), process, group)
    kinds = []
    for length in (10, 300_000):
        root = torch.ones(length)
        pending = it.start([root], root)
        complete(pending)
        assert root.unique().tolist() == [processes]
        kinds.append(type(pending).__name__)
    it.close()
    return kinds


def find_files():
    """Return the numbers of the files of our memory that are open in this process."""
    gc.collect()
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the list itself
            if "lightning_d9m" in str(path.readlink()):
                found.add(path.stat().st_ino)
    return found


def refuse(monkeypatch, owner, name, process, error):
    """Let a function fail in one process, which is a thread."""
    real = getattr(owner, name)

    def call(*args, **words):
        if getattr(current_thread(), "process", None) == process:
            raise error
        return real(*args, **words)

    monkeypatch.setattr(owner, name, call)


class Refusal(NamedTuple):
    owner: object
    name: str
    process: int
    error: Exception = FULL


PLACES = {
    "no memory": Refusal(shared_memory.os, "posix_fallocate", process=0),
    "no such memory": Refusal(
        shared_memory.os, "memfd_create", process=0, error=AttributeError("memfd_create")
    ),
    "no socket": Refusal(shared_memory.socket, "socket", process=1),
    "another host": Refusal(
        shared_memory._Opening, "connect", process=2, error=ConnectionRefusedError()
    ),
    "no mapping": Refusal(shared_memory.mmap, "mmap", process=1),
    "no mapping in process 0": Refusal(shared_memory.mmap, "mmap", process=0),
    "no file sent": Refusal(shared_memory.socket, "send_fds", process=0),
}


@pytest.mark.parametrize("place", PLACES)
def test_one_process_without_memory_lets_all_send_messages(monkeypatch, place):
    before = find_files()
    refuse(monkeypatch, *PLACES[place])

    def run(process, group):
        current_thread().process = process
        return sum_ones(process, group, 3)

    assert run_processes(3, run) == [["MessageSum", "MessageSum"]] * 3
    assert find_files() <= before


def test_strangers_get_nothing(monkeypatch):
    real, strangers = shared_memory._Opening.connect, []

    def connect(self, addresses):
        for word in (b"", b"x" * 32, addresses[0][:16] + b"\xff" * 16):
            stranger = socket.socket(socket.AF_UNIX)  # not the list's last: two threads append
            strangers.append(stranger)
            stranger.connect(b"\0" + addresses[0][16:])
            stranger.sendall(word)
        return real(self, addresses)

    monkeypatch.setattr(shared_memory._Opening, "connect", connect)
    # So many fit in the queue of the socket.
    real_listen = socket.socket.listen
    monkeypatch.setattr(socket.socket, "listen", lambda self, _count: real_listen(self, 20))
    before = find_files()
    found = run_processes(2, lambda process, group: sum_ones(process, group, 2))
    assert found == [["SharedSum", "SharedSum"]] * 2
    assert find_files() <= before
    for stranger in strangers:
        with stranger:
            try:
                assert stranger.recv(1) == b""
            except ConnectionResetError:  # what it sent was not read
                continue


@pytest.mark.parametrize("shares_memory", [False, True])
def test_sums_of_any_sizes_are_started_before_others_end(monkeypatch, shares_memory):
    monkeypatch.setattr(exchange, "MESSAGE_BYTES", 2**12)
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 2**12)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9000, (40,), generator=generator).tolist()
    sums = [[make_leaf([n], torch.float32, generator) for _ in range(5)] for n in lengths]
    blocks = Blocks(5, 3)

    def run(process, group):
        it = RootExchange(blocks, process, group)
        if not shares_memory:
            it.opens_memory = False
        waits, results = [], []
        for leaves in sums:
            roots = [leaves[rank].clone() for rank in blocks.of(process)]  # no two have a sum
            results.append(roots[-1])
            waits.append(it.start(roots, roots[-1], 5))
        for wait in waits:
            complete(wait)
        it.close()
        return results

    for results in run_processes(3, run):
        for result, leaves in zip(results, sums, strict=True):
            assert bits(result) == bits(average_leaves(leaves))


def test_a_process_that_closes_lets_no_other_wait_and_all_may_begin_again():
    def run(process, group):
        it = RootExchange(Blocks(3, 3), process, group)
        roots = [torch.ones(1000) for _ in range(2)]
        complete(it.start(roots[:1], roots[0]))
        if process != 1:
            pending = it.start(roots[1:], roots[1], 1)
            with pytest.raises(RuntimeError, match="by peer"):
                complete(pending)
        it.close()
        root = torch.ones(1000)
        complete(it.start([root], root))
        it.close()
        return root.unique().tolist()

    assert run_processes(3, run) == [[3.0]] * 3


def test_a_process_that_does_not_come_is_an_error():
    ours, theirs = socket.socketpair()
    memory = SharedMemory(mmap.mmap(-1, 6 * 4096), [ours], timedelta(milliseconds=5))
    with theirs, pytest.raises(RuntimeError, match="timed out"):
        memory.meet()
