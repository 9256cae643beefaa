"""A pipeline is found by the objects that run it."""

import gc
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage

from lightning_d9m.hashing.shards import find_flat_layouts
from lightning_d9m.recording.replicated_state import (
    count_stages,
    describe_division,
    find_replicated_state,
)


@pytest.fixture
def group(tmp_path):
    """Open a process group of one rank."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_stage_is_found_while_it_exists(group):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    assert count_stages(model) == 0
    # A stage may run a part of the model, in a wrapper.
    stage = PipelineStage(nn.Sequential(model[0]), 0, 3, torch.device("cpu"))
    assert count_stages(model) == count_stages(model[0]) == 3
    assert count_stages(model[1]) == count_stages(other) == 0
    assert describe_division(model, find_flat_layouts(model)) == {"world.pipeline_stages": 3}
    assert find_replicated_state(model) is None
    assert find_replicated_state(other).weights == {"weight", "bias"}
    with mock.patch.object(distributed, "is_initialized", return_value=False):
        assert count_stages(model) == 0  # without a group no stage can run
    del stage
    gc.collect()
    assert count_stages(model) == 0
