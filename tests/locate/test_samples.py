"""Samples of an epoch: the same in another order, or different ones."""

import pytest
import torch

from lightning_d9m.locate.samples import SampleComparison, compare_samples
from lightning_d9m.probes.dumps import Dump
from lightning_d9m.probes.trace import ProbePoint

SAMPLES = torch.arange(24.0).view(12, 2)


@pytest.fixture
def compare(tmp_path):
    """Return a function that dumps batches of two runs, each a list of (rank, leaves)."""

    def compare(*runs):
        for number, batches in enumerate(runs):
            for batch, (rank, *leaves) in enumerate(batches):
                dump = Dump(tmp_path / str(number), rank)
                for leaf, value in enumerate(leaves):
                    place = ("batch", f"batch:{leaf}", 0)
                    dump.save(ProbePoint(0, batch, batch), place, {"value": value})
        return compare_samples([tmp_path / "0", tmp_path / "1"])

    return compare


def batches(order, *, ranks=1):
    parts = SAMPLES[torch.tensor(order)].split(4)
    return [(number % ranks, part, part[:, 0] > 5) for number, part in enumerate(parts)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_order(compare, ranks):
    turned = list(range(12))[::-1]
    found = compare(batches(range(12)), batches(turned, ranks=ranks))
    assert found == SampleComparison(12, 12, 12)
    assert found.same


def test_a_sample_that_is_taken_twice(compare):
    found = compare(batches(range(12)), batches([0, *range(11)]))
    assert found == SampleComparison(12, 12, 11)
    assert not found.same


def test_other_values(compare):
    changed = [(rank, part + 1e-7, label) for rank, part, label in batches(range(12))]
    found = compare(batches(range(12)), changed)
    assert found.common < 12
    assert not found.same


def test_one_run_has_more(compare):
    found = compare(batches(range(12)), batches(range(8)))
    assert found == SampleComparison(12, 8, 8)


def test_a_label_belongs_to_its_sample(compare):
    changed = [(rank, part, ~label) for rank, part, label in batches(range(12))]
    assert compare(batches(range(12)), changed).common == 0


@pytest.mark.parametrize("leaves", [(torch.tensor(3.0),), (SAMPLES, SAMPLES[:3])])
def test_a_batch_without_samples(compare, leaves):
    assert compare([(0, *leaves)], [(0, *leaves)]) is None


def test_nothing_was_dumped(tmp_path):
    assert compare_samples([tmp_path, tmp_path]) is None
