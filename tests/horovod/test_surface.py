"""Lightning's whole surface on two ranks, from one launch."""

import pytest

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("surface")


@pytest.fixture(scope="module")
def ranks(results, folder):
    return results(2, "surface.py", folder, folder)


@pytest.fixture(scope="module")
def found(ranks):
    """Return what both ranks have found, which is equal."""
    assert ranks[0]["found"] == ranks[1]["found"]
    return ranks[0]["found"]


def test_lightning_knows_the_ranks_and_the_sampler_gives_each_its_part(ranks):
    assert [rank["ranks"] for rank in ranks] == [
        [0, 2, 0, True, "DistributedSampler", 0, 2],
        [1, 2, 1, False, "DistributedSampler", 1, 2],
    ]


def test_values_are_reduced_and_each_rank_predicts_its_part(found):
    """Torchmetrics gathers uneven states in rank order; the learning rate is not scaled."""
    assert (found["metrics"]["rank_mean"], found["metrics"]["rank_max"]) == (0.5, 1.0)
    assert found["values"] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert (found["predicted"], found["lr"]) == (8, 0.05)


def test_checkpoints_are_known_to_all_and_one_that_rank_0_saves_at_the_end_is_written(
    folder, found
):
    assert found["saved"] == "last.ckpt"
    assert found["best"].endswith(".ckpt")
    assert (folder / "late.ckpt").exists()


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


def test_probes_have_gradients_of_before_and_after_the_exchange(found):
    """The last gradient of a bucket is packed, and scaled, as soon as it arrives."""
    assert found["probes"] == {"batches": 4, "places": 12, "wrong": []}


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("stray", "self.manual_backward(loss)"),
        ("foreign", "configure_model"),
        ("collective", "horovod.torch.allreduce is called in the step of logical rank"),
        ("too many", "There are 2 processes, but only 1 logical ranks"),
    ],
)
def test_silent_mistakes_are_refused(ranks, mistake, words):
    assert all(words in rank["refusals"][mistake] for rank in ranks)
