"""A module evaluated in one shape, or one sample at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_d9m import SettingError
from lightning_d9m.audit.inference.fixed_batch import FixedShape, PerSample


class Watched(nn.Module):
    """Remembers the sizes it saw; gives a mapping of a doubled batch and a constant."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, batch, scale=None):
        self.sizes.append(len(batch))
        return {"double": batch * 2 if scale is None else batch * scale, "name": "constant"}


@given(count=st.integers(1, 9), size=st.integers(1, 5))
def test_the_module_sees_one_size_and_the_caller_all_samples(count, size):
    watched, batch = Watched(), torch.arange(count * 3.0).view(count, 3)
    outputs = FixedShape(watched, size)(batch)
    assert set(watched.sizes) == {size}
    assert torch.equal(outputs["double"], batch * 2)
    assert outputs["name"] == "constant"


def test_per_sample_sees_one_at_a_time():
    watched = Watched()
    PerSample(watched)(torch.ones(3, 2))
    assert watched.sizes == [1, 1, 1]


def test_keywords_that_hold_samples_are_cut_with_them_and_others_are_not():
    outputs = FixedShape(Watched(), 2)(torch.ones(3, 2), scale=torch.tensor([[1.0], [2.0], [3.0]]))
    assert outputs["double"].tolist() == [[1, 1], [2, 2], [3, 3]]
    outputs = FixedShape(Watched(), 2)(torch.ones(3, 2), scale=torch.tensor(5.0))
    assert outputs["double"].tolist() == [[5, 5]] * 3


def test_what_depends_on_the_size_of_the_batch_no_longer_does():
    class Mean(nn.Module):
        def forward(self, batch):
            return batch + len(batch)

    fixed, batch = FixedShape(Mean(), 4), torch.zeros(6, 1)
    assert torch.equal(fixed(batch), torch.cat([fixed(batch[:1]), fixed(batch[1:])]))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_sizes_that_are_not_allowed(size):
    with pytest.raises(SettingError, match="an integer from 1"):
        FixedShape(nn.Identity(), size)


def test_outputs_that_hold_no_samples():
    with pytest.raises(SettingError, match="whose first dimension is the batch"):
        FixedShape(nn.Flatten(0), 2)(torch.ones(2, 3))


def test_arguments_without_a_batch():
    with pytest.raises(SettingError, match="No argument is a batch"):
        PerSample(nn.Identity())(torch.tensor(1.0))
