"""Lightning's whole surface on two ranks, from one launch."""

import pytest

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("surface")
    ranks = results(2, "surface.py", folder, folder)
    ranks[0]["late"] = (folder / "late.ckpt").exists()
    return ranks


@pytest.fixture(scope="module")
def found(ranks):
    """Return what both ranks have found, which is equal."""
    first, second = ({**rank, "loops": rank["loops"]["equal"], "late": None} for rank in ranks)
    assert first == second
    return first


def test_lightning_knows_the_ranks_and_the_sampler_gives_each_its_part(ranks):
    assert [rank["loops"]["ranks"] for rank in ranks] == [
        [0, 2, 0, True, "DistributedSampler", 0, 2],
        [1, 2, 1, False, "DistributedSampler", 1, 2],
    ]


def test_values_are_reduced_and_each_rank_predicts_its_part(found):
    """Torchmetrics gathers uneven states in rank order; the learning rate is not scaled."""
    loops = found["loops"]
    assert (loops["metrics"]["rank_mean"], loops["metrics"]["rank_max"]) == (0.5, 1.0)
    assert loops["values"] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert (loops["predicted"], loops["lr"]) == (8, 0.05)


def test_checkpoints_are_known_to_all_and_one_that_rank_0_saves_at_the_end_is_written(ranks, found):
    assert found["loops"]["saved"] == "last.ckpt"
    assert found["loops"]["best"].endswith(".ckpt")
    assert ranks[0]["late"]


def test_collectives(found):
    """Plain objects are sent without pickle."""
    assert found["collectives"] == {
        "all_gather": [[0.0] * 3, [1.0] * 3],
        "broadcast": True,
        "broadcast_1": ["from", 1],
        "reduce": [3],
        "decision": False,
        "horovod": 2.0,
    }


def test_odd_parameters_train_and_stay_equal(found):
    """One model has shared, complex, bfloat16, channels_last, sparse and unused parameters."""
    assert found["parameters"][1:] == [True, True]


def test_probes_have_gradients_of_before_and_after_the_exchange(found):
    """The last gradient of a bucket is packed, and scaled, as soon as it arrives."""
    assert found["probes"] == {"batches": 4, "places": 12, "wrong": []}


def test_silent_mistakes_are_refused(found):
    assert "self.manual_backward(loss)" in found["refusals"]["Stray"]
    assert "configure_model" in found["refusals"]["Foreign"]
