"""A training with logical ranks continues on another number of processes with the same bits."""

import re
from pathlib import Path

import pytest
from rank_processes import read_records, run_ranks, start_ranks

from lightning_d9m import compare, read_ledger
from lightning_d9m.ledger.format.records import Digests

SCRIPT = Path(__file__).parents[2] / "support" / "logical_resuming.py"
PLACES = ("epoch", "batch0", "batch2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the ledgers of an uninterrupted run, and of resumed ones."""
    path = tmp_path_factory.mktemp("resumed")
    from_two = [f"{place}-2" for place in PLACES]
    run_ranks(SCRIPT, 2, path, "straight")
    run_ranks(SCRIPT, 1, path, "straight", from_two[-1])
    run_ranks(SCRIPT, 3, path, *from_two, "batch0-1")
    return path


@pytest.mark.parametrize(
    ("name", "before", "count"),
    [("batch2", 2, 1), ("batch0", 1, 3), *((place, 2, 3) for place in PLACES)],
)
def test_a_checkpoint_continues_on_another_number_of_processes(folder, name, before, count):
    straight, resumed = folder / f"straight/{before}", folder / f"{name}-{before}" / str(count)
    expected = read_records(straight, Digests)[0]
    moments = ["initial", "epoch", "epoch", "epoch", "final"]
    assert [record.moment for record in expected] == moments
    assert read_records(resumed, Digests) == dict.fromkeys(range(count), expected)
    assert compare(straight, resumed).equal


def test_a_run_whose_process_is_killed_goes_on_with_fewer(folder):
    statuses, outputs = start_ranks(SCRIPT, 3, folder, "killed")
    assert statuses[-1] == -9
    assert 0 not in statuses
    words = r"Rank 2 \(process \d+\) was killed or exited"
    assert any(re.search(words, text) for text in outputs)
    assert re.search(words, read_ledger(folder / "killed/3/fit-000").outcome(0).end.error)
    run_ranks(SCRIPT, 2, folder, "batch1-3")
    expected = read_records(folder / "straight/2", Digests)[0][-1]
    resumed = read_records(folder / "batch1-3/2", Digests)
    assert resumed[0][-1] == resumed[1][-1] == expected
