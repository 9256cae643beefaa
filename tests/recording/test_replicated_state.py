"""Ranks compare all state that must be equal: each rank is a thread with its own model."""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage

from lightning_d9m.hashing.shards import find_flat_layouts
from lightning_d9m.hashing.training_state import take_partial_snapshot
from lightning_d9m.ledger.format.records import Digests
from lightning_d9m.recording.rank_agreement import (
    RankAgreement,
    count_stages,
    describe_division,
    find_replicated_state,
)

RECORD = Digests(moment="epoch", epoch=0, step=1, totals={}, groups={})


class Net(nn.Module):
    """Has a layer, statistics of each rank's own data, a constant table and a codebook."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("codebook", torch.zeros(4))

    def forward(self, x):
        self.codebook += x.detach().mean(0)  # follows each rank's own data
        return self.norm(self.linear(x) + self.table)


class Rank:
    """A model in training, as one rank of a data-parallel run has it."""

    def __init__(self, number):
        torch.manual_seed(0)
        self.number = number
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        schedulers = torch.optim.lr_scheduler
        self.schedulers = [
            schedulers.StepLR(self.optimizer, 10),
            schedulers.ReduceLROnPlateau(self.optimizer, patience=99),
        ]

    def step(self):
        own = torch.full((8, 4), float(self.number)) + torch.arange(32.0).reshape(8, 4)
        self.model(own)  # the buffers differ from rank to rank from here on
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)  # as if it was reduced
        self.optimizer.step()
        self.schedulers[0].step()
        self.schedulers[1].step(1.0 + self.number)  # a metric that is not synchronized

    def groups(self):
        return take_partial_snapshot(self.model, [self.optimizer], self.schedulers).groups


def find_differences(disturb, count=3, *, at=1):
    """Train ranks for two records; return the differences that each rank finds at each record."""
    rows = [[]] * count
    barrier = threading.Barrier(count, timeout=30)
    ranks = [Rank(number) for number in range(count)]

    def run(rank):
        def gather(value):
            rows[rank.number] = json.dumps(value)
            barrier.wait()
            found = [json.loads(row) for row in rows]
            barrier.wait()
            return found

        replicated = find_replicated_state(rank.model, [rank.optimizer], rank.schedulers)
        agreement = RankAgreement(gather, replicated)
        results = []
        for record in range(3):
            if record:
                rank.step()
            if record == at and rank.number == 1:
                disturb(rank)
            hashes = gather(agreement.summarize(rank.groups()))
            results.append(agreement.compare(hashes, RECORD))
        return results

    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(run, ranks))
    assert len({repr(result) for result in results}) == 1  # the same on every rank
    return results[0]


def test_equal_training_states_agree_though_statistics_of_own_data_differ():
    assert find_differences(lambda rank: None) == [{}, {}, {}]


def one_ulp(tensor):
    tensor.view(torch.int32).view(-1)[1] += 1


def state(rank):
    return rank.optimizer.state[rank.model.linear.weight]


EXP_AVG_SQ = "0.exp_avg_sq.linear.weight"


def table_of_another_shape(rank):
    rank.model.register_buffer("table", torch.arange(5.0)[:4].clone() * 2)


@pytest.mark.parametrize(
    ("disturb", "group", "name"),
    [
        (lambda rank: one_ulp(rank.model.linear.weight.data), "weights", "linear.weight"),
        (lambda rank: one_ulp(state(rank)["exp_avg"]), "optimizers", "0.exp_avg.linear.weight"),
        (lambda rank: one_ulp(state(rank)["exp_avg_sq"]), "optimizers", EXP_AVG_SQ),
        (lambda rank: state(rank)["step"].add_(1), "optimizers", "0.step.linear.weight"),
        (lambda rank: rank.optimizer.param_groups[0].update(lr=0.02), "optimizers", "0.group.0"),
        (lambda rank: setattr(rank.schedulers[0], "gamma", 0.2), "schedulers", "0"),
        (lambda rank: one_ulp(rank.model.table), "buffers", "table"),
        (table_of_another_shape, "buffers", "table"),
    ],
)
def test_a_difference_on_one_rank_is_named(disturb, group, name):
    _, found, _ = find_differences(disturb)
    difference = found[group]
    assert (difference.rank, difference.names) == (1, (name,))
    assert difference.expected != difference.actual


def test_state_that_one_rank_lacks_is_a_difference():
    found = find_differences(lambda rank: state(rank).pop("exp_avg"), at=2)[2]
    assert found["optimizers"].names == ("names of the entries",)


def test_synchronized_statistics_must_be_equal():
    model = nn.Sequential(nn.SyncBatchNorm(2), nn.BatchNorm1d(2), nn.InstanceNorm1d(2))
    replicated = find_replicated_state(model)
    names = {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert set(replicated.synchronized) == names
    assert replicated.select(take_partial_snapshot(model).groups)["buffers"].keys() == names
    assert not replicated.select_buffers(take_partial_snapshot(model).groups)


def test_what_ddp_ignores_may_differ():
    model = Net()
    model._ddp_params_and_buffers_to_ignore = ["linear.bias", "table"]
    replicated = find_replicated_state(model)
    groups = take_partial_snapshot(model).groups
    assert "linear.bias" not in replicated.select(groups)["weights"]
    assert "table" not in replicated.select_buffers(groups)


def test_sharded_state_may_differ_but_not_its_settings():
    class ZeroRedundancyOptimizer(torch.optim.Adam):
        """Stands for torch's, which needs a process group."""

    model = nn.Linear(2, 1)
    optimizers = [kind(model.parameters()) for kind in (torch.optim.Adam, ZeroRedundancyOptimizer)]
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    groups = take_partial_snapshot(model, optimizers).groups
    selected = find_replicated_state(model, optimizers).select(groups)["optimizers"]
    assert {name for name in selected if name.startswith("1.")} == {"1.group.0"}
    assert "0.exp_avg.weight" in selected


def test_the_loss_of_a_rank_that_lbfgs_keeps_may_differ():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: model(torch.ones(1, 2)).sum())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step(lambda: model(torch.ones(1, 2)).sum())
    groups = take_partial_snapshot(model, [optimizer]).groups
    assert "0.prev_loss.weight" in groups["optimizers"]
    selected = find_replicated_state(model, [optimizer]).select(groups)["optimizers"]
    assert "0.d.weight" in selected
    assert "0.prev_loss.weight" not in selected


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
