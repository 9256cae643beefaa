"""Ranks and processes of a Gloo group, each of which is a thread of the test."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch import distributed

RANKS = 3


class Threads:
    """Exchanges of ranks that are threads."""

    def __init__(self):
        self.rows = [b""] * RANKS
        self.calls = 0
        self.barrier = threading.Barrier(RANKS, timeout=30)

    def exchange_of(self, rank):
        def exchange(data):
            assert len(data) % 8 == 0
            self.rows[rank] = data
            self.barrier.wait()
            rows = [*self.rows]
            assert len({*map(len, rows)}) == 1  # otherwise a collective hangs
            self.calls += rank == 0
            self.barrier.wait()
            return rows

        return exchange


def run_processes(processes, function, *, closes=False):
    """Call ``function(process, group)`` in one thread for each process; return the results.

    Args:
        processes: Their number.
        function: What each does.
        closes: Whether it closes the group.
    """
    if processes == 1:
        return [function(0, None)]
    gloo = distributed.ProcessGroupGloo
    store = distributed.HashStore()

    def run(process):
        options = gloo._Options()
        options._devices = [gloo.create_default_device()]
        options._timeout = timedelta(seconds=120)
        group = gloo(store, process, processes, options)
        result = function(process, group)
        if not closes:
            group.barrier().wait()
        return result

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(run, range(processes)))
