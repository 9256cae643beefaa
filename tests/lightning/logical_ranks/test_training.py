"""Trainings on 1, 2, 3 and 8 processes have the same ledgers with logical ranks."""

import json
from pathlib import Path

import pytest
from logical_trainings import LARGE, TRAININGS
from rank_processes import read_records, run_ranks

from lightning_d9m import compare
from lightning_d9m.ledger.format.records import Digests, Evaluation

SCRIPT = Path(__file__).parents[2] / "support" / "logical_trainings.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the ledgers of all trainings, by name and number of processes."""
    path = tmp_path_factory.mktemp("trainings")
    for count in (1, 2, *LARGE):
        run_ranks(SCRIPT, count, path)
    return path


def final_totals(folder, name):
    """Return the last digests of rank 0, by the number of processes."""
    totals = {}
    for count in (1, 2):
        totals[count] = read_records(folder / name / str(count), Digests)[0][-1]
    return totals


@pytest.mark.parametrize("name", TRAININGS)
def test_the_whole_ledger_is_the_same_on_every_number_of_processes(folder, name):
    runs = {int(run.name): run for run in (folder / name).iterdir()}
    assert sorted(runs) == [1, 2, *(count for count in LARGE if LARGE[count] == name)]
    expected = read_records(runs[1], Digests | Evaluation)[0]
    moments = [record.moment for record in expected if isinstance(record, Digests)]
    assert moments == ["initial", "epoch", "epoch", "final"]
    assert len(expected) == 6  # and two validations
    for count, run in runs.items():
        records = read_records(run, Digests | Evaluation)
        assert sorted(records) == list(range(count))
        for rank in records:
            assert records[rank] == expected, f"rank {rank} of {count}"
        assert compare(runs[1], run).equal


def test_the_controls_start_from_a_training_that_agrees(folder):
    assert len({str(record) for record in final_totals(folder, "control").values()}) == 1


@pytest.mark.parametrize(
    "name", ["left to right", "one batch", "process rng", "sampler", "threads"]
)
def test_without_one_part_of_it_the_weights_differ(folder, name):
    totals = final_totals(folder, name)
    assert len({record.totals["weights"] for record in totals.values()}) > 1


def test_buffers_that_are_not_put_back_change_no_weight(folder):
    totals = final_totals(folder, "buffers").values()
    assert len({record.totals["weights"] for record in totals}) == 1
    assert len({record.totals["buffers"] for record in totals}) == 2
    assert len({record.scalars["val_loss"] for record in totals}) == 2


@pytest.fixture(scope="module")
def found(folder):
    """Return what each rank found in trainings that callbacks steer, by number of processes."""
    return {
        count: [json.loads((folder / f"found-{count}-{n}.json").read_text()) for n in range(count)]
        for count in (1, 2)
    }


@pytest.mark.parametrize("key", ["stopped", "best", "saved", "fit", "test", "calls", "swa"])
def test_callbacks_find_the_same_on_every_rank(found, key):
    assert {json.dumps(rank[key]) for ranks in found.values() for rank in ranks} == {
        json.dumps(found[1][0][key])
    }


def test_callbacks_steer_the_training(found):
    steered = found[1][0]
    name, score = steered["best"]
    assert steered["stopped"] == [1, 6]
    assert name == f"epoch=1-val_loss={float.fromhex(score):.9f}.ckpt"
    assert {"loss", "loss_step", "val_loss", "val_cat"} <= steered["fit"].keys()
    assert [call for call in steered["calls"] if call[0] == "train"] == [
        ["train", epoch, 3 * epoch + batch + 1, batch, 0] for epoch in (0, 1) for batch in range(3)
    ]
    assert steered["swa"][1] == 3  # batches of its last epoch, which has no steps


def test_every_sample_is_predicted_once_and_alike(found):
    (alone,) = (rank["predicted"] for rank in found[1])
    assert len(alone) == len({*alone.values()}) == 23 + 11
    for ranks in found.values():
        assert sum(len(rank["predicted"]) for rank in ranks) == len(alone)
        assert {k: v for rank in ranks for k, v in rank["predicted"].items()} == alone


@pytest.mark.parametrize("training", ["steered", "swa"])
def test_the_ledgers_of_steered_trainings_agree(folder, training):
    runs = [folder / training / str(count) for count in (1, 2)]
    assert compare(*runs).equal
