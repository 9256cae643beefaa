"""A run is compared with its reference, and its ranks with each other: what differs is named."""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rank_threads import RANKS, Threads
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage

from lightning_d9m.engine.hashing.shards import find_flat_layouts
from lightning_d9m.engine.hashing.training_state import take_partial_snapshot
from lightning_d9m.engine.ledger.folder import rank_path
from lightning_d9m.engine.ledger.format.records import Digests, End, LoaderFacts
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.drift import (
    RankAgreement,
    Reference,
    ReplicatedState,
    compare_ranks,
    count_stages,
    describe_division,
    find_first_step,
    find_replicated_state,
)
from lightning_d9m.errors import LedgerError, ReferenceRefusedError


def accepted(runs, folder, *, rank=0, **header):
    """Return a reference that has accepted this run."""
    reference = Reference(folder, rank)
    reference.accept(runs.header(rank=rank, **header), runs.facts())
    return reference


def check_all(reference, digests):
    """Return the number of records that differ, and what was not checked."""
    found = [reference.check(record) for record in digests]
    return len(found) - found.count(None), reference.finish()


def find_error(runs, *records, **header):
    """Return the error of the last record, and the reference's folder."""
    folder = runs.write(**header)
    with closing(accepted(runs, folder)) as reference:
        difference = [reference.check(record) for record in records][-1]
    return reference.drift_error(difference), folder


def changed(digests, *names, group="weights"):
    """Return digests of which some are others."""
    groups = {**digests.groups, group: digests.groups[group] | dict.fromkeys(names, "f" * 32)}
    return replace(digests, groups=groups)


def drop(*places):
    """Return what leaves out records of a ledger."""
    return lambda _, records: [records.__delitem__(place) for place in places]


@pytest.mark.parametrize(
    ("field", "header", "facts"),
    [
        ("seed", {"seed": 43}, {}),
        ("world_size", {"world_size": 4}, {}),
        ("settings.per_sample_rng", {"settings": {"per_sample_rng": True}}, {}),
        ("settings.per_sample_rng", {"settings": {}}, {}),
        ("model", {}, {"model": "0" * 32}),
        ("dataset", {}, {"train": [LoaderFacts(99, 64, 2)]}),
        ("batch_size", {}, {"train": [LoaderFacts(1437, 32, 45)]}),
        ("trainer.precision", {}, {"trainer": {"precision": "bf16-mixed"}}),
    ],
)
def test_another_experiment_is_refused_by_the_field_that_differs(runs, field, header, facts):
    reference = Reference(runs.write(), 0)
    with closing(reference), pytest.raises(ReferenceRefusedError) as caught:
        reference.accept(runs.header(**header), runs.facts(**facts))
    error = caught.value
    assert error.field == field
    assert facts or f"  reference: {error.expected}\n  this run:  {error.actual}" in str(error)


def test_a_refusal_says_what_the_values_why_and_what_to_do(runs):
    folder = runs.write()
    with pytest.raises(ReferenceRefusedError) as caught:
        Reference(folder, 0).accept(runs.header(seed=43, fit=1), runs.facts())
    assert str(caught.value) == (
        f"The reference {folder} comes from another experiment: its seed differs.\n"
        "  reference: 42\n"
        "  this run:  43\n"
        "A different seed draws different random numbers, so every digest differs by design. "
        "Also different: fit. Run as the reference was run, or name a reference that was run "
        "as this is."
    )


def test_its_own_folder_is_no_reference(runs, tmp_path):
    with pytest.raises(LedgerError, match="holds no ledger"):
        Reference(tmp_path, 0, writing=runs.write())


def test_a_rank_that_it_lacks(runs):
    """The world size is named first; with logical ranks one process serves for four."""
    folder = runs.write(world_size=4)
    rank_path(folder, 3).unlink()
    with pytest.raises(LedgerError, match="has no file of rank 3"):
        accepted(runs, folder, rank=3, world_size=4)
    with pytest.raises(ReferenceRefusedError, match="its world_size differs"):
        accepted(runs, runs.write(world_size=2), rank=3, world_size=4)
    stack = {"world.logical_ranks": 4}
    reference = accepted(runs, runs.write(stack=stack), rank=3, world_size=4, stack=stack)
    assert check_all(reference, [runs.digests("initial", 0)])[0] == 0
    assert reference.checked == 1


def test_one_that_never_trained_is_refused(runs):
    reference = Reference(runs.write(edit=drop(slice(1, None))), 0)
    with closing(reference), pytest.raises(LedgerError, match="ends before its train"):
        reference.accept(runs.header(), runs.facts())


def test_an_equal_run_with_harmless_settings(runs):
    """Threads are in the stack; the fill changes no bit."""
    settings = runs.header().settings | {"threads": 4, "fill_uninitialized_memory": False}
    reference = accepted(runs, runs.write(), settings=settings)
    assert check_all(reference, runs.records()[2:-1]) == (0, None)
    assert reference.checked == 5


def test_one_weight(runs):
    """The message is complete, and the facts are attributes."""
    expected = runs.digests("epoch", 1).groups["weights"]["layers.0.bias"]
    before = runs.digests("initial", 0), runs.digests("epoch", 0)
    error, folder = find_error(runs, *before, changed(runs.digests("epoch", 1), "layers.0.bias"))
    assert str(error) == (
        "This run differs from its reference in epoch 1 (step 46) on rank 0: 1 of 12 entries "
        "differ, first in weights: layers.0.bias.\n"
        f"  reference: {expected[:16]}\n"
        f"  this run:  {'f' * 16}\n"
        "They last agreed in epoch 0 (step 23), so the cause lies after it.\n"
        f"Reference: {folder}/rank-0.jsonl"
    )
    assert (error.moment, error.epoch, error.step, error.rank) == ("epoch", 1, 46, 0)
    assert (error.group, error.names) == ("weights", ("layers.0.bias",))
    assert (error.count, error.total) == (1, 12)
    assert (error.expected, error.actual) == (expected, "f" * 32)


def test_several_groups_the_initial_weights_and_a_loss(runs):
    record = runs.digests("epoch", 0)
    record = changed(changed(record, *record.groups["weights"]), "0", group="schedulers")
    text = str(find_error(runs, record)[0])
    assert "5 of 12 entries differ, first in weights: layers.0.weight, layers.0.bias, " in text
    assert "layers.2.weight and 1 more.\n" in text
    assert "In all: weights 4 of 4, schedulers 1 of 1.\nNo earlier record was compared" in text
    text = str(find_error(runs, changed(runs.digests("initial", 0), "layers.0.bias"))[0])
    assert "differs from its reference in the initial state on rank 0" in text
    assert "Seed before the model is built: call lightning_d9m.enable(seed=...)" in text
    # A number is shown with all digits: one unit in the last place counts.
    error, _ = find_error(runs, runs.digests("epoch", 0, loss="0x1.5555555555556p-2"))
    assert "  reference: 0.3333333333333333\n  this run:  0.33333333333333337\n" in str(error)
    assert (error.expected, error.group) == ("0x1.5555555555555p-2", "loss")


def test_each_rank_is_compared_with_its_own(runs):
    def differ(rank, records):
        if rank == 1:
            records[3]["groups"]["weights"]["layers.0.bias"] = "a" * 32

    folder = runs.write(world_size=2, edit=differ)
    for rank in (0, 1):
        with closing(accepted(runs, folder, rank=rank, world_size=2)) as reference:
            difference = reference.check(runs.digests("epoch", 0))
        assert (difference is not None) == (rank == 1)
    assert reference.drift_error(difference).rank == 1


def test_an_edited_reference_is_found_when_the_record_is_reached(runs):
    folder = runs.write()
    path = rank_path(folder, 0)
    path.write_bytes(path.read_bytes().replace(b'"step":69', b'"step":68', 1))
    with closing(accepted(runs, folder)) as reference:
        reference.check(runs.digests("epoch", 0))
        with pytest.raises(LedgerError, match="line 6 "):
            reference.check(runs.digests("epoch", 1))


@pytest.mark.parametrize(
    ("reference", "run", "left"),
    [
        # Two epochs more, and a final state of another epoch.
        (
            {"epochs": 2},
            {"epochs": 4},
            "counterpart there and went unchecked; 1 record there had no counterpart in this run.",
        ),
        ({"edit": drop(slice(4, None))}, {}, "was itself ended before it could finish its ledger."),
    ],
    ids=["shorter", "killed"],
)
def test_a_reference_is_checked_as_far_as_it_goes_and_that_is_said(runs, reference, run, left):
    folder = runs.write(**reference)
    differing, unchecked = check_all(accepted(runs, folder), runs.records(**run)[2:-1])
    assert differing == 0
    assert unchecked.startswith(f"Compared with {folder}: ")
    assert unchecked.endswith(left)


def test_an_equal_run_with_ops_that_may_vary_says_so(runs):
    """Its end is a verdict, which must not hide them; without them it is silent."""
    settings = {"settings": {"varying_ops": "histc"}}
    reference = accepted(runs, runs.write(**settings), **settings)
    differing, said = check_all(reference, runs.records()[2:-1])
    assert differing == 0
    assert said.endswith(
        "Another run may differ: varying_ops lets histc run although they may vary."
    )
    assert check_all(accepted(runs, runs.write()), runs.records()[2:-1]) == (0, None)


def test_a_run_that_begins_later_finds_its_place(runs):
    reference = accepted(runs, runs.write(epochs=5))
    differing, unchecked = check_all(reference, runs.records(epochs=5)[6:-1])
    assert (differing, reference.checked) == (0, 3)
    assert "4 records there had no counterpart in this run" in unchecked


def test_a_record_that_the_reference_lacks_in_between_is_refused(runs):
    """A check that was asked for would be left out in silence."""
    with closing(accepted(runs, runs.write(edit=drop(4)))) as reference:
        reference.check(runs.digests("epoch", 0))
        with pytest.raises(ReferenceRefusedError) as caught:
            reference.check(runs.digests("epoch", 1))
    said = "has no record of epoch 1 (step 46); the next that it has is epoch 2 (step 69)"
    assert said in str(caught.value)
    assert caught.value.field == "records"


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

    def compare(self, exchange, disturb):
        """Return the difference that this rank finds at each of three records."""
        gather = Ranks(self.number, exchange).gather_json
        replicated = find_replicated_state(self.model, [self.optimizer], self.schedulers)
        agreement = RankAgreement(gather, replicated)
        for record in range(3):
            if record:
                self.step()
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
