"""Lightning's whole surface on two ranks, from one launch."""

import pytest

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("surface")
    found = results(2, "surface.py", folder, folder)
    found[0]["late"] = (folder / "late.ckpt").exists()
    return found


def both(found, *keys):
    """Return the result of both ranks under these keys, which must be equal."""
    values = []
    for rank in found:
        value = rank
        for key in keys:
            value = value[key]
        values.append(value)
    assert values[0] == values[1]
    return values[0]


def test_lightning_knows_the_ranks(found):
    assert [rank["loops"]["ranks"] for rank in found] == [[0, 2, 0], [1, 2, 1]]
    assert [rank["loops"]["zero"] for rank in found] == [True, False]


def test_sampler_gives_each_rank_its_part(found):
    samplers = [rank["loops"]["samplers"] for rank in found]
    assert samplers == [["DistributedSampler", rank, 2] for rank in (0, 1)]


def test_logged_values_are_reduced_with_sync_dist(found):
    metrics = both(found, "loops", "metrics")
    assert (metrics["rank_mean"], metrics["rank_max"]) == (0.5, 1.0)
    both(found, "loops", "test")


def test_torchmetrics_gathers_uneven_states_in_rank_order(found):
    assert both(found, "loops", "values") == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_predict_gives_each_rank_its_part(found):
    assert both(found, "loops", "predicted") == 8


def test_checkpoints_are_written_once_and_known_to_all(found):
    assert "last.ckpt" in both(found, "loops", "files")
    assert both(found, "loops", "best").endswith(".ckpt")


def test_a_checkpoint_that_only_rank_0_saves_at_the_end_is_written(found):
    assert found[0]["late"]


def test_learning_rate_is_not_scaled(found):
    assert both(found, "loops", "lr") == 0.05


def test_collectives(found):
    """Plain objects are sent without pickle."""
    noted = both(found, "collectives")
    assert noted == {
        "all_gather": [[0.0] * 3, [1.0] * 3],
        "broadcast": True,
        "broadcast_1": ["from", 1],
        "reduce": [3],
        "decision": False,
        "horovod": 2.0,
    }


def test_odd_parameters_train_and_stay_equal(found):
    """One model has shared, complex, bfloat16, channels_last, sparse and unused parameters."""
    both(found, "parameters", "mixed")
    assert both(found, "parameters", "tied")
    assert both(found, "parameters", "unused_gradient")


def test_parameters_unfrozen_while_training_are_reduced(found):
    both(found, "parameters", "thawed")
    assert both(found, "parameters", "moved")


def test_probes_have_gradients_of_before_and_after_the_exchange(found):
    """The last gradient of a bucket is packed, and scaled, as soon as it arrives."""
    assert both(found, "probes") == {"batches": 4, "places": 12, "wrong": []}


def test_options_leave_the_ranks_equal(found):
    """Buckets change no bit; the other options do."""
    digests = {name: both(found, "options", name) for name in found[0]["options"]}
    assert digests["static"] == digests["small buckets"]
    assert len({digests[name] for name in ("static", "sum", "fp16", "bf16")}) == 4


def test_silent_mistakes_are_refused(found):
    assert "self.manual_backward(loss)" in both(found, "refusals", "stray")
    assert "sparse_as_dense=True" in both(found, "refusals", "sparse")
    assert "configure_model" in both(found, "refusals", "foreign")
