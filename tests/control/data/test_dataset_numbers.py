"""Numbers of a dataset that change are found and written, without a visit of all its data."""

import pytest
import torch

from lightning_d9m.control.data.dataset_numbers import NUMBERS, DatasetNumbers


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


def change_what_is_no_number(dataset):
    dataset.name, dataset.epoch, dataset.new = "other", 1.0, 5
    dataset.parts[0].epoch = 2**63
    dataset.module.epoch = 1  # of the model, whose state is saved


CHANGES = {
    "dataset": lambda dataset: setattr(dataset, "epoch", 1),
    "dataset.parts.1": lambda dataset: setattr(dataset.parts[1], "epoch", 2),
    "dataset.parts.1.parts.0": lambda dataset: setattr(dataset.parts[1].parts[0], "epoch", 3),
    "dataset.parts.2": lambda dataset: setattr(dataset.parts[2], "scale", 2.0),  # of the class
    "dataset.stages": lambda dataset: setattr(dataset.stages, "epoch", 4),
    "": change_what_is_no_number,
}


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize("length", [3, 100])
def test_a_changed_number_is_found_and_written(path, length):
    dataset, other = make(length), make(length)
    numbers, restored = DatasetNumbers(dataset), DatasetNumbers(other)
    assert numbers.capture() == {}
    CHANGES[path](dataset)
    captured = numbers.capture()
    assert list(captured.get(NUMBERS, {})) == [path] * bool(path)
    restored.restore(captured)
    assert restored.capture() == captured


def test_each_item_of_a_long_list_is_read():
    """As of the parts of a ConcatDataset, up to a thousand objects in all."""
    dataset = make(900)
    numbers = DatasetNumbers(dataset)
    for number, part in enumerate(dataset.parts):
        part.epoch = number
    assert numbers.capture()[NUMBERS] == {f"dataset.parts.{n}": {"epoch": n} for n in range(1, 900)}
