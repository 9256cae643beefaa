"""With logical ranks, horovodrun gives the bits of DDP on one process."""

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

from lightning_d9m import compare

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parent / "scripts" / "logical.py"
NETS = ("cnn", "branches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logical")


@pytest.fixture(scope="module")
def ranks(results, folder):
    """Return what each of three ranks of Horovod found."""
    return results(3, "logical.py", folder, folder)


@pytest.mark.parametrize("net", NETS)
def test_every_rank_ends_with_the_bits_of_one_process(ranks, folder, net):
    if not (folder / "1").exists():
        run_ranks(SCRIPT, 1, folder / "1")
    alone = json.loads((folder / "1" / "rank-0.json").read_text())
    assert alone[net]["steps"] == (4 if net == "branches" else 6)  # which accumulates batches
    assert alone["cnn"]["digest"] != alone["branches"]["digest"]
    assert ranks[0][net] == alone[net]
    assert {rank[net]["digest"] for rank in ranks} == {alone[net]["digest"]}
    assert compare(folder / "1" / net / "1", folder / net / "1").equal


def test_what_is_refused_is_refused_on_every_rank(ranks):
    for rank in ranks:
        assert "There are 3 processes, but only 2 logical ranks" in rank["too many"]
        collective = "horovod.torch.allreduce is called in the step of logical rank"
        assert rank["collective"].startswith(collective)
