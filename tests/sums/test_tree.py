"""Blocks are contiguous, and have few roots; the brackets are those of the tree."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from logical_sums import hold_sums

from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.strategies.sums.tree import Blocks, count_merges, find_roots


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


@given(count=st.integers(1, 70), cuts=st.sets(st.integers(1, 69)))
@example(count=5, cuts=set())
def test_any_contiguous_blocks_give_the_brackets_of_the_tree(count, cuts):
    """The leaves of each block are added, and then the roots of all blocks."""
    assert bracket(0, 5) == "(((0+1)+(2+3))+4)"

    def add(left, right):
        return f"({left}+{right})"

    values, stops = [], []
    for start, stop in pairwise(sorted({cut for cut in cuts if cut < count} | {0, count})):
        merges = count_merges(start, range(start + 1, stop + 1), count)
        values += hold_sums(map(str, range(start, stop)), merges, add)
        roots = find_roots(range(start, stop), count)
        assert (
            len(roots) == len(values) - len(stops) <= max(1, 2 * math.ceil(math.log2(stop - start)))
        )
        stops += [root.stop for root in roots]
    assert hold_sums(values, count_merges(0, stops, count), add) == [bracket(0, count)]


def test_blocks_are_contiguous_and_nearly_equal():
    for ranks, processes in [(v, p) for v in range(1, 33) for p in range(1, v + 1)]:
        blocks = Blocks(ranks, processes)
        owned = [list(blocks.of(process)) for process in range(processes)]
        assert [rank for block in owned for rank in block] == list(range(ranks))
        assert {*map(len, owned)} <= {ranks // processes, -(-ranks // processes)}


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (2.0, 1), (True, 1), ("4", 1)])
def test_a_number_that_is_not_allowed_is_refused(numbers):
    with pytest.raises(SettingError, match="pass a whole number from 1"):
        Blocks(*numbers)
