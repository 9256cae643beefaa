"""The table of docs/strategies.md says what the tests show, of each training that they run."""

import re
from pathlib import Path

from scripts import load_script

tests = load_script("tests/lightning/test_strategies.py")
PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
# The tests of each column but the last, of replays.
COLUMNS = (
    (tests.test_two_runs_agree_on_every_rank,),
    (tests.test_a_change_on_one_rank_differs_from_the_reference,),
    (
        tests.test_copies_that_differ_on_one_rank_raise_on_all,
        tests.test_shards_are_not_compared_with_each_other,
    ),
    (tests.test_resumed_within_an_epoch_it_has_the_same_bits,),
    (tests.test_two_runs_agree_on_every_rank,),
    (tests.test_locate_names_step_rank_and_weight_of_a_fault_on_one_rank,),
)
# The column, what a cell of it says, and the test of the trainings of which it says so.
CELLS = (
    (2, "replicated", tests.test_parameters_that_each_rank_has_are_compared),
    (3, "refused", tests.test_hybrid_sharding_of_fsdp1_is_not_resumed),
    (3, "full", tests.test_resumed_from_a_full_checkpoint_it_ends_with_the_same_bits),
    (6, "yes", tests.test_steps_run_twice),
)


def read_table():
    """Return the columns of each training."""
    table = {}
    for line in PAGE.read_text().splitlines():
        first, *columns = (cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("| `"):
            table |= dict.fromkeys(re.findall("`([^`]+)`", first), columns)
    return table


def trainings_of(*shown):
    """Return the ids with which tests run."""
    marks = [mark for test in shown for mark in test.pytestmark if mark.name == "parametrize"]
    return {name for mark in marks for name in mark.args[1]}


def test_each_cell_is_a_test():
    table = read_table()
    assert table.keys() == set(tests.ALL)
    for name, columns in table.items():
        told = [cell not in ("", "refused") for cell in columns[:6]]
        assert told == [name in trainings_of(*column) for column in COLUMNS], name
    assert {columns[6] for columns in table.values()} == {"yes", "refused"}


def test_what_a_cell_says_in_words_is_a_test():
    for column, word, shown in CELLS:
        told = {name for name, columns in read_table().items() if word in columns[column]}
        assert told == trainings_of(shown), word
