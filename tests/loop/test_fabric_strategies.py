"""Loops of Fabric under its strategies; docs/strategies.md names these tests."""

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

from lightning_d9m import compare, read_ledger
from lightning_d9m.comparison.rank_drift import find_rank_drift

SCRIPT = Path(__file__).parents[1] / "support" / "fabric_training.py"
REPLICATED = ["single device", "ddp"]
SHARDED = ["fsdp1", "fsdp2", "fsdp2, full checkpoints", "tp", "tp, full checkpoints"]
ALL = [*REPLICATED, *SHARDED]
WEIGHTS = ["0.bias", "0.weight", "3.bias", "3.weight"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train every cell once for all tests."""
    folder = tmp_path_factory.mktemp("fabric")
    run_ranks(SCRIPT, 1, folder, ALL[0])
    run_ranks(SCRIPT, 2, folder, *ALL[1:])
    return folder


@pytest.fixture
def cell(request, trained):
    """Return the folder of a cell, and what each rank found."""
    folder = trained / request.param
    return folder, [json.loads(file.read_text()) for file in sorted(folder.glob("found-*.json"))]


def ledger(folder, name="first"):
    return read_ledger(folder / name / "fit-000")


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_two_loops_agree_on_every_rank(cell):
    folder, found = cell
    assert [entry["second"] for entry in found] == [None] * len(found)
    comparison = compare(ledger(folder), ledger(folder, "second"))
    assert (comparison.verdict, len(comparison.ranks)) == ("equal", len(found))
    assert sorted(ledger(folder).outcome(len(found) - 1).last.groups["weights"]) == WEIGHTS


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_a_change_on_one_rank_of_a_loop_differs_from_the_reference(cell):
    _, found = cell
    for error in (entry["fault"] for entry in found):
        assert (error["type"], error["epoch"]) == ("DriftError", "1")
    assert "0.weight" in found[-1]["fault"]["names"]


@pytest.mark.parametrize("cell", ["ddp"], indirect=True)
def test_copies_of_a_loop_that_differ_raise_on_all_ranks(cell):
    _, found = cell
    for error in (entry["fault without reference"] for entry in found):
        assert (error["type"], error["names"]) == ("DriftError", "('0.weight',)")


@pytest.mark.parametrize("cell", SHARDED, indirect=True)
def test_shards_of_a_loop_are_not_compared_with_each_other(cell):
    folder, found = cell
    assert [entry["fault without reference"] for entry in found] == [None] * len(found)
    assert find_rank_drift(ledger(folder)) == ()
    assert ledger(folder).header.stack["world.sharded_parameters"] in {3, 4}


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_probes_of_a_loop_agree_in_two_runs(cell):
    folder, found = cell
    for entry in found:
        assert entry["probed"] is entry["probed again"] is None
    assert compare(ledger(folder, "probed"), ledger(folder, "probed again")).verdict == "equal"
    frames = folder / "probed" / "fit-000" / f"rank-{len(found) - 1}.frames"
    assert frames.stat().st_size > 1_000


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_a_loop_resumed_within_an_epoch_ends_with_the_same_bits(cell):
    folder, found = cell
    for entry in found:
        assert entry["stopped"] is entry["resumed"] is None
    assert compare(ledger(folder), ledger(folder, "resumed")).verdict == "equal"


def test_a_sharded_loop_has_the_digests_of_the_whole_model(trained):
    """DDP computes the same sums of two gradients."""
    whole = [ledger(trained / "ddp").outcome(rank).last.groups["weights"] for rank in (0, 1)]
    for name in ("fsdp1", "fsdp2"):
        sharded = [ledger(trained / name).outcome(rank).last.groups for rank in (0, 1)]
        assert [groups["weights"] for groups in sharded] == whole
