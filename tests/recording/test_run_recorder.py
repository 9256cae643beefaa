"""The recorder that loops and Trainers share, also with ranks that are threads.

All raise together, whoever is at fault.
"""

import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rank_threads import RANKS, Threads

from lightning_d9m.control.settings import Settings
from lightning_d9m.errors import D9mError, DriftError, LedgerError, StackDifferenceError
from lightning_d9m.ledger.folder import create_ledger_folder, read_ledger
from lightning_d9m.ledger.format.records import Digests, End, Header, RunFacts
from lightning_d9m.probes.batch_probes import Training
from lightning_d9m.ranks.ranks import Ranks
from lightning_d9m.recording.rank_agreement import ReplicatedState
from lightning_d9m.recording.run_recorder import (
    RunOptions,
    RunRecorder,
    describe_training,
)

NOTE = {"kind": "evaluation", "name": "a", "epoch": 0, "step": 0, "outputs": "0" * 32}
FACTS = RunFacts(model="m", parameters=2, train=[])


def header(rank, **changes):
    words = {"rank": rank, "world_size": RANKS, "fit": 0, "seed": 1, "created": "", "package": "0"}
    return Header(**(words | {"settings": {}, "stack": {"torch": "2"}} | changes))


def digests(epoch, **weights):
    entries = {name: f"{value:032x}" for name, value in ({"a": 1, "b": 2} | weights).items()}
    return Digests(moment="epoch", epoch=epoch, step=epoch, totals={}, groups={"weights": entries})


def begin(recorder, folder, described, ranks):
    recorder.begin(ranks, Training(torch.nn.Module()), lambda: described, lambda: folder)


def run(folder, act, **policy):
    """Let each rank record; return what each returned or raised."""
    folder.mkdir()
    threads = Threads()

    def one(rank):
        recorder = RunRecorder(RunOptions(**policy))
        described = header(rank), FACTS, ReplicatedState(weights=["a", "b"])
        try:
            begin(recorder, folder, described, Ranks(rank, threads.exchange_of(rank)))
            result = act(recorder, rank)
        except D9mError as error:
            recorder.end(End(status="failed", error=str(error)))
            return error
        recorder.end(End(status="finished"))
        return result

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def clean(recorder, rank):
    return [recorder.record(digests(epoch)) for epoch in range(3)]


def one_bit_on_rank_1(recorder, rank):
    return [
        recorder.record(digests(epoch, b=3 if (rank, epoch) == (1, 2) else 2)) for epoch in range(3)
    ]


def test_ranks_that_agree_leave_whole_ledgers(tmp_path):
    assert run(tmp_path / "a", clean) == [[0, 0, 0]] * RANKS
    ledger = read_ledger(tmp_path / "a")
    assert list(ledger.files) == [0, 1, 2]
    assert all(ledger.outcome(rank).end.status == "finished" for rank in range(RANKS))


def test_one_rank_that_differs_raises_the_same_on_all(tmp_path):
    errors = run(tmp_path / "a", one_bit_on_rank_1)
    assert all(isinstance(error, DriftError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert (errors[0].rank, errors[0].names, errors[0].epoch) == (1, ("b",), 2)


def test_on_drift_warn_says_it_and_goes_on(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = run(tmp_path / "a", one_bit_on_rank_1, on_drift="warn")
    assert counts == [[0, 0, 1]] * RANKS
    # On the rank that differs, and on rank 0, whose output is the one that people read.
    assert ["Rank 1 differs from rank 0" in str(w.message) for w in caught] == [True] * 2


def test_drift_from_the_reference_on_one_rank_stops_all_or_is_counted_on_all(tmp_path):
    run(tmp_path / "reference", clean)

    def act(recorder, rank):
        recorder._agreement = None  # as with sharded weights, which ranks do not compare
        return one_bit_on_rank_1(recorder, rank)

    errors = run(tmp_path / "raises", act, reference=tmp_path / "reference")
    assert [error.rank for error in errors] == [1, 1, 1]
    assert errors[1].names == ("b",)
    assert "reference:" in str(errors[1])
    assert "in the message of rank 1" in str(errors[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = run(tmp_path / "a", act, reference=tmp_path / "reference", on_drift="warn")
    assert sum("Rank 1 differs from its reference" in str(w.message) for w in caught) == 1
    assert counts == [[0, 0, 1]] * RANKS


def test_a_ledger_that_fails_on_one_rank_stops_all(tmp_path):
    def act(recorder, rank):
        if rank == 2:
            recorder._writer.close()
        return clean(recorder, rank)

    errors = run(tmp_path / "a", act)
    assert isinstance(errors[2], LedgerError)
    assert "Rank 2 failed, so this rank 0 stops too" in str(errors[0])


def test_a_record_of_probes_that_cannot_be_written_stops_all_at_the_next_moment(tmp_path):
    def act(recorder, rank):
        if rank == 1:
            recorder._writer.close()
        for batch in range(3):  # no rank waits for another here
            recorder.append(NOTE | {"batches": batch})
        return clean(recorder, rank)

    errors = run(tmp_path / "a", act)
    assert isinstance(errors[1], LedgerError)
    assert "Rank 1 failed" in str(errors[2])


def alone(folder, act, *, stack="2", **policy):
    """Record as the only rank."""
    folder.mkdir()
    recorder = RunRecorder(RunOptions(**policy))
    described = header(0, world_size=1, stack={"torch": stack}), FACTS, None
    try:
        begin(recorder, folder, described, Ranks(0))
        return act(recorder, 0)
    finally:
        recorder.end(End(status="finished"))


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
    alone(tmp_path / "reference", lambda recorder, rank: recorder.record(digests(0)))
    with pytest.warns(UserWarning, match="2 records of this run, from epoch 1 .*went unchecked"):
        assert alone(tmp_path / "a", clean, reference=tmp_path / "reference") == [0, 0, 0]


def test_a_training_is_recorded_and_the_closed_recorder_pickled(tmp_path):
    model = torch.nn.Linear(2, 1)
    run = RunRecorder(RunOptions())
    settings = Settings(seed=3)
    training = Training(model)
    described = describe_training(Ranks(0), settings, {"world.size": 1}, training, fit=2)
    assert (run.is_open, run.compares, run.ledger_position, run.loss_text) == (False,) * 2 + (
        None,
        None,
    )
    run.append({"kind": "ignored while no ledger is open"})
    folder = tmp_path / "ledgers"
    run.begin(Ranks(0), training, lambda: described, lambda: create_ledger_folder(folder))
    run.load_loss((0.25).hex())
    checks = []
    digests = run.take("epoch", epoch=0, step=1, verify=lambda: checks.append("called"))
    assert (run.record(digests), checks) == (0, ["called"])
    assert list(digests.sketches) == ["weight", "bias"]
    assert not run.take("final", epoch=0, step=1).sketches
    assert run.is_open
    copied = pickle.loads(pickle.dumps(run))  # noqa: S301 - our own
    assert (copied.is_open, copied.digest, copied.folder) == (False, run.digest, run.folder)
    run.end(End(status="finished"))
    run.end(End(status="finished"))
    assert (run.is_open, run.loss) == (False, None)
    outcome = read_ledger(run.folder).outcome(0)
    assert (outcome.last.loss, outcome.last.totals["weights"]) == ((0.25).hex(), run.digest)
    assert outcome.last.sketches == digests.sketches
    assert (outcome.end.status, read_ledger(run.folder).header.seed) == ("finished", 3)
