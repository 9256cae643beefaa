"""Blocks of logical ranks: contiguous, nearly equal, and each rank has one owner."""

import pytest

from lightning_d9m.errors import SettingError
from lightning_d9m.logical_ranks.blocks import Blocks

PAIRS = [(v, p) for v in range(1, 33) for p in range(1, v + 1)]


def test_blocks_are_contiguous_and_nearly_equal():
    for ranks, processes in PAIRS:
        blocks = Blocks(ranks, processes)
        owned = [list(blocks.of(process)) for process in range(processes)]
        assert [rank for block in owned for rank in block] == list(range(ranks))
        sizes = {len(block) for block in owned}
        assert max(sizes) == blocks.largest
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_the_owner_of_a_logical_rank_is_the_process_whose_block_has_it():
    for ranks, processes in PAIRS:
        blocks = Blocks(ranks, processes)
        for process in range(processes):
            assert {blocks.owner(rank) for rank in blocks.of(process)} == {process}


def test_a_pair_of_powers_of_two_gives_equal_blocks():
    assert [len(Blocks(8, 4).of(process)) for process in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (-2, 1), (2.0, 1), (True, 1), ("4", 1)])
def test_a_number_that_is_not_allowed_is_refused(numbers):
    with pytest.raises(SettingError, match="pass a whole number from 1"):
        Blocks(*numbers)


def test_more_processes_than_logical_ranks_are_refused_with_both_remedies():
    with pytest.raises(SettingError, match="at most 4 processes, or raise logical_ranks to 5"):
        Blocks(4, 5)


def test_a_process_or_logical_rank_outside_is_refused():
    with pytest.raises(SettingError, match="processes 0 to 1"):
        Blocks(4, 2).of(2)
    with pytest.raises(SettingError, match="logical ranks 0 to 3"):
        Blocks(4, 2).owner(4)
