"""What datasets and samplers change is saved and restored, or named; that of samplers undone."""

import random

import numpy as np
import pytest
import torch
from object_digest import digest_object
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from lightning_d9m.engine.control.data.data_state import (
    CHANGES,
    DATA,
    LOGGED_DATA,
    UNSAVED_DATA,
    DataState,
    WorkerWatch,
    list_paths,
    list_unsaved,
)
from lightning_d9m.engine.control.data.loaders import LoaderControl


class Part(Dataset):
    def __init__(self):
        self.count, self.seen, self.weights = 0, [], np.zeros(3)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(float(index))


RNGS = {}


def watch(dataset):
    return DataState({"dataset": dataset, "collate_fn": None})


@pytest.mark.parametrize(
    "change",
    [
        lambda part: setattr(part, "count", len),
        lambda part: part.seen.append(torch.zeros(5 * 2**20)),
    ],
    ids=["a function", "beyond the limit"],
)
def test_what_cannot_be_saved_is_refused(change):
    part = Part()
    state = watch(part)
    change(part)
    captured = {"0": state.capture()}
    assert len(captured["0"][UNSAVED_DATA]) == 1
    assert list_unsaved(captured)[0].startswith("0.dataset.")


@pytest.mark.parametrize("saved", [(), ("dataset",)])
def test_an_object_whose_state_dict_is_saved_has_no_state_here(saved):
    part = Part()
    part.load_state_dict = lambda state: None
    state = DataState({"dataset": part, "collate_fn": None}, saved=saved)
    part.count = 7
    assert [*state.capture()] == ([] if saved else [DATA])


def test_values_that_a_new_dataset_does_not_take_are_named():
    part, other = Part(), Part()
    state = watch(part)
    part.weights[0] = 1
    del other.weights
    with pytest.warns(UserWarning, match=r"dataset lacks, .*dataset\.weights"):
        watch(other).restore_data(state.capture())


BASE = Part()


def test_a_dataset_in_a_variable_of_a_file_is_kept(monkeypatch):
    monkeypatch.setattr(BASE, "seen", [])
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    control.wrap_loader(DataLoader(Part()), "train")
    control.start_epoch("train", 0)
    BASE.seen.append(1)
    (states,) = control.capture_samplers("train", within=False).values()
    control.release()
    assert [path for path in states[DATA] if path.endswith("BASE.seen'")]


class Lazy(Part):
    rng = None

    def __getitem__(self, index):
        self.rng = np.random.default_rng(index)
        return super().__getitem__(index)


def test_generators_that_no_attribute_held_at_first_do_not_count():
    RNGS["file"] = random.Random(1)
    part, found = Lazy(), []
    state, worker = watch(part), WorkerWatch({"dataset": part}, found.append)
    for index in range(3):
        part[index]
        RNGS["file"].random()
        worker.end_batch()
    assert (found, state.capture().get(DATA, {})) == ([], {})


class CountingLoader(DataLoader):
    count = 0

    def __iter__(self):
        self.count += 1
        return super().__iter__()


class Batches:
    """Stands for a loader that is not torch's."""

    count = 0

    def __iter__(self):
        self.count += 1
        return iter([torch.zeros(1)])


@pytest.mark.parametrize("make", [lambda: CountingLoader(Part()), Batches])
def test_state_of_a_loader_of_the_program_is_named_and_not_refused(make):
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    loader = control.wrap_loader(make(), "train")
    control.start_epoch("train", 0)
    assert not control.capture_samplers("train", within=False)
    list(loader)
    captured = control.capture_samplers("train", within=False)
    control.release()
    assert not list_unsaved(captured)
    assert [path.endswith("loader.count") for path in list_paths(captured, LOGGED_DATA)] == [True]


class Own:
    def __init__(self, **values):
        vars(self).update(values)


def sample(*samplers, earlier=(), **owners):
    return DataState(owners, samplers, earlier)


def begin():
    return Own(count=3, order=[1, 2, 3], long=[*range(110_000)])


def test_what_a_sampler_has_changed_is_restored_and_undone():
    sampler, resumed = begin(), begin()
    state, restored = sample(sampler), sample(resumed)
    before = state.capture()
    sampler.count, sampler.order = 4, [3]
    sampler.long.reverse()
    after = state.capture()
    assert (before, list(after)) == ({}, ["sampler"])
    restored.restore_samplers(after)
    assert digest_object(resumed) == digest_object(sampler)
    sampler.other, sampler.count = 1, 5  # set by a hook since
    state.undo(before, after)
    assert vars(sampler) == vars(begin()) | {"other": 1, "count": 5}
    assert {*sample(sampler, earlier=[state]).capture()["sampler"]} == {"0.count", "0.other"}


def test_large_values_of_a_sampler_are_kept():
    sampler = Own(weights=np.ones(2_200_000), parts=tuple([n] for n in range(1200)))
    state = sample(sampler)
    sampler.weights[0] = 2
    sampler.parts[7].append(1)
    assert {*state.capture()[CHANGES]} == {"0.weights'", "0.parts[7]'"}


def test_samplers_that_several_loaders_hold_at_other_places_are_restored():
    """The first of one loader is the second of another, and the other way round."""
    made = [(begin(), begin(), begin()) for _ in range(2)]
    states = []
    for count, (outer, shared, inner) in enumerate(made):
        earlier = [[outer, shared], [shared, outer]][count]
        states.append(sample(inner, outer, shared, earlier=[sample(*earlier)]))
    outer, shared, inner = made[0]
    outer.count, shared.count, inner.count = 7, 8, 9
    states[1].restore_samplers(states[0].capture())
    assert [own.count for own in made[1]] == [7, 8, 9]


def test_generators_of_samplers_are_restored_whoever_seeded_them():
    sampler, resumed = Own(rng=random.Random(1)), Own(rng=random.Random(2))
    state = sample(sampler)
    saved = state.capture()
    expected = sampler.rng.random()
    sample(resumed).restore_samplers(saved)
    assert resumed.rng.random() == expected
    state.undo(saved, {})
    assert sampler.rng.random() == expected


def test_what_no_checkpoint_can_hold_of_a_sampler_and_what_it_does_not_take_are_named():
    sampler = Own(parts=iter([1, 2, 3]), inner={"order": [1]})
    state = sample(sampler)
    assert state.capture() == {}
    next(sampler.parts)
    sampler.objects = [object()]
    sampler.inner["order"].append(2)
    captured = state.capture()
    assert [reason.split()[0] for reason in list_unsaved({"validate.0": captured})] == [
        "validate.0.sampler.objects",
        "validate.0.sampler.parts",
    ]
    with pytest.warns(UserWarning, match=r"a sampler .* lacks.*: sampler\.inner\['order'\]\."):
        sample(Own()).restore_samplers(captured)


def test_what_is_no_state_of_a_sampler_is_left_out():
    class Split(DistributedSampler):
        """A sampler of a program, to which the control gives seed and epoch."""

    data = [[1]]
    split, sampler = Split(data, 2, 0), Own(data=data, generator=None)
    drawn_from = [torch.zeros(1)]
    other = RandomSampler(drawn_from)
    state = sample(sampler, other, split, dataset=data)
    assert list(state.samplers) == ["0", "1", "2"]
    sampler.generator = torch.Generator()
    split.seed, split.epoch = 3, 4
    drawn_from.append(torch.ones(1))
    assert state.capture() == {}
    data[0].append(2)
    split.num_replicas, other.own = 3, 1
    captured = state.capture()
    assert list(captured["sampler"]) == ["1.own", "2.num_replicas"]
