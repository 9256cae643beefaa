"""Loops of Fabric under its strategies; docs/strategies.md names these tests."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from forking_python import shared_python
from lightning.fabric import Fabric
from rank_processes import run_ranks

from lightning_d9m import HorovodDeterministicStrategy, compare, read_ledger

SCRIPT = Path(__file__).parents[1] / "support" / "fabric_training.py"
REPLICATED = ["ddp", "ddp, unused parameters", "ddp, fp16_compress_hook", "ddp, static_graph"]
# Fabric starts two processes for each.
LAUNCHED = ["ddp_spawn", "ddp_fork"]
FLAT = "fsdp1, flat parameters"
HYBRID = "fsdp1, hybrid"
# Its ranks train different stages.
PIPELINE = "pipeline"
SHARDED = ["fsdp1", "fsdp2", "tp", FLAT]
FULL = ["fsdp2", "tp", "hsdp", "fsdp2 and tp"]
ON_FOUR = ["hsdp", "fsdp2 and tp", HYBRID]
ALL = ["single device", *REPLICATED, *LAUNCHED, *SHARDED, PIPELINE, *ON_FOUR]
COPIES = [*REPLICATED, *LAUNCHED, "hsdp", HYBRID]
TENSOR_PARALLEL = ["tp", "fsdp2 and tp"]
WEIGHTS = ["0.bias", "0.weight", "3.bias", "3.weight"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train every cell once for all tests."""
    folder = tmp_path_factory.mktemp("fabric")
    run_ranks(SCRIPT, 1, folder, ALL[0])
    run_ranks(SCRIPT, 2, folder, *REPLICATED, *SHARDED, PIPELINE)
    run_ranks(SCRIPT, 4, folder, *ON_FOUR)
    command = [shared_python(), SCRIPT, folder, *LAUNCHED]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return folder


@pytest.fixture
def cell(request, trained):
    """Return the folder of a cell, and what each rank found."""
    folder = trained / request.param
    return folder, [json.loads(file.read_text()) for file in sorted(folder.glob("found-*.json"))]


def ledger(folder, name="first"):
    return read_ledger(folder / name / "fit-000")


def name_of_weight(folder):
    return {FLAT: "_flat_param", PIPELINE: "3.weight"}.get(folder.name, "0.weight")


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_two_loops_agree_on_every_rank(cell):
    folder, found = cell
    assert [entry["second"] for entry in found] == [None] * len(found)
    comparison = compare(ledger(folder), ledger(folder, "second"))
    assert (comparison.verdict, len(comparison.ranks)) == ("equal", len(found))
    names = sorted(ledger(folder).outcome(len(found) - 1).last.groups["weights"])
    expected = {FLAT: ["_flat_param"], PIPELINE: ["3.bias", "3.weight"]}
    assert names == expected.get(folder.name, WEIGHTS)


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_a_change_on_one_rank_of_a_loop_differs_from_the_reference(cell):
    folder, found = cell
    for error in (entry["fault"] for entry in found):
        assert (error["type"], error["epoch"]) == ("DriftError", "1")
    assert name_of_weight(folder) in found[-1]["fault"]["names"]


@pytest.mark.parametrize("cell", COPIES, indirect=True)
def test_copies_of_a_loop_that_differ_raise_on_all_ranks(cell):
    _, found = cell
    for error in (entry["fault without reference"] for entry in found):
        assert (error["type"], error["names"]) == ("DriftError", "('0.weight',)")


@pytest.mark.parametrize("cell", [*SHARDED, PIPELINE, "fsdp2 and tp"], indirect=True)
def test_shards_of_a_loop_are_not_compared_with_each_other(cell):
    folder, found = cell
    assert [entry["fault without reference"] for entry in found] == [None] * len(found)
    stack = ledger(folder).header.stack
    if folder.name == PIPELINE:
        assert stack["world.pipeline_stages"] == len(found)
    else:
        expected = {1} if folder.name == FLAT else {3, 4}
        assert stack["world.sharded_parameters"] in expected


@pytest.mark.parametrize("cell", TENSOR_PARALLEL, indirect=True)
def test_parameters_of_a_loop_that_each_rank_has_are_compared(cell):
    _, found = cell
    for error in (entry["fault of a copy"] for entry in found):
        assert (error["type"], error["names"]) == ("DriftError", "('3.bias',)")


LOCATED = ["single device", "ddp", "ddp_spawn", *SHARDED, PIPELINE, "hsdp", "fsdp2 and tp"]


@pytest.mark.parametrize("cell", LOCATED, indirect=True)
def test_locate_names_step_rank_and_weight_of_a_fault_in_a_loop(cell):
    folder, found = cell
    located = found[0]["located"]
    assert located["cause"] == "weights", located
    assert (located["ranks"], located["moment"], located["step"]) == ([len(found) - 1], "batch", 1)
    assert (located["kind"], located["name"]) == ("weight", name_of_weight(folder))
    assert (located["magnitude"]["count"], located["magnitude"]["ulps"]) == (1, 64)


@pytest.mark.parametrize("cell", ["fsdp2"], indirect=True)
def test_locate_names_step_rank_and_operation_of_a_race_in_a_loop(cell):
    _, found = cell
    located = found[0]["located op"]
    assert (located["cause"], located["kind"]) == ("op", "op"), located
    assert (located["ranks"], located["step"]) == ([len(found) - 1], 0)
    assert located["name"] == "1::d9m_strategies.race.default"


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_patched_operations_of_a_loop_give_the_same_bits(cell):
    folder, found = cell
    for rank, entry in enumerate(found):
        assert entry["second"] is None
        # One call for each batch of two epochs on this rank: of 6 batches, of 3 or of 2; the last
        # rank of a pipeline calls it for each of two parts of 6 batches, and once for shapes.
        called = {12, 6, 4} if folder.name != PIPELINE else {25 * rank}
        assert int((folder / "second" / f"calls-{rank}").read_text()) in called


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_probes_of_a_loop_agree_in_two_runs(cell):
    folder, _ = cell
    comparison = compare(ledger(folder, "probed"), ledger(folder, "probed again"))
    assert comparison.verdict == "equal"
    assert all(rank.places > 50 for rank in comparison.ranks)


@pytest.mark.parametrize("cell", [HYBRID], indirect=True)
def test_a_loop_with_hybrid_sharding_of_fsdp1_is_not_resumed(cell):
    _, found = cell
    for error in (entry["resumed"] for entry in found):
        assert error["type"] == "InexactResumeError"
        assert "with which the optimizer's state differs after it is loaded" in error["message"]


@pytest.mark.parametrize("cell", [name for name in ALL if name != HYBRID], indirect=True)
def test_a_loop_resumed_within_an_epoch_ends_with_the_same_bits(cell):
    folder, found = cell
    for entry in found:
        assert entry["resumed"] is None
    assert compare(ledger(folder), ledger(folder, "resumed")).verdict == "equal"


@pytest.mark.parametrize("cell", FULL, indirect=True)
def test_a_loop_resumed_from_a_full_checkpoint_ends_with_the_same_bits(cell):
    _, found = cell
    for entry in found:
        assert entry["saved full"] is entry["resumed from full"] is None


def test_fabric_takes_no_strategy_of_horovod():
    """Fabric has its own classes of strategies, and Horovod's derives from those of the Trainer."""
    for strategy in ("horovod_d9m", HorovodDeterministicStrategy()):
        with pytest.raises(ValueError, match="You selected an invalid strategy name"):
            Fabric(strategy=strategy, accelerator="cpu")


def test_a_sharded_loop_has_the_digests_of_the_whole_model(trained):
    """DDP computes the same sums of two gradients."""
    whole = [ledger(trained / "ddp").outcome(rank).last.groups["weights"] for rank in (0, 1)]
    for name in ("fsdp1", "fsdp2"):
        sharded = [ledger(trained / name).outcome(rank).last.groups for rank in (0, 1)]
        assert [groups["weights"] for groups in sharded] == whole
