"""The ranks of a run are compared with each other: what differs is named."""

import gc
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import RANKS, Threads
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage

from lightning_d9m.engine.hashing.shards import count_stages, find_flat_layouts
from lightning_d9m.engine.hashing.training_state import take_partial_snapshot
from lightning_d9m.engine.ledger.format.records import Digests, End
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.description import describe_division
from lightning_d9m.engine.recording.rank_agreement import (
    RankAgreement,
    ReplicatedState,
    compare_ranks,
    find_first_step,
    find_replicated_state,
)

EPOCH = Digests(moment="epoch", epoch=4, step=115, totals={}, groups={})
A, B, C = ({"weights": {"w": "a" * 32, "b": other * 32}} for other in "bcd")


@pytest.mark.parametrize(
    ("groups", "rank", "expected_rank"),
    [
        ((B, A), 1, 0),  # nothing tells which of two is wrong
        ((A, A, B, A), 2, 0),
        ((B, A, A), 0, 1),
        ((A, B, C), 1, 0),  # rank 0 is as good as any
    ],
)
def test_rank_0_is_expected_unless_it_alone_differs(groups, rank, expected_rank):
    found = compare_ranks(groups, EPOCH)
    assert (found.rank, found.expected_rank, found.names) == (rank, expected_rank, ("b",))
    sides = (groups[expected_rank]["weights"]["b"], groups[rank]["weights"]["b"])
    assert (found.expected, found.actual) == sides


def test_the_error_says_who_differs_from_whom_where_and_in_what():
    """All the facts are attributes."""
    names = [f"layers.{number:02}.weight" for number in range(20)]
    table = dict.fromkeys(names, "a" * 32)
    other = table | dict.fromkeys(names[3:17], "b" * 32)
    rows = [{"weights": own, "schedulers": {"0": own[names[3]]}} for own in (table, table, other)]
    error = compare_ranks(rows, EPOCH, (20, 22))
    assert str(error) == (
        "Rank 2 differs from rank 0 in epoch 4 (step 115): 14 of 20 weights differ, first "
        "layers.03.weight, layers.04.weight, layers.05.weight and 11 more.\n"
        f"  rank 0 (reference): {'a' * 16}\n"
        f"  rank 2:             {'b' * 16}\n"
        "In all: weights 14 of 20, schedulers 1 of 1.\n"
        "The ranks differed after step 22. They were still equal after step 20.\n"
        "All ranks must hold the same bits after each step. Look for what only one rank does: "
        "a change to its weights, a learning rate that follows its own metric (log the metric "
        "with sync_dist=True), a module that is not synchronized, a failing device."
    )
    assert (error.moment, error.epoch, error.step, error.rank) == ("epoch", 4, 115, 2)
    assert (error.group, error.count, error.expected_rank) == ("weights", 15, 0)
    assert error.names == tuple(names[3:13])
    assert (error.expected, error.actual) == ("a" * 32, "b" * 32)
    drift = End.failed(error).drift
    assert (drift.moment, drift.epoch, drift.step, drift.rank) == ("epoch", 4, 115, 2)
    assert (drift.group, drift.name) == ("weights", "layers.03.weight")
    # Nothing tells which of two ranks is wrong.
    message = str(compare_ranks([A, {"weights": {"w": "a" * 32}}], EPOCH, (None, 1)))
    assert message.startswith(
        "Ranks 0 and 1 differ from each other in epoch 4 (step 115): 1 of 2 weights differ, "
        f"first b.\n  rank 0: {'b' * 16}\n  rank 1: missing\nThe ranks differed after step 1.\n"
    )
    others = str(compare_ranks([A, B, C, A], EPOCH))
    assert others.startswith("Ranks 1, 2 differ from rank 0 in epoch 4")


@given(st.integers(1, 3000), st.sampled_from(["weights", "optimizers"]), st.data())
def test_the_steps_before_and_after_a_drift_are_found(steps, group, data):
    """Of many steps they are close to it; each of at most 32 is kept."""
    drift = data.draw(st.integers(1, steps))
    ranks = [RankAgreement(list, ReplicatedState(weights=["w"])) for _ in range(3)]
    for number, rank in enumerate(ranks):
        for step in filter(rank.wants, range(1, steps + 1)):
            groups = {"weights": {"w": f"{step:032x}"}, "optimizers": {"0.group.0": "0" * 32}}
            if number == 1 and step >= drift:
                groups[group] = dict.fromkeys(groups[group], "f" * 32)
            rank.keep_step(step, groups)
    kept = [rank.kept for rank in ranks]
    assert len(kept[0]) <= 32
    found = find_first_step(kept)
    assert found == find_first_step(kept[::-1])
    if steps <= 32:
        assert found == (drift - 1 or None, drift)
    elif found:
        equal, first = found
        assert (equal or 0) < drift <= first
        assert first - (equal or 0) <= steps / 16
    else:  # after the last step that is kept
        assert steps - drift <= steps / 16


def test_steps_that_only_one_rank_has_are_not_compared():
    assert find_first_step([{1: "a", 2: "b"}, {1: "a"}]) is None


class Net(nn.Module):
    """Has a layer, statistics of each rank's own data, a constant table, a codebook, a maximum."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("codebook", torch.zeros(4))
        self.register_buffer("highest", torch.zeros(1))

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

    def compare(self, exchange, disturb):
        """Return the difference that this rank finds at each of three records."""
        gather = Ranks(self.number, exchange).gather_json
        replicated = find_replicated_state(self.model, [self.optimizer], self.schedulers)
        agreement = RankAgreement(gather, replicated)
        for record in range(3):
            if record:
                self.step()
            # All batches of the first epoch agree in it; only rank 1's of the second exceeds it.
            self.model.highest.fill_(record if self.number == 1 else min(record, 1))
            if record == 2 and self.number == 1:
                disturb(self)
            groups = take_partial_snapshot(self.model, [self.optimizer], self.schedulers).groups
            yield agreement.compare(gather(agreement.summarize(groups)), EPOCH)


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
        (lambda rank: one_ulp(state(rank)["exp_avg_sq"]), "optimizers", EXP_AVG_SQ),
        (lambda rank: state(rank).pop("exp_avg"), "optimizers", "0.exp_avg.linear.weight"),
        (lambda rank: state(rank)["step"].add_(1), "optimizers", "0.step.linear.weight"),
        (lambda rank: rank.optimizer.param_groups[0].update(lr=0.02), "optimizers", "0.group.0"),
        (lambda rank: setattr(rank.schedulers[0], "gamma", 0.2), "schedulers", "0"),
        (lambda rank: one_ulp(rank.model.table), "buffers", "table"),
        (table_of_another_shape, "buffers", "table"),
    ],
)
def test_a_difference_on_one_rank_is_named(disturb, group, name):
    threads, ranks = Threads(), [Rank(number) for number in range(RANKS)]

    def run(rank):
        return [*rank.compare(threads.exchange_of(rank.number), disturb)]

    with ThreadPoolExecutor(RANKS) as pool:
        results = [*pool.map(run, ranks)]
    assert len({*map(repr, results)}) == 1  # the same on every rank
    *before, found = results[0]
    assert before == [None, None]
    assert (found.rank, found.group, found.names) == (1, group, (name,))
    assert found.expected != found.actual


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


def test_state_that_ranks_do_not_share_may_differ_but_not_its_settings():
    """Shards of an optimizer's state, and the loss of a rank that LBFGS keeps."""

    class ZeroRedundancyOptimizer(torch.optim.Adam):
        """Stands for torch's, which needs a process group."""

        __module__ = "torch.distributed.optim"

    model = nn.Linear(2, 1)
    kinds = (torch.optim.Adam, ZeroRedundancyOptimizer, torch.optim.LBFGS)
    optimizers = [kind(model.parameters()) for kind in kinds]

    def compute_loss():
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    for optimizer in optimizers:
        optimizer.step(compute_loss)
    groups = take_partial_snapshot(model, optimizers).groups
    assert "2.prev_loss.weight" in groups["optimizers"]
    selected = find_replicated_state(model, optimizers).select(groups)["optimizers"]
    assert {name for name in selected if name.startswith("1.")} == {"1.group.0"}
    assert {"0.exp_avg.weight", "2.d.weight"} <= selected.keys()
    assert "2.prev_loss.weight" not in selected


@pytest.fixture
def group(tmp_path):
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
