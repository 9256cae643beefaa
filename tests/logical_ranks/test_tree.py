"""The tree: its brackets, the roots of a block, and what a fold holds."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.logical_ranks.blocks import Blocks
from lightning_d9m.logical_ranks.tree import Fold, Node, find_roots, list_roots


def add(left, right):
    return left + right


def split(start, stop):
    """Return the children of a node, from the definition: halve the smallest power of two."""
    half = 1
    while 2 * half < stop - start:
        half *= 2
    return (start, start + half), (start + half, stop)


def bracket(start, stop):
    """Write the sum of a node with its brackets, from the top down."""
    if stop - start == 1:
        return str(start)
    left, right = split(start, stop)
    return f"({bracket(*left)}+{bracket(*right)})"


def largest_nodes(node, block):
    """Return the largest nodes inside a block, from the top down."""
    start, stop = node
    if stop <= block.start or block.stop <= start:
        return []
    if block.start <= start and stop <= block.stop:
        return [node]
    return [found for child in split(*node) for found in largest_nodes(child, block)]


def fold_blocks(leaves, blocks, add):
    """Fold each block by itself, and then the roots of all blocks."""
    whole = Fold(len(leaves), add)
    for block in blocks:
        fold = Fold(len(leaves), add)
        for leaf in block:
            fold.push(Node(leaf, leaf + 1), leaves[leaf])
        for root in fold.held:
            whole.push(*root)
    ((node, value),) = whole.held
    assert node == (0, len(leaves))
    return value


def test_the_brackets_are_those_of_the_definition():
    for count in range(1, 70):
        leaves = [str(leaf) for leaf in range(count)]
        text = fold_blocks(leaves, [range(count)], lambda a, b: f"({a}+{b})")
        assert text == bracket(0, count)
    assert bracket(0, 5) == "(((0+1)+(2+3))+4)"


def test_every_number_of_processes_gives_the_same_bits():
    for count in range(1, 33):
        leaves = np.random.randn(count, 5).astype(np.float32)
        whole = fold_blocks(leaves, [range(count)], add)
        for processes in range(1, count + 1):
            blocks = Blocks(count, processes)
            sums = fold_blocks(leaves, [blocks.of(p) for p in range(processes)], add)
            assert sums.tobytes() == whole.tobytes()


def test_a_sum_from_left_to_right_in_each_process_depends_on_their_number():
    leaves = np.random.randn(8, 1000).astype(np.float32)
    sums = {}
    for processes in (1, 2, 4):
        blocks = Blocks(8, processes)
        parts = [sum(leaves[list(blocks.of(p))], np.float32(0)) for p in range(processes)]
        sums[processes] = sum(parts, np.float32(0)).tobytes()
    assert len(set(sums.values())) == 3


@given(st.data())
def test_any_contiguous_blocks_give_the_brackets_of_the_tree(data):
    count = data.draw(st.integers(1, 70))
    cuts = sorted(data.draw(st.sets(st.integers(1, count))) | {0, count})
    blocks = [range(*pair) for pair in pairwise(cuts)]
    leaves = [str(leaf) for leaf in range(count)]
    assert fold_blocks(leaves, blocks, lambda a, b: f"({a}+{b})") == bracket(0, count)


def test_the_roots_of_a_block_are_the_largest_nodes_inside_and_few():
    for count in range(1, 33):
        for start in range(count):
            for stop in range(start + 1, count + 1):
                roots = find_roots(range(start, stop), count)
                assert list(roots) == largest_nodes((0, count), range(start, stop))
                assert len(roots) <= max(1, 2 * math.ceil(math.log2(stop - start)))


def test_powers_of_two_have_one_root_for_each_process():
    for count in (1, 2, 4, 8, 16, 32):
        for processes in (1, 2, 4, 8, 16, 32):
            if processes <= count:
                assert {len(roots) for roots in list_roots(Blocks(count, processes))} == {1}


def test_a_fold_holds_few_values():
    for count in range(1, 33):
        for processes in range(1, count + 1):
            for process in range(processes):
                block = Blocks(count, processes).of(process)
                fold = Fold(count, add)
                most = 0
                for leaf in block:
                    most = max(most, len(fold.held) + 1)
                    fold.push(Node(leaf, leaf + 1), leaf)
                depth = math.ceil(math.log2(len(block)))
                # Roots that wait for another process's values come on top.
                assert most <= depth + len(fold.held)
