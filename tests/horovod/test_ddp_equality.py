"""With two ranks the strategy gives, bit for bit, the results of torch's DDP."""

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
SCENARIOS = ["plain", "accumulation", "clip_norm", "clip_value", "bf16", "branches", "manual"]


@pytest.fixture(scope="module")
def ours(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("horovod")
    return results(2, "train.py", folder, "horovod_d9m", folder, *SCENARIOS)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(SCRIPTS / "train.py", 2, "ddp", folder, *SCENARIOS)
    return json.loads((folder / "rank-0.json").read_text())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_weights_and_buffers_equal_those_of_ddp(ours, ddp, scenario):
    """Rank 0 has the same weights and steps as with DDP, with jitter in the gradients."""
    assert ours[0][scenario] == ddp[scenario]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_end_equal(ours, scenario):
    """Weights and buffers; DDP itself leaves the buffers of the last batch different."""
    assert ours[0][scenario] == ours[1][scenario]


def test_scenarios_differ(ours):
    """Clipping, accumulation and precision each change the weights."""
    digests = [ours[0][scenario]["digest"] for scenario in SCENARIOS]
    assert len(set(digests)) == len(SCENARIOS)


def test_accumulation_takes_fewer_steps(ours):
    """In two epochs of four batches, a step takes three batches, or the rest of an epoch."""
    assert ours[0]["accumulation"]["steps"] == 4
