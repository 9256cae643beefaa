"""Trainings on 1, 2, 3 and 8 processes have the same ledgers with logical ranks.

They continue on another number of processes with the same bits.
"""

import json
import re
from pathlib import Path

import pytest
from logical_trainings import LARGE, TRAININGS
from rank_processes import read_records, run_ranks, start_ranks

from lightning_d9m import compare, read_ledger
from lightning_d9m.engine.ledger.format.records import Digests, Evaluation

SCRIPT = Path(__file__).parents[2] / "support" / "logical_trainings.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the ledgers of all trainings, by name and number of processes."""
    path = tmp_path_factory.mktemp("trainings")
    for count in (1, 2, *LARGE):
        run_ranks(SCRIPT, count, path)
    return path


def final_totals(folder, name):
    """Return the last digests of rank 0 on one process and on two."""
    return [read_records(folder / name / str(count), Digests)[0][-1] for count in (1, 2)]


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
    one, two = final_totals(folder, "control")
    assert one == two


@pytest.mark.parametrize(
    "name", ["left to right", "one batch", "process rng", "sampler", "threads"]
)
def test_without_one_part_of_it_the_weights_differ(folder, name):
    one, two = final_totals(folder, name)
    assert one.totals["weights"] != two.totals["weights"]


def test_buffers_that_are_not_put_back_change_no_weight(folder):
    one, two = final_totals(folder, "buffers")
    assert one.totals["weights"] == two.totals["weights"]
    assert one.totals["buffers"] != two.totals["buffers"]
    assert one.scalars["val_loss"] != two.scalars["val_loss"]


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


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the folder with the ledgers of an uninterrupted run, and of resumed ones."""
    path = tmp_path_factory.mktemp("resumed")
    run_ranks(SCRIPT, 2, path, "straight")
    run_ranks(SCRIPT, 1, path, "straight", "batch2-2")
    run_ranks(SCRIPT, 3, path, "epoch-2", "batch0-2", "batch2-2", "batch0-1")
    return path


@pytest.mark.parametrize(
    ("name", "before", "count"),
    [("batch2", 2, 1), ("batch0", 1, 3), ("epoch", 2, 3), ("batch0", 2, 3), ("batch2", 2, 3)],
)
def test_a_checkpoint_continues_on_another_number_of_processes(resumed, name, before, count):
    straight, again = resumed / f"straight/{before}", resumed / f"{name}-{before}" / str(count)
    expected = read_records(straight, Digests)[0]
    moments = ["initial", "epoch", "epoch", "epoch", "final"]
    assert [record.moment for record in expected] == moments
    assert read_records(again, Digests) == dict.fromkeys(range(count), expected)
    assert compare(straight, again).equal


def test_a_run_whose_process_is_killed_goes_on_with_fewer(resumed):
    statuses, outputs = start_ranks(SCRIPT, 3, resumed, "killed")
    assert statuses[-1] == -9
    assert 0 not in statuses
    words = r"Rank 2 \(process \d+\) was killed or exited"
    assert any(re.search(words, text) for text in outputs)
    assert re.search(words, read_ledger(resumed / "killed/3/fit-000").outcome(0).end.error)
    run_ranks(SCRIPT, 2, resumed, "batch1-3")
    expected = read_records(resumed / "straight/2", Digests)[0][-1]
    again = read_records(resumed / "batch1-3/2", Digests)
    assert again[0][-1] == again[1][-1] == expected
