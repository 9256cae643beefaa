"""The run that loops and Trainers record, also with ranks that are threads.

All raise together, whoever is at fault.
"""

import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from ledger_runs import make_facts, make_header
from msgspec.structs import replace
from rank_threads import RANKS, Threads

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import End, Evaluation, Resume
from lightning_d9m.engine.ledger.stack import SHARDED_PARAMETERS
from lightning_d9m.engine.probes.training import Training
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.rank_agreement import ReplicatedState
from lightning_d9m.engine.recording.run import Run, RunOptions
from lightning_d9m.errors import (
    D9mError,
    DriftError,
    LedgerError,
    SettingError,
    StackDifferenceError,
)

NOTE = Evaluation(name="a", epoch=0, step=0, batches=1, outputs="0" * 32)


def make_run(folder, ranks, *, stack="2", sharded=False, parent=None, **policy):
    """Return a run of a model of the two weights `a` and `b`, and the model."""
    model = torch.nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    stack = stack if isinstance(stack, dict) else {"torch": stack}
    world_size = 1 if ranks.is_alone else RANKS
    header = make_header(rank=ranks.rank, world_size=world_size, settings={}, stack=stack)
    replicated = None if sharded or ranks.is_alone else ReplicatedState(weights=["a", "b"])
    run = Run(RunOptions(**policy))
    if parent is not None:
        run.resume(parent, None, warnings.warn)
    facts = make_facts(train=[])
    run.begin(ranks, Training(model), lambda: (header, facts, replicated), lambda: folder)
    return run, model


def alone(folder, act, ranks=None, **policy):
    """Record as the only rank, or as one of several."""
    folder.mkdir(exist_ok=True)
    run, model = make_run(folder, ranks or Ranks(0), **policy)
    end = End(status="finished")
    try:
        return act(run, model)
    except D9mError as error:
        end = End.failed(error)
        raise
    finally:
        run.end(end)


def record_on_ranks(folder, act, **policy):
    """Let each rank record; return what each returned or raised."""
    threads = Threads()

    def one(rank):
        try:
            return alone(folder, act, Ranks(rank, threads.exchange_of(rank)), **policy)
        except D9mError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def clean(run, model):
    return [run.record("epoch", epoch=epoch, step=epoch) for epoch in range(3)]


def one_bit_on_rank_1(run, model):
    counts = []
    for epoch in range(3):
        if (run.ranks.rank, epoch) == (1, 2) or (run.ranks.is_alone and epoch == 2):
            model["b"].data[0] = 2.0**-149
        counts.append(run.record("epoch", epoch=epoch, step=epoch))
    return counts


def test_ranks_that_agree_leave_whole_ledgers_and_one_that_differs_is_named_on_all(tmp_path):
    assert record_on_ranks(tmp_path / "a", clean) == [[0, 0, 0]] * RANKS
    ledger = read_ledger(tmp_path / "a")
    assert list(ledger.files) == [0, 1, 2]
    assert all(ledger.outcome(rank).end.status == "finished" for rank in range(RANKS))
    errors = record_on_ranks(tmp_path / "b", one_bit_on_rank_1)
    assert all(isinstance(error, DriftError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert (errors[0].rank, errors[0].names, errors[0].epoch) == (1, ("b",), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = record_on_ranks(tmp_path / "c", one_bit_on_rank_1, on_drift="warn")
    assert counts == [[0, 0, 1]] * RANKS
    # On the rank that differs, and on rank 0, whose output is the one that people read.
    assert ["Rank 1 differs from rank 0" in str(w.message) for w in caught] == [True] * 2


def test_drift_from_the_reference_on_one_rank_stops_all_or_is_counted_on_all(tmp_path):
    record_on_ranks(tmp_path / "reference", clean)

    act, policy = one_bit_on_rank_1, {"sharded": True, "reference": tmp_path / "reference"}
    errors = record_on_ranks(tmp_path / "raises", act, **policy)
    assert [error.rank for error in errors] == [1, 1, 1]
    assert errors[1].names == ("b",)
    assert "reference:" in str(errors[1])
    assert "in the message of rank 1" in str(errors[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = record_on_ranks(tmp_path / "a", act, on_drift="warn", **policy)
    assert sum("Rank 1 differs from its reference" in str(w.message) for w in caught) == 1
    assert counts == [[0, 0, 1]] * RANKS


@pytest.mark.parametrize("fault", ["write", "append", "verify"])
def test_what_fails_on_one_rank_stops_all_at_the_next_moment(tmp_path, fault):
    """A ledger that cannot be written, or a switch that this rank has lost."""

    def act(run, model):
        if run.ranks.rank == 1 and fault != "verify":
            run._writer.close()
        for batch in range(3 * (fault == "append")):  # no rank waits for another here
            run.append(replace(NOTE, batches=batch))
        if fault == "verify":
            return run.record("epoch", epoch=0, step=0, verify=partial(lose_switch, run.ranks.rank))
        return clean(run, model)

    errors = record_on_ranks(tmp_path / "a", act)
    assert isinstance(errors[1], SettingError if fault == "verify" else LedgerError)
    assert "Rank 1 failed, so this rank 2 stops too" in str(errors[2])


def lose_switch(rank):
    if rank == 1:
        raise SettingError("it is off")


def test_another_stack_is_named_before_any_drift(tmp_path):
    alone(tmp_path / "reference", clean)
    policy = {"reference": tmp_path / "reference"}
    with pytest.raises(StackDifferenceError) as caught:
        alone(tmp_path / "a", one_bit_on_rank_1, stack="3", **policy)
    assert caught.value.differences == (("torch", "2", "3"),)
    with pytest.warns(UserWarning, match="torch"):
        alone(tmp_path / "b", clean, stack="3", on_stack_difference="warn", **policy)
    assert (
        alone(tmp_path / "c", clean, stack="3", on_stack_difference="ignore", **policy) == [0] * 3
    )


def test_a_reference_that_ends_early_is_said_at_the_end(tmp_path):
    alone(tmp_path / "reference", lambda run, _: run.record("epoch", epoch=0, step=0))
    with pytest.warns(UserWarning, match="2 records of this run, from epoch 1 .*went unchecked"):
        assert alone(tmp_path / "a", clean, reference=tmp_path / "reference") == [0, 0, 0]


def test_a_closed_run_takes_nothing_and_an_open_one_is_pickled_as_closed(tmp_path):
    closed, checks = Run(RunOptions()), []
    assert (closed.is_open, closed.compares, closed.ledger_position) == (False, False, None)
    closed.append(NOTE)  # ignored while no ledger is open
    run, _ = make_run(tmp_path, Ranks(0))
    run.append(NOTE)
    run.record("epoch", epoch=0, step=1, verify=lambda: checks.append("called"))
    run.record("final", epoch=0, step=1)
    assert (run.is_open, checks) == (True, ["called"])
    assert not pickle.loads(pickle.dumps(run)).is_open  # noqa: S301 - our own
    for _ in range(2):
        run.end(End(status="finished"))
    assert not run.is_open
    _, note, _, final, end = read_ledger(tmp_path).records(0)
    assert (note.name, end.status, final.totals["weights"]) == ("a", "finished", run.digest)


def stop(run, _):
    run.stop = 4
    for step in (3, 4):
        run.end_step(0, step)


ENDS = {
    "it finished": (lambda run, _: run.record("final", epoch=2, step=5), {}, (2, 5)),
    "an exception": (lambda run, _: run.record_exception(epoch=1, step=7), {}, (1, 7)),
    "an exception of shards": (
        lambda run, _: run.record_exception(epoch=1, step=7), {"stack": {SHARDED_PARAMETERS: 1}},
        (1, 7),
    ),
    "a segment": (stop, {}, (0, 4)),
    "steps that other runs need not record": (
        lambda run, _: (run.note_save(2), run.end_step(0, 3)), {}, (0, 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("act", "words", "place"), ENDS.values(), ids=ENDS)
def test_the_end_has_the_place_of_the_last_state(tmp_path, act, words, place):
    alone(tmp_path / "a", act, **words)
    end = read_ledger(tmp_path / "a").outcome(0).end
    assert (end.epoch, end.step) == place


def test_a_resumed_run_that_records_nothing_ends_where_it_began(tmp_path):
    parent = Resume(parent="", parent_check="", epoch=3, step=9, batch=0)
    run, _ = make_run(tmp_path, Ranks(0), parent=parent)
    run.end(End(status="failed"))
    end = read_ledger(tmp_path).outcome(0).end
    assert (end.epoch, end.step) == (3, 9)
