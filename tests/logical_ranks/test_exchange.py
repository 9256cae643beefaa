"""Every exchange gives the bits of one fold in one process."""

import pytest
import torch
from gloo_threads import run_processes
from logical_sums import average_leaves, bits, make_leaf

from lightning_d9m.logical_ranks.exchange import CollectiveSum, RootExchange
from lightning_d9m.logical_ranks.tree import Blocks, Fold, Node

PAIRS = [(1, 1), (8, 1), (2, 2), (8, 2), (5, 3), (8, 3), (6, 4), (8, 4), (7, 5)]


def fold_block(leaves, block, *, wide):
    """Return the roots of a block, as the process computes them."""
    fold = Fold(len(leaves), lambda left, right: left + right)
    for leaf in block:
        value = leaves[leaf].clone()
        fold.push(Node(leaf, leaf + 1), value.float() if wide else value)
    return [value for _, value in fold.held]


def exchange_all(leaves, processes, **words):
    """Return the results in shared memory, by messages and as on devices, on each process."""
    blocks, dtype = Blocks(len(leaves), processes), leaves[0].dtype

    def exchange(process, group):
        results = []
        for way in ("shared", "messages", "collectives"):
            it = RootExchange(blocks, process, group, shares_memory=way == "shared", **words)
            wide = dtype.itemsize < 4 and not it.sends_leaves
            roots = fold_block(leaves, blocks.of(process), wide=wide)
            result = torch.empty_like(leaves[0]) if wide else roots[-1]
            if way == "collectives" and processes > 1:
                CollectiveSum(it, roots, result, len(leaves)).finish()
            else:
                it.start(roots, result, len(leaves)).finish()
            results.append(result)
        return results

    return [result for results in run_processes(processes, exchange) for result in results]


@pytest.mark.parametrize(("logical_ranks", "processes"), PAIRS)
def test_every_exchange_gives_the_bits_of_one_fold(logical_ranks, processes):
    generator = torch.Generator().manual_seed(logical_ranks)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for length in (1, 5003):
            leaves = [make_leaf([length], dtype, generator) for _ in range(logical_ranks)]
            expected = bits(average_leaves(leaves))
            for result in exchange_all(leaves, processes, message_bytes=2**12):
                assert bits(result) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_zeros_infinities_nans_and_subnormal_numbers_keep_their_bits(dtype, processes):
    generator = torch.Generator().manual_seed(1)
    leaves = [make_leaf([3001], dtype, generator, awkward=True) for _ in range(8)]
    expected = average_leaves(leaves)
    assert 0 < expected.isnan().sum() < 3001
    assert expected.isinf().any()
    for result in exchange_all(leaves, processes, message_bytes=2**12):
        assert bits(result) == bits(expected)


def test_a_sum_in_the_order_of_a_ring_differs():
    generator = torch.Generator().manual_seed(1)
    leaves = [make_leaf([1000], torch.float32, generator) for _ in range(4)]
    ring = ((leaves[1] + leaves[2]) + leaves[3] + leaves[0]) / 4
    assert bits(ring) != bits(average_leaves(leaves))


def test_messages_have_the_bytes_of_a_ring_for_powers_of_two():
    length = 4 * 3 * 16 * 64
    for logical_ranks, processes in [(2, 2), (8, 2), (4, 4), (8, 4)]:
        blocks = Blocks(logical_ranks, processes)

        def send(process, group, blocks=blocks):
            it = RootExchange(blocks, process, group, shares_memory=False, message_bytes=2**12)
            root = torch.randn(length)
            it.start([root], root).finish()
            return it.bytes_sent

        ring = 2 * 4 * length * (processes - 1) // processes
        assert run_processes(processes, send) == [ring] * processes


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("shares_memory", [False, True])
def test_two_processes_flush_subnormal_numbers_as_one_does(flushes, shares_memory):
    blocks = Blocks(2, 2)
    leaves = [torch.full([300_000], value) for value in (2.0**-126, -(2.0**-127) * 1.5)]

    def exchange(process, group):
        torch.set_flush_denormal(flushes)  # of this thread
        it = RootExchange(blocks, process, group, shares_memory=shares_memory)
        root = leaves[process].clone()
        pending = it.start([root], root)
        pending.finish()
        return root.unique().tolist(), type(pending).__name__

    expected = 2.0 ** (-126 if flushes else -128)  # a flushed operand counts as zero
    name = "SharedSum" if shares_memory else "MessageSum"
    assert run_processes(2, exchange) == [([expected], name)] * 2
