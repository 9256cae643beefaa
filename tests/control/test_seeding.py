"""Seeds are derived by hashing, and the state of every generator can be put back."""

import io
import random
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.engine.control.seeding import (
    RandomStreams,
    SeededHost,
    capture_generators,
    capture_host,
    capture_rng,
    decode_rng,
    derive_seed,
    digest_generators,
    encode_rng,
    find_lost_devices,
    restore_generators,
    restore_rng,
    rng_restored,
    seed_all,
    seed_host,
    seed_micro_batch,
)
from lightning_d9m.engine.state.state import find_generators

SEEDS = st.integers(0, 2**64 - 1)


def draws():
    return (
        random.random(),
        random.gauss(0, 1),
        tuple(np.random.rand(3)),
        np.random.standard_normal(),
        tuple(torch.randn(3).tolist()),
    )


def test_derived_seeds_are_frozen():
    """A later version that derived other seeds would silently change every user's results."""
    assert derive_seed(42, "train") == 10071373084863330564
    assert derive_seed(42, "train", fit=1, rank=2, worker=3, epoch=4, index=5) == (
        4906076316711424567
    )


def read_state():
    """Read the state by the public functions of each library."""
    numpy = np.random.get_state(legacy=False)
    return (
        random.getstate(),
        numpy["state"]["key"].tolist(),
        {**numpy, "state": numpy["state"]["pos"]},
        torch.get_rng_state().tolist(),
    )


DRAWS = {
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(3),
    "normal": np.random.normal,
    "torch": lambda: torch.rand(3),
    "one": lambda: torch.randn(1),  # the second of the pair waits in the generator
    "double": lambda: torch.randn(1, dtype=torch.float64),
    "many": lambda: torch.randn(17),
}
some_draws = st.lists(st.sampled_from(sorted(DRAWS)), max_size=5)


@given(SEEDS, some_draws, SEEDS, some_draws)
def test_seeding_and_loading_are_those_of_the_libraries(seed, before, other, inside):
    def draw(names):
        return [str(DRAWS[name]()) for name in names]

    seed_host(seed)
    draw(before)
    expected, saved = read_state(), capture_host()
    assert read_state() == expected
    seed_host(other)
    found = draw(inside), read_state()
    restore_rng(saved)
    assert read_state() == expected
    with SeededHost(other):
        assert (draw(inside), read_state()) == found
        with SeededHost(seed):  # a dataset that iterates another loader
            draw(before)
            assert read_state() == expected
        assert read_state() == found[1]
    assert read_state() == expected
    random.seed(other)
    np.random.seed(other & 0xFFFFFFFF)
    torch.manual_seed(other)
    assert (draw(inside), read_state()) == found


MICRO_BATCH = {"base": 7, "fit": 0, "epoch": 1, "logical_rank": 2, "batch": 3}


@pytest.mark.parametrize("name", list(MICRO_BATCH))
def test_a_micro_batch_draws_by_its_place_whatever_was_drawn_before(name):
    found = []
    for place in (MICRO_BATCH, MICRO_BATCH, MICRO_BATCH | {name: 9}):
        seed_micro_batch(**place)
        found.append(draws())
        draws()
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize("make", [np.random.PCG64, np.random.MT19937])
def test_another_generator_of_numpy_is_kept_too(make):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(make(1))
        kept, first = capture_host(), np.random.rand(3)
        restore_rng(kept)
        assert np.random.rand(3).tolist() == first.tolist()
        digests = digest_generators()
        restore_rng(kept)
        assert digests["numpy"] != digest_generators()["numpy"]
        with SeededHost(3):
            np.random.rand(5)
        assert np.random.rand(3).tolist() == first.tolist()
    finally:
        np.random.set_bit_generator(before)


def through_a_file(value):
    """Return what a checkpoint gives back of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@given(seed=st.integers(0, 2**64 - 1), drawn=st.integers(0, 5))
def test_the_generators_of_the_process_go_through_a_file(seed, drawn):
    with rng_restored():
        seed_all(seed)
        for _ in range(drawn):
            draws()
        state = through_a_file(encode_rng(capture_rng()))
        expected = draws()
        seed_all(seed ^ 1)
        restore_rng(decode_rng(state))
        assert draws() == expected


class Devices:
    """Stands for ``torch.xpu``: devices of which each has a seed and a number of draws.

    Without a current one it stands for ``torch.mps``, which has a single device.
    """

    def __init__(self, current, drawn):
        self.drawn = list(drawn)
        self.device_count = lambda: len(self.drawn)
        self.is_available = lambda: True
        if current is not None:
            self.current_device = lambda: current
            self.is_initialized = lambda: True

    def get_rng_state(self, number):
        return torch.tensor([7, self.drawn[number]]).view(torch.uint8)

    def set_rng_state(self, state, number):
        self.drawn[number] = state.view(torch.int64)[1].item()


@pytest.mark.parametrize(
    ("saved", "present", "restored", "lost"),
    [
        # The number of the process's own device, and what was drawn on each.
        ((None, [5]), (None, [0]), [5], []),
        ((1, [0, 5]), (1, [0, 0]), [0, 5], []),
        ((1, [0, 5]), (0, [9]), [5], []),  # each rank sees its own device only
        ((0, [5]), (1, [9, 9]), [9, 5], []),
        ((0, [5, 3, 0, 4]), (0, [9, 9]), [5, 3], ["xpu:3"]),
        ((0, [5, 3]), (1, [9, 9]), [9, 5], ["xpu:1"]),
        ((1, [0, 5]), (0, []), [], ["xpu:1"]),
    ],
)
def test_a_device_gets_the_state_that_it_gave_or_the_loss_is_named(
    monkeypatch, saved, present, restored, lost
):
    """Whichever devices are visible: the own one is known, and the others have their numbers."""
    monkeypatch.setattr(torch, "xpu", Devices(*saved))
    state = through_a_file(encode_rng(capture_rng()))
    monkeypatch.setattr(torch, "xpu", Devices(*present))
    restore_rng(decode_rng(state))
    assert torch.xpu.drawn == restored
    reasons = find_lost_devices(state)
    assert [reason.split()[6].rstrip(",") for reason in reasons] == lost
    assert all(f"this process has {len(restored)} devices" in reason for reason in reasons)


class Owner:
    """Keeps a generator of every kind, here and there."""

    def __init__(self, seed):
        self.own = random.Random(seed)
        self.parts = [np.random.default_rng(seed), {"key": np.random.RandomState(seed)}]
        self.inner = lambda: None
        self.inner.generator = torch.Generator().manual_seed(seed)
        self.other = np.random.Generator(np.random.Philox(seed))
        self.system = random.SystemRandom()
        self.again = self.own
        self.me = self

    def draw(self):
        found = [self.own.gauss(0, 1), self.parts[0].normal(), self.parts[1]["key"].randn()]
        return [*found, torch.rand(2, generator=self.inner.generator).tolist(), self.other.random()]


@given(seed=st.integers(0, 2**32 - 1), drawn=st.integers(0, 3))
def test_generators_that_objects_keep_go_through_a_file(seed, drawn):
    owner = Owner(seed)
    for _ in range(drawn):
        owner.draw()
    state = through_a_file(capture_generators({"model": owner}))
    assert len(state) == 6  # each once
    expected = owner.draw()
    other = Owner(1)
    restore_generators({"model": other}, state)
    assert other.draw() == expected


class Holder:
    def __init__(self, held=None):
        self.held = held


class Slots:
    __slots__ = ("held",)
    __init__ = Holder.__init__


class Forwarding(Slots):
    """Has no attributes but those of another object."""

    __slots__ = ()

    def __getattr__(self, name):
        return getattr(self.held, name)


class Lying(Holder):
    """As a proxy of a dataset: says that it is of the class of what it holds."""

    __class__ = property(lambda self: type(self.held))

    def __len__(self):
        return len(self.held)

    def __iter__(self):
        return iter(self.held)


class Noise(torch.nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held
        self.inner = torch.nn.Linear(1, 1)
        self.inner.held = random.Random(1)  # of a module that is an owner itself


def of_library(module):
    return type("Holder", (Holder,), {"__module__": module})


KEPT = Holder()
HOLDERS = {
    "deque": (lambda held: deque([held]), "0"),
    "nested transforms": (lambda held: Holder([Holder([held])]), "held.0.held.0"),
    "module": (Noise, "held"),
    "__getattr__": (lambda held: Forwarding(Holder(held)), "held"),
    "class of another object": (lambda held: Lying([held]), "0"),
    "weak proxy": (lambda held: weakref.proxy(vars(KEPT).update(held=held) or KEPT), "held"),
}
NOT_SEARCHED = {
    "slots": Slots,
    "class": lambda held: type("Class", (), {"held": held}),
    "freed": lambda held: weakref.proxy(Holder(held)),
    "module of Python": lambda held: SimpleNamespace(torch=torch, random=random),
    "long list": lambda held: [held] * 2000,
    "lists of data": lambda held: [[[1, 2]], None, "text"],
    "callback of Lightning": of_library("lightning.pytorch.callbacks"),
    "table of pandas": of_library("pandas.core.frame"),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_holds_a_generator_is_searched(name):
    hold, path = HOLDERS[name]
    generator = random.Random(1)
    holder = hold(generator)
    assert find_generators({"owner": holder}) == {f"owner.{path}": generator}
    assert find_generators({"owner": [holder]}) == {f"owner.0.{path}": generator}


@pytest.mark.parametrize("name", NOT_SEARCHED)
def test_what_cannot_hold_a_generator_of_the_training_is_not_searched(name):
    held = NOT_SEARCHED[name](random.Random(1))
    assert find_generators({"owner": [held]}) == {}


def test_a_shorter_path_takes_the_place_of_the_one_that_another_worker_reported():
    streams = RandomStreams(1, 0, 0, "train")
    streams.share(persistent=False)
    for path in ("dataset.statistics", "dataset.n"):
        streams.report_change(path)
        assert streams.changed_in_workers == path
