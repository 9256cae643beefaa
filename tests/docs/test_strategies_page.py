"""The table of docs/strategies.md says what the tests show, of each training that they run."""

import re
from pathlib import Path

from scripts import load_script

lightning = load_script("tests/lightning/test_strategies.py")
fabric = load_script("tests/loop/test_fabric_strategies.py")
PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
# The tests of each column but the last, of replays.
LIGHTNING = (
    (lightning.test_two_runs_agree_on_every_rank,),
    (lightning.test_a_change_on_one_rank_differs_from_the_reference,),
    (
        lightning.test_copies_that_differ_on_one_rank_raise_on_all,
        lightning.test_shards_are_not_compared_with_each_other,
    ),
    (lightning.test_resumed_within_an_epoch_it_has_the_same_bits,),
    (lightning.test_two_runs_agree_on_every_rank,),
    (lightning.test_locate_names_step_rank_and_weight_of_a_fault_on_one_rank,),
)
FABRIC = (
    (fabric.test_two_loops_agree_on_every_rank,),
    (fabric.test_a_change_on_one_rank_of_a_loop_differs_from_the_reference,),
    (
        fabric.test_copies_of_a_loop_that_differ_raise_on_all_ranks,
        fabric.test_shards_of_a_loop_are_not_compared_with_each_other,
    ),
    (fabric.test_a_loop_resumed_within_an_epoch_ends_with_the_same_bits,),
    (fabric.test_probes_of_a_loop_agree_in_two_runs,),
    (fabric.test_locate_names_step_rank_and_weight_of_a_fault_in_a_loop,),
)


def read_table():
    """Return the columns of each training."""
    table = {}
    for line in PAGE.read_text().splitlines():
        first, *columns = (cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("| `"):
            table |= dict.fromkeys(re.findall("`([^`]+)`", first), columns)
    return table


def trainings_of(tests):
    """Return the ids with which tests run."""
    marks = [mark for test in tests for mark in test.pytestmark if mark.name == "parametrize"]
    return {name for mark in marks for name in mark.args[1]}


def show(name):
    """Return which columns a test shows of a training."""
    of_fabric = name.startswith("Fabric, ")
    tests, name = (FABRIC if of_fabric else LIGHTNING), name.removeprefix("Fabric, ")
    return [name in trainings_of(column) for column in tests]


def test_each_cell_is_a_test():
    table = read_table()
    trained = {*lightning.ALL, *(f"Fabric, {name}" for name in fabric.ALL)}
    assert table.keys() == trained
    for name, columns in table.items():
        told = [cell not in ("", "refused") for cell in columns[:6]]
        assert told == show(name), name


def test_what_is_refused_is_a_test():
    table = read_table()
    not_resumed = {name for name, columns in table.items() if columns[3] == "refused"}
    refusals = [
        lightning.test_hybrid_sharding_of_fsdp1_is_not_resumed,
        fabric.test_a_loop_with_hybrid_sharding_of_fsdp1_is_not_resumed,
    ]
    trainer, loop = (trainings_of([refusal]) for refusal in refusals)
    assert not_resumed == trainer | {f"Fabric, {name}" for name in loop}
    replayed = {name for name, columns in table.items() if columns[6] == "yes"}
    assert replayed == set(lightning.REPEATED)
    assert {columns[6] for columns in table.values()} == {"yes", "refused"}


def test_replicated_parameters_are_a_test():
    of_copies = {name for name, columns in read_table().items() if "replicated" in columns[2]}
    lightnings = trainings_of([lightning.test_parameters_that_each_rank_has_are_compared])
    loops = trainings_of([fabric.test_parameters_of_a_loop_that_each_rank_has_are_compared])
    assert of_copies == lightnings | {f"Fabric, {name}" for name in loops}


def test_full_checkpoints_are_a_test():
    full = {name for name, columns in read_table().items() if "full" in columns[3]}
    of_fabric = fabric.test_a_loop_resumed_from_a_full_checkpoint_ends_with_the_same_bits
    lightnings = lightning.test_resumed_from_a_full_checkpoint_it_ends_with_the_same_bits
    loops = {f"Fabric, {name}" for name in trainings_of([of_fabric])}
    assert full == trainings_of([lightnings]) | loops


def test_patched_operations_are_called_in_all():
    patched = lightning.test_patched_operations_are_called_and_give_the_same_bits
    assert trainings_of([patched]) == set(lightning.ALL)
    loops = trainings_of([fabric.test_patched_operations_of_a_loop_give_the_same_bits])
    assert loops == set(fabric.ALL)
