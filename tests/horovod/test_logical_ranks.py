"""With logical ranks, horovodrun gives the same bits for every -np, and those of DDP."""

import pytest

from lightning_d9m import compare

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(900)]
COUNTS = (1, 3)
NETS = ("cnn", "branches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logical")


@pytest.fixture(scope="module")
def found(results, folder):
    """Return what each rank found, by the number of processes."""
    return {count: results(count, "logical.py", folder, folder) for count in COUNTS}


@pytest.mark.parametrize("net", NETS)
def test_every_number_of_processes_ends_with_the_same_bits(found, net):
    alone = found[1][0][net]
    assert alone["steps"] == (4 if net == "branches" else 6)  # which accumulates batches
    for count in COUNTS:
        assert found[count][0][net] == alone
        for rank in found[count]:
            assert rank[net]["digest"] == alone["digest"]


@pytest.mark.parametrize("net", NETS)
def test_the_ledgers_of_all_numbers_of_processes_agree(found, folder, net):
    assert found.keys() == set(COUNTS)
    alone, *others = (folder / f"horovod-{count}" / net / "1" for count in COUNTS)
    for other in others:
        assert compare(alone, other).equal


def test_the_bits_are_those_of_ddp(found):
    assert found[1][0]["ddp"] == found[1][0]["cnn"]


def test_more_processes_than_logical_ranks_are_refused_on_every_rank(found):
    for rank in found[3]:
        assert "There are 3 processes, but only 2 logical ranks" in rank["too many"]


def test_a_collective_of_horovod_in_a_step_is_refused_on_every_rank(found):
    for count in COUNTS:
        for rank in found[count]:
            assert rank["collective"].startswith(
                "horovod.torch.allreduce is called in the step of logical rank"
            )
