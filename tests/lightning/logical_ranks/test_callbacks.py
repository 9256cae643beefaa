"""Callbacks that steer a training do the same on every number of processes with logical ranks."""

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

from lightning_d9m import compare

SCRIPT = Path(__file__).parents[2] / "support" / "logical_callbacks.py"
COUNTS = (1, 2, 3)
STEPS_OF_A_PROCESS = {"least_step", "mean_loss_step"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the ledgers, and with what each rank found."""
    path = tmp_path_factory.mktemp("callbacks")
    for count in COUNTS:
        run_ranks(SCRIPT, count, path)
    return path


@pytest.fixture(scope="module")
def found(folder):
    """Return what each rank found, by number of processes and rank."""
    return {
        (count, rank): json.loads((folder / f"found-{count}-{rank}.json").read_text())
        for count in COUNTS
        for rank in range(count)
    }


def list_values(found, training, key):
    """Return what the ranks of all numbers of processes found, without duplicates."""
    values = []
    for ranks in found.values():
        if ranks[training][key] not in values:
            values.append(ranks[training][key])
    return values


def test_early_stopping_stops_at_the_same_step(found):
    assert list_values(found, "steered", "stopped") == [[1, 6]]


def test_the_best_checkpoint_is_the_same(found):
    [[name, score]] = list_values(found, "steered", "best")
    assert name == f"epoch=1-val_loss={float.fromhex(score):.9f}.ckpt"
    for key in ("weights", "optimizer"):  # averages of weights are saved as the weights
        assert len(list_values(found, "steered", key)) == 1


def test_sums_that_are_rounded_in_each_process_lead_to_other_checkpoints(found):
    assert len(list_values(found, "control", "best")) > 1


def test_averaged_weights_are_tested_with_the_same_results(found):
    [metrics] = list_values(found, "steered", "test")
    assert [name for name in metrics if "epoch" in name] == [
        f"test_loss_epoch/dataloader_idx_{loader}" for loader in (0, 1)
    ]


def test_callbacks_read_the_same_metrics(found):
    fits = [
        {name: bits for name, bits in metrics.items() if name not in STEPS_OF_A_PROCESS}
        for metrics in list_values(found, "steered", "fit")
    ]
    assert {"loss", "loss_step", "val_loss", "val_cat"} <= fits[0].keys()
    assert all(metrics == fits[0] for metrics in fits)
    assert len({str(found[count, 0]["steered"]["fit"]) for count in COUNTS}) == 1


def test_hooks_get_the_same_numbers_of_batches_and_steps(found):
    def select(key, *, predict):
        calls = found[key]["steered"]["calls"]
        return [call for call in calls if (call[0] == "predict") is predict]

    expected = select((1, 0), predict=False)
    assert [call for call in expected if call[0] == "train end"] == [
        ["train end", epoch, 3 * epoch + batch + 1, batch] for epoch in (0, 1) for batch in range(3)
    ]
    assert {call[0] for call in expected} == {"train start", "train end", "validate", "test"}
    for key in found:
        assert select(key, predict=False) == expected
        # No sample is predicted twice, so processes with later logical ranks may have less to do.
        predictions = select((1, 0), predict=True)
        assert [call for call in predictions if call in select(key, predict=True)] == select(
            key, predict=True
        )
    assert all(select((count, 0), predict=True) == predictions for count in COUNTS)


def merge_predictions(found, count):
    """Return the digests of predictions by loader and indices, and the order of each process."""
    merged = {}
    for rank in range(count):
        steered = found[count, rank]["steered"]
        digests = iter(
            digest for part in steered["predictions"] for batch in part for digest in batch
        )
        for batch, loader, indices, written in steered["written"]:
            assert steered["indices"][loader][batch] == indices
            for samples, digest in zip(indices, written, strict=True):
                assert next(digests) == digest
                place = (loader, *samples)
                assert place not in merged
                merged[place] = digest
        assert next(digests, None) is None
    return merged


def test_every_sample_has_the_same_prediction(found):
    alone = merge_predictions(found, 1)
    for loader, size in enumerate((23, 11)):
        samples = [sample for first, *group in alone if first == loader for sample in group]
        assert sorted(samples) == list(range(size))
    assert len(set(alone.values())) == len(alone)
    for count in COUNTS[1:]:
        assert merge_predictions(found, count) == alone


def test_stochastic_weight_averaging_counts_statistics_of_batches(found):
    [averaged] = {json.dumps(ranks["swa"]) for ranks in found.values()}
    assert json.loads(averaged)["counted"] == 3  # batches of its last epoch, which has no steps


def test_the_mean_of_the_weights_is_the_same(found):
    [[trained, averaged]] = {tuple(ranks["mean"]) for ranks in found.values()}
    assert averaged != trained


@pytest.mark.parametrize("training", ["steered", "swa", "mean"])
def test_the_ledgers_agree(folder, training):
    runs = [folder / training / str(count) for count in COUNTS]
    assert all(compare(runs[0], run).equal for run in runs[1:])
