"""Numbers of a dataset that change are found, without a visit of all its data."""

import pytest
import torch

from lightning_d9m.control.data.dataset_numbers import (
    find_changed_numbers,
    read_first_numbers,
    write_numbers,
)


class Part:
    scale = 1.0

    def __init__(self, parts=()):
        self.epoch, self.name, self.parts = 0, "name", list(parts)


class Stages(list):
    """A list with attributes."""


def make(length=3):
    dataset = Part([Part([Part()]) for _ in range(length)])
    dataset.stages = Stages([1])
    dataset.stages.epoch = 0
    dataset.module = torch.nn.Linear(1, 1)
    dataset.module.epoch = 0
    return dataset


CHANGES = {
    "dataset": lambda dataset: setattr(dataset, "epoch", 1),
    "dataset.parts.1": lambda dataset: setattr(dataset.parts[1], "epoch", 2),
    "dataset.parts.1.parts.0": lambda dataset: setattr(dataset.parts[1].parts[0], "epoch", 3),
    "dataset.stages": lambda dataset: setattr(dataset.stages, "epoch", 4),
}


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize("length", [3, 100])
def test_a_changed_number_is_found_and_written(path, length):
    dataset = make(length)
    first = read_first_numbers(dataset)
    assert find_changed_numbers(first, dataset) == {}
    CHANGES[path](dataset)
    changed = find_changed_numbers(first, dataset)
    assert list(changed) == [path]
    other = make(length)
    write_numbers(other, changed)
    assert find_changed_numbers(first, other) == changed


def test_what_is_no_changed_number_is_not_found():
    dataset = make()
    first = read_first_numbers(dataset)
    dataset.name, dataset.epoch, dataset.new = "other", 1.0, 5
    dataset.parts[0].epoch = 2**63
    dataset.module.epoch = 1  # of the model, whose state is saved
    assert find_changed_numbers(first, dataset) == {}


def test_a_number_that_replaces_that_of_a_class_is_found():
    dataset = make()
    first = read_first_numbers(dataset)
    dataset.parts[2].scale = 2.0
    assert find_changed_numbers(first, dataset) == {"dataset.parts.2": {"scale": 2.0}}


def test_up_to_a_thousand_objects_are_read():
    dataset = make(900)
    first = read_first_numbers(dataset)
    dataset.parts[850].epoch = 5
    assert find_changed_numbers(first, dataset) == {"dataset.parts.850": {"epoch": 5}}


def test_each_item_of_a_long_list_is_read():
    """As of the parts of a ConcatDataset."""
    dataset = make(100)
    first = read_first_numbers(dataset)
    dataset.parts[77].epoch = 5
    assert find_changed_numbers(first, dataset) == {"dataset.parts.77": {"epoch": 5}}
    for number, part in enumerate(dataset.parts):
        part.epoch = number
    changed = find_changed_numbers(first, dataset)
    assert changed == {f"dataset.parts.{n}": {"epoch": n} for n in range(1, 100)}
