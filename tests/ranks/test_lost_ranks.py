"""With DDP, the error of a rank names the rank that was lost."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rank_processes import start_ranks
from torch import distributed

from lightning_d9m.errors import RankLostError
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ranks.liveness import (
    RankLiveness,
    add_lost_ranks,
    identify_process,
    lost_ranks_named,
)

SCRIPT = Path(__file__).parents[1] / "support" / "lost_rank_training.py"
GLOO_ERROR = "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


STATES = {
    "killed": "was killed or exited.",
    "hung": "runs, but did not respond within 3 s: it hangs.",
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Lose a rank in each way at the same time: mostly the other rank waits for it.

    Returns:
        By the way, the folder, the statuses and the output of a launch.
    """
    folders = {way: tmp_path_factory.mktemp("lost") / way for way in STATES}
    for folder in folders.values():
        folder.mkdir()
    with ThreadPoolExecutor(len(folders)) as pool:
        ended = pool.map(lambda folder: start_ranks(SCRIPT, 2, folder), folders.values())
        return {way: (folders[way], *end) for way, end in zip(folders, ended, strict=True)}


@pytest.mark.parametrize("way", STATES)
def test_a_lost_rank_is_named_by_the_survivor_and_in_its_ledger(launches, way):
    """Whatever the load: rank 0 never gets an answer, and reads the state of the process.

    The training whose rank is killed has logical ranks.
    """
    folder, statuses, output = launches[way]
    assert statuses == [0, -signal.SIGKILL], output
    sentence = f"Rank 1 (process {(folder / 'pid-1').read_text()}) {STATES[way]}"
    error = (folder / "error-0").read_text()
    assert sentence in error.splitlines()[-1]
    assert error.startswith("lost (1,): Rank 0 waited for ") is (way == "killed")
    outcome = read_ledger(folder / "d9m" / "fit-000").outcome(0)
    assert sentence in outcome.end.error


@pytest.fixture
def liveness():
    """Return the liveness of two ranks in one process."""
    store, processes = distributed.HashStore(), [identify_process()] * 2
    return [RankLiveness(store, rank, processes, limit_seconds=0.1) for rank in range(2)]


def test_an_error_of_another_rank_is_named(liveness):
    add_lost_ranks(ValueError("the third batch is bad"), liveness[1])
    error = RuntimeError(GLOO_ERROR)
    add_lost_ranks(error, liveness[0])
    assert str(error) == f"{GLOO_ERROR}\nRank 1 ended with ValueError: the third batch is bad."


@pytest.mark.parametrize("error", [RuntimeError("a bad shape"), ValueError(GLOO_ERROR)])
def test_an_error_that_no_collective_raised_is_left_alone(liveness, error):
    before = str(error)
    add_lost_ranks(error, liveness[0])
    add_lost_ranks(error, None)
    assert str(error) == before


def test_without_a_table_of_ranks_the_error_of_a_collective_says_where_to_look():
    with (
        pytest.raises(RankLostError, match=r"Rank 0 waited for the sum, .* Another rank has ended"),
        lost_ranks_named("the sum", 0, None),
    ):
        raise RuntimeError(GLOO_ERROR)
    with (
        pytest.raises(RuntimeError, match=r"^out of memory$"),
        lost_ranks_named("the sum", 0, None),
    ):
        raise RuntimeError("out of memory")
