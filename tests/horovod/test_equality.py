"""With two ranks the strategy gives, bit for bit, the results of torch's DDP.

With logical ranks it gives those of one process.
"""

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

from lightning_d9m import compare

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
SCENARIOS = ["plain", "accumulation", "clip_norm", "clip_value", "bf16", "branches", "manual"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("horovod")


@pytest.fixture(scope="module")
def ours(results, folder):
    return results(2, "train.py", folder, "horovod_d9m", folder, *SCENARIOS, "logical")


@pytest.fixture(scope="module")
def expected(folder):
    found = {}
    for count, strategy, scenarios in ((2, "ddp", SCENARIOS), (1, "ddp_d9m", ["logical"])):
        own = folder / strategy
        own.mkdir()
        run_ranks(SCRIPT, count, strategy, own, *scenarios)
        found |= json.loads((own / "rank-0.json").read_text())
    return found


@pytest.mark.parametrize("scenario", [*SCENARIOS, "logical"])
def test_every_rank_ends_with_the_expected_weights_and_buffers(ours, expected, scenario):
    """Also with jitter in the gradients; DDP itself leaves the last buffers different."""
    assert ours[0][scenario] == ours[1][scenario] == expected[scenario]


def test_the_ledger_with_logical_ranks_is_that_of_one_process(ours, expected, folder):
    assert ours[0]["logical"]["steps"] == expected["logical"]["steps"] == 4
    assert compare(folder / "ddp_d9m" / "fit-000", folder / "fit-000").equal


def test_scenarios_differ(ours):
    """Clipping, accumulation and precision each change the weights."""
    assert len({ours[0][scenario]["digest"] for scenario in SCENARIOS}) == len(SCENARIOS)
    # In two epochs of four batches, a step takes three batches, or the rest of an epoch.
    assert ours[0]["accumulation"]["steps"] == 4
