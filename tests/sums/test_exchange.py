"""All exchanges give the bits of one sum in one process."""

from functools import partial

import pytest
import torch
from logical_sums import average_leaves, bits, complete, hold_sums, make_leaf
from rank_threads import run_processes

from lightning_d9m.integrations.strategies.sums import exchange, shared_memory
from lightning_d9m.integrations.strategies.sums.exchange import AllToAllSum, RootExchange
from lightning_d9m.integrations.strategies.sums.tree import Blocks, count_merges

PAIRS = [(1, 1), (8, 1), (2, 2), (8, 2), (5, 3), (8, 3), (6, 4), (8, 4), (7, 5), (8, 8)]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(exchange, "MESSAGE_BYTES", 2**12)
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 2**12)


def check_exchanges(leaves, processes):
    """Compare the results of all exchanges on each process with one sum."""
    blocks, dtype = Blocks(len(leaves), processes), leaves[0].dtype
    expected = bits(average_leaves(leaves))

    def run(process, group):
        block = blocks.of(process)
        for shares in (True, False, None):  # None: that of devices
            it = RootExchange(blocks, process, group)
            if not shares:
                it.opens_memory = False
            wide = dtype.itemsize < 4 and processes < len(leaves)
            own = [leaves[rank].clone() for rank in block]
            merges = count_merges(block.start, [rank + 1 for rank in block], len(leaves))
            roots = hold_sums([leaf.float() for leaf in own] if wide else own, merges)
            result = torch.empty_like(leaves[0]) if wide else roots[-1]
            start = partial(AllToAllSum, it) if shares is None and group else it.start
            complete(start(roots, result, len(leaves)))
            assert bits(result) == expected

    run_processes(processes, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("logical_ranks", "processes"), PAIRS)
def test_every_exchange_gives_the_bits_of_one_sum(logical_ranks, processes, dtype):
    """Also of zeros, infinities, NaNs and subnormal numbers."""
    generator = torch.Generator().manual_seed(logical_ranks)
    for length, awkward in ((1, False), (5003, False), (3001, True)):
        leaves = [
            make_leaf([length], dtype, generator, awkward=awkward) for _ in range(logical_ranks)
        ]
        check_exchanges(leaves, processes)
    assert 0 < average_leaves(leaves).isnan().sum() < 3001


def test_a_sum_in_the_order_of_a_ring_differs():
    generator = torch.Generator().manual_seed(1)
    leaves = [make_leaf([1000], torch.float32, generator) for _ in range(4)]
    ring = ((leaves[1] + leaves[2]) + leaves[3] + leaves[0]) / 4
    assert bits(ring) != bits(average_leaves(leaves))


@pytest.mark.parametrize("processes", [2, 4])
def test_as_many_bytes_as_those_of_a_ring_are_sent_for_powers_of_two(processes):
    def send(process, group):
        it = RootExchange(Blocks(8, processes), process, group)
        it.opens_memory = False
        root = torch.randn(4096)
        complete(it.start([root], root))
        return it.bytes_sent

    ring = 2 * 4 * 4096 * (processes - 1) // processes
    assert run_processes(processes, send) == [ring] * processes


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("shares_memory", [False, True])
def test_two_processes_flush_subnormal_numbers_as_one_does(flushes, shares_memory):
    blocks = Blocks(2, 2)
    leaves = [torch.full([300_000], value) for value in (2.0**-126, -(2.0**-127) * 1.5)]

    def run(process, group):
        torch.set_flush_denormal(flushes)  # of this thread
        it = RootExchange(blocks, process, group)
        if not shares_memory:
            it.opens_memory = False
        root = leaves[process].clone()
        pending = it.start([root], root)
        complete(pending)
        return root.unique().tolist(), type(pending).__name__

    expected = 2.0 ** (-126 if flushes else -128)  # a flushed operand counts as zero
    name = "SharedSum" if shares_memory else "MessageSum"
    assert run_processes(2, run) == [([expected], name)] * 2
