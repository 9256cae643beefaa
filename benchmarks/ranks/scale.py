"""Measure what many ranks cost, in a simulation of 1,024 in one process.

    python benchmarks/ranks/scale.py [--ranks N]

The simulation has the gradients of each rank, whose exchange runs as over Gloo, and compares the
sum with that of one process; the agreement and ``compare`` of ledgers run as they would on one
rank. Results go to ``benchmarks/results/scale.json``.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import torch

from lightning_d9m import compare
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.engine.recording.rank_agreement import RankAgreement, ReplicatedState
from lightning_d9m.integrations.strategies.sums.exchange import RootExchange
from lightning_d9m.integrations.strategies.sums.tree import Blocks, count_merges

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from ledger_runs import make_weights, write_rank
from measurement import RESULTS, describe_machine, keep

WEIGHTS = 16  # of each ledger
VALUES = 100_000  # of the simulated gradients


class SimulatedGroup:
    """The messages of one process; those that have not arrived are kept by their route."""

    def __init__(self, process, processes, sent):
        self._process, self._processes, self._sent = process, processes, sent

    def rank(self):
        """Return the process."""
        return self._process

    def size(self):
        """Return the number of processes."""
        return self._processes

    def send(self, tensors, peer, tag):
        """Keep a copy for the other process."""
        self._sent[self._process, peer, tag].append(tensors[0].clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors, peer, tag):
        """Return what takes the next message of the other process when it is waited for."""
        arrived = self._sent[peer, self._process, tag]
        return SimpleNamespace(wait=lambda: tensors[0].copy_(arrived.popleft()))


def sum_on(processes, leaves):
    """Return the sum of the leaves on simulated processes, and the bytes that a process sends.

    All processes send their roots before the first one folds its shard, and all fold before the
    first one collects the results, so that no process waits for another.
    """
    blocks = Blocks(len(leaves), processes)
    sent, exchanges, pending, sums = defaultdict(deque), [], [], []
    for process in range(processes):
        group = SimulatedGroup(process, processes, sent)
        exchanges.append(RootExchange(blocks, process, group))
        exchanges[-1].opens_memory = False  # as on several hosts
        block, roots = blocks.of(process), []
        stops = [rank + 1 for rank in block]
        for rank, merges in zip(block, count_merges(block.start, stops, len(leaves)), strict=True):
            value = leaves[rank].clone()
            for _ in range(merges):
                value = roots.pop() + value
            roots.append(value)
        sums.append(torch.empty(VALUES))
        pending.append(exchanges[-1].start(roots, sums[-1], len(leaves)))
    for each in pending:
        each.fold()
    for each in pending:
        each.finish()
    assert all(torch.equal(each, sums[0]) for each in sums)
    return sums[0], max(each.bytes_sent for each in exchanges)


def simulate_sums(ranks):
    """Sum the gradients of as many logical ranks on several numbers of processes."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    leaves = list(torch.randn(ranks, VALUES, generator=generator))
    alone, _ = sum_on(1, leaves)
    found = {"values": VALUES, "ring_bytes": round(2 * 4 * VALUES * (ranks - 1) / ranks)}
    for processes in (8, 64, ranks):
        total, sent = sum_on(processes, leaves)
        assert torch.equal(total, alone)
        found[f"bytes_sent_by_each_of_{processes}"] = sent
    left_to_right = torch.stack(leaves).cumsum(0)[-1] / ranks
    found["values_that_another_order_changes"] = int((left_to_right != alone).sum())
    return found


def simulate_agreement(ranks):
    """Time the comparison of all ranks on one of them, with and without a difference."""
    weights = {f"layers.{n:03}.weight": f"{n:032x}" for n in range(150)}
    changed = weights | {"layers.077.weight": "f" * 32}
    found = {"weights": len(weights)}
    digests = Digests(moment="epoch", epoch=0, step=1, totals={}, groups={})
    for name, other in (("equal", weights), ("one differs", changed)):
        states = [weights] * (ranks - 1) + [other]

        def gather(own, states=states):
            return states if isinstance(own, dict) else [own] * ranks  # digests of kept steps

        agreement = RankAgreement(gather, ReplicatedState(weights=weights))
        rows = [agreement.summarize({"weights": state}) for state in reversed(states)][::-1]
        began = time.process_time()
        difference = agreement.compare(rows, digests)
        seconds = time.process_time() - began
        ends = [] if difference is None else [(difference.rank, list(difference.names))]
        assert ends == ([] if other is weights else [(ranks - 1, ["layers.077.weight"])])
        found[name] = {
            "milliseconds_on_a_rank": round(1e3 * seconds, 1),
            "bytes_of_a_rank": sum(
                len(json.dumps(v)) for v in [rows[0], *([weights] * bool(ends))]
            ),
        }
    return found


def write_ledger(folder, ranks, epochs, *, last="0" * 32):
    """Write a ledger of many ranks; ``last`` is a digest of the last one."""
    folder.mkdir()
    for rank in range(ranks):
        records = []
        for epoch in range(epochs):
            weights = {f"layers.{n}.weight": f"{epoch * 31 + n:032x}" for n in range(WEIGHTS)}
            if rank == ranks - 1:
                weights["layers.0.weight"] = last
            records.append(make_weights("epoch", epoch, weights, step=epoch))
        write_rank(folder, records, rank=rank, world_size=ranks, created="")


def time_compare(ranks):
    """Time ``compare`` of two ledgers of many ranks."""
    found = {"epochs": 10, "weights": WEIGHTS}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_ledger(base / "a", ranks, 10)
        write_ledger(base / "b", ranks, 10)
        write_ledger(base / "c", ranks, 10, last="f" * 32)
        found["ledger_bytes"] = sum(file.stat().st_size for file in (base / "a").iterdir())
        for name, expected in (("b", True), ("c", False)):
            began = time.process_time()
            assert compare(base / "a", base / name).equal is expected
            seconds = round(time.process_time() - began, 2)
            found["seconds_equal" if expected else "seconds_different"] = seconds
    return found


def main():
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1024)
    words = parser.parse_args()
    kept = RESULTS / "scale.json"
    keep(kept, {"machine": describe_machine(), "ranks": words.ranks})
    keep(kept, {"sums": simulate_sums(words.ranks)})
    keep(kept, {"agreement": simulate_agreement(words.ranks)})
    keep(kept, {"compare": time_compare(words.ranks)})


if __name__ == "__main__":
    main()
