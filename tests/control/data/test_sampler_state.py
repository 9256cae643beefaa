"""The attributes of a user's sampler are read, told from the first ones, and written back."""

import io
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from lightning_d9m.control.data.sampler_state import (
    find_changed_attributes,
    read_attributes,
    write_attributes,
)


class Own:
    """A sampler of a program."""

    def __init__(self, **values):
        vars(self).update(values)


BEFORE = {
    "count": 3,
    "name": "first",
    "flag": True,
    "rate": 0.5,
    "none": None,
    "order": [1, 2, 3],
    "shares": (0.25, math.inf),
    "flags": [True, False],
    "batches": [[1, 2], [3], []],
    "mixed": [1, "a", None, (2.0,)],
    "array": np.arange(4, dtype="int32"),
    "tensor": torch.ones(2, dtype=torch.bfloat16),
}
AFTER = {
    "count": 4,
    "name": "second",
    "flag": False,
    "rate": -0.5,
    "none": 1,
    "order": [3, 1, 2],
    "shares": (0.5, math.inf),
    "flags": [False, False],
    "batches": [[3], [1, 2], []],
    "mixed": [1, "b", None, (2.0,)],
    "array": np.arange(4, dtype="int32")[::-1].copy(),
    "tensor": torch.zeros(2, dtype=torch.bfloat16),
}


def through_a_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@pytest.mark.parametrize("name", BEFORE)
def test_what_has_changed_comes_back_as_it_was(name):
    sampler = Own(**BEFORE)
    first = read_attributes([sampler])
    assert find_changed_attributes(first, read_attributes([sampler])) == {}
    setattr(sampler, name, AFTER[name])
    saved = through_a_file(find_changed_attributes(first, read_attributes([sampler])))
    assert list(saved["0"]) == [name]
    resumed = Own(**BEFORE)
    write_attributes([resumed], saved)
    found, expected = getattr(resumed, name), AFTER[name]
    assert type(found) is type(expected)
    assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)
    assert str(found) == str(expected)


def test_a_list_is_changed_in_place():
    order = [2, 1]
    sampler, holder = Own(order=order), Own(order=order)
    write_attributes(
        [sampler], {"0": {"order": read_attributes([Own(order=[1, 2])])["0"]["order"]}}
    )
    assert holder.order == [1, 2]


def test_what_is_no_plain_value_or_is_set_in_each_epoch_is_left_out():
    class Split(DistributedSampler):
        """A sampler of a program, to which the control gives seed and epoch."""

    split = Split(range(4), 2, 0)
    sampler = Own(data=object(), huge=2**70, many=[2**70], inner=[object()])
    read = read_attributes([sampler, RandomSampler(range(4)), split])
    assert (read["0"], read["1"]) == ({}, {})
    assert not {"seed", "epoch"} & read["2"].keys()
    assert "num_replicas" in read["2"]
