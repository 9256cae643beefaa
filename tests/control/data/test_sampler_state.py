"""What a user's samplers change is captured, restored, and undone."""

import copy
import io
import random
import re
from collections import deque

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from lightning_d9m.control.data.samplers import SamplerState, list_unsaved
from lightning_d9m.state.state import digest_value


class Own:
    """A sampler of a program."""

    def __init__(self, **values):
        vars(self).update(values)


# The value of an attribute at first, and later. The property tests of `Changes` have the others.
VALUES = {
    "count": (3, 4),
    "order": ([1, 2, 3], [3, 1, 2]),
    "batches": ([[1, 2], [3], []], [[3], [1, 2], []]),
    "array": (np.arange(4, dtype="int32"), np.arange(4, dtype="int32")[::-1].copy()),
    "tensor": (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
    "seen": ({1, 2}, {1, 3}),
    "last": (deque([1], 3), deque([1, 2], 3)),
    "long": ([*range(110_000)], [*range(110_000, 0, -1)]),
}


def through_a_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def watch(*samplers, dataset=None, earlier=()):
    return SamplerState(samplers, dataset, earlier)


def change(sampler, name, *, inside):
    """Replace what a sampler holds, or what that holds."""
    present, new = getattr(sampler, name), VALUES[name][1]
    if inside and isinstance(present, np.ndarray | torch.Tensor):
        present[:] = new
    elif inside and isinstance(present, list | deque | set | dict):
        present.clear()
        (present.extend if isinstance(present, list | deque) else present.update)(new)
    else:
        setattr(sampler, name, new)


def begin():
    return Own(**{name: copy.deepcopy(first) for name, (first, _) in VALUES.items()})


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_what_has_changed_comes_back_as_it_was(name, inside):
    sampler = begin()
    state = watch(sampler)
    assert state.capture() == {}
    change(sampler, name, inside=inside)
    saved = through_a_file(state.capture())
    assert {re.split("['[]", path)[0] for path in saved["sampler"]} == {f"0.{name}"}
    resumed = begin()
    watch(resumed).restore(saved)
    assert digest_value(getattr(resumed, name)) == digest_value(VALUES[name][1])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_what_an_iteration_has_changed_is_undone(name, inside):
    sampler = begin()
    state = watch(sampler)
    before = state.capture()
    change(sampler, name, inside=inside)
    after = state.capture()
    sampler.other = 1  # set by a hook since
    state.undo(before, after)
    assert digest_value(getattr(sampler, name)) == digest_value(VALUES[name][0])
    assert sampler.other == 1


def test_what_has_changed_again_stays():
    sampler = begin()
    state = watch(sampler)
    before = state.capture()
    sampler.count = 4
    after = state.capture()
    sampler.count = 5
    state.undo(before, after)
    assert sampler.count == 5


def test_generators_are_restored_whoever_seeded_them():
    sampler, resumed = Own(rng=random.Random(1)), Own(rng=random.Random(2))
    state = watch(sampler)
    saved = through_a_file(state.capture())
    expected = sampler.rng.random()
    watch(resumed).restore(saved)
    assert resumed.rng.random() == expected
    state.undo(saved, {})
    assert sampler.rng.random() == expected


def test_a_sampler_of_an_earlier_loader_is_compared_with_its_first_state():
    sampler = begin()
    first = watch(sampler)
    sampler.count = 4
    assert list(watch(sampler, earlier=[first]).capture()["sampler"]) == ["0.count"]


def test_what_no_checkpoint_can_hold_is_named():
    sampler = Own(parts=iter([1, 2, 3]), batches=[1])
    state = watch(sampler)
    assert state.capture() == {}
    next(sampler.parts)
    sampler.objects = [object()]
    captured = {"validate.0": state.capture()}
    assert [reason.split()[0] for reason in list_unsaved(captured)] == [
        "validate.0.sampler.objects",
        "validate.0.sampler.parts",
    ]


def test_what_a_sampler_does_not_take_is_named():
    sampler = Own(inner={"order": [1]}, count=1)
    state = watch(sampler)
    sampler.inner["order"].append(2)
    with pytest.warns(UserWarning, match=r"that Own lacks.*: inner\['order'\]\."):
        watch(Own(count=1)).restore(state.capture())


def test_what_is_no_state_of_a_sampler_is_left_out():
    class Split(DistributedSampler):
        """A sampler of a program, to which the control gives seed and epoch."""

    data = [[1]]
    split, sampler = Split(data, 2, 0), Own(data=data, generator=None)
    other = RandomSampler(range(4))
    state = watch(sampler, other, split, dataset=data)
    assert list(state.parts) == ["0", "2"]
    data[0].append(2)
    sampler.generator = torch.Generator()
    split.seed, split.epoch, other.own = 3, 4, 1
    assert state.capture() == {}
    split.num_replicas = 3
    assert list(state.capture()["sampler"]) == ["2.num_replicas"]
