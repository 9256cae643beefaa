"""A training with logical ranks continues on another number of processes with the same bits."""

import re
from pathlib import Path

import pytest
from rank_processes import run_ranks, start_ranks

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


def read_digests(path):
    """Return the records of digests of a run, by rank."""
    ledger = read_ledger(path)
    records = {}
    for rank in ledger.files:
        with ledger.open(rank) as reader:
            found = (record for record in reader.records() if isinstance(record, Digests))
            records[rank] = [(record.moment, record.epoch, record) for record in found]
    return records


def check_continues(straight, resumed, count):
    expected = read_digests(straight)[0]
    assert [place[:2] for place in expected] == [
        ("initial", 0),
        *(("epoch", epoch) for epoch in range(3)),
        ("final", 2),
    ]
    records = read_digests(resumed)
    assert sorted(records) == list(range(count))
    for rank in records:
        assert records[rank] == expected
    assert compare(straight, resumed).equal


@pytest.mark.parametrize(
    ("name", "count"), [("batch2-2", 1), *((f"{place}-2", 3) for place in PLACES)]
)
def test_a_checkpoint_continues_on_another_number_of_processes(folder, name, count):
    check_continues(folder / "straight/2", folder / name / str(count), count)


def test_a_checkpoint_of_one_process_continues_on_three(folder):
    check_continues(folder / "straight/1", folder / "batch0-1/3", 3)


def test_a_run_whose_process_is_killed_goes_on_with_fewer(folder):
    statuses, outputs = start_ranks(SCRIPT, 3, folder, "killed")
    assert statuses[-1] == -9
    assert 0 not in statuses
    assert any(re.search(r"Rank 2 \(process \d+\) was killed or exited", text) for text in outputs)
    run_ranks(SCRIPT, 2, folder, "last")
    straight, resumed = folder / "straight/2", folder / "last/2"
    expected = read_digests(straight)[0][-1]
    assert read_digests(resumed)[0][-1] == read_digests(resumed)[1][-1] == expected
