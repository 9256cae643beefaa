"""Trainings under strategies and precisions on one to four processes: a launch runs many of them.

Each cell of docs/strategies.md names one of these tests.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from forking_python import HOROVOD, shared_python
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from rank_processes import run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_d9m import SettingError
from lightning_d9m.cli.main import main
from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.records import Digests
from lightning_d9m.ledger.stack import COMPILER_CACHE
from lightning_d9m.lightning import strategies

SCRIPT = Path(__file__).parents[1] / "support" / "strategy_training.py"
ON_ONE = [
    "single device",
    "single device, bf16-mixed",
    "single device, bf16-true",
    "single device, 16-true",
    "single device, 64-true",
    "single device, checkpointing",
    "single device, reentrant checkpointing",
    "single device, torch.func",
    "single device, float8",
    "single device, compiled layers",
    "single device, compiled module",
]
# They change when something is computed, and no bit of the result.
SAME_BITS = ON_ONE[5:7] + ON_ONE[9:]
REPLICATED = [
    "ddp",
    "ddp, bf16-mixed",
    "ddp, unused parameters",
    "ddp, fp16_compress_hook",
    "ddp, static_graph",
    "ddp_d9m, logical ranks",
]
SHARDED = [
    "fsdp1",
    "fsdp1, wrapped layers",
    "fsdp2",
    "fsdp2, bf16-true",
    "fsdp2, CPU offload",
    "tp",
]
FLAT = "fsdp1, flat parameters"
HYBRID = "fsdp1, hybrid"
SHARDED_ON_FOUR = ["fsdp1, 4 ranks", "fsdp2, 4 ranks", "tp, 4 ranks", "fsdp2 and tp"]
ON_FOUR = [*SHARDED_ON_FOUR, "hsdp", HYBRID]
TENSOR_PARALLEL = ["tp", "tp, 4 ranks", "fsdp2 and tp"]
FULL = ["fsdp1", "fsdp2", "tp", "tp, 4 ranks", "hsdp", "fsdp2 and tp"]
RACING = ["ddp", "fsdp2"]
# Lightning starts two processes for each training.
LAUNCHED = ["ddp_spawn", "ddp_fork"]
WITH_HOROVOD = ["horovod_d9m", "horovod_d9m, logical ranks"]
REPEATED = [*ON_ONE, *REPLICATED, *LAUNCHED, *WITH_HOROVOD]
ALL = [*ON_ONE, *REPLICATED, *SHARDED, FLAT, *ON_FOUR, *LAUNCHED, *WITH_HOROVOD]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Train every cell of one process once for all tests."""
    folder = tmp_path_factory.mktemp("one")
    run_ranks(SCRIPT, 1, folder, *ON_ONE)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Train every cell of two processes once for all tests."""
    folder = tmp_path_factory.mktemp("two")
    # That with logical ranks is the last one: its errors close the connections of the ranks.
    run_ranks(SCRIPT, 2, folder, *REPLICATED[:-1], *SHARDED, FLAT, REPLICATED[-1])
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Train every cell of four processes once for all tests."""
    folder = tmp_path_factory.mktemp("four")
    run_ranks(SCRIPT, 4, folder, *ON_FOUR)
    return folder


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Train every cell of processes that Lightning starts once for all tests."""
    folder = tmp_path_factory.mktemp("launched")
    command = [shared_python(), SCRIPT, folder, *LAUNCHED]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def horovod(tmp_path_factory):
    """Train every cell of two processes of Horovod once for all tests."""
    pytest.importorskip("horovod", reason="`d9m install-horovod` builds it")
    folder = tmp_path_factory.mktemp("horovod")
    python = shared_python(*HOROVOD)
    command = [python, "-m", "horovod.runner.launch", "-np", "2", "--gloo", python, SCRIPT]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    subprocess.run([*command, folder, *WITH_HOROVOD], env=os.environ | variables, check=True)
    return folder


@pytest.fixture
def cell(request):
    """Return the folder of a cell, and what each rank found."""
    launches = {"one": ON_ONE, "four": ON_FOUR, "launched": LAUNCHED, "horovod": WITH_HOROVOD}
    found = [launch for launch, names in launches.items() if request.param in names]
    folder = request.getfixturevalue(*found or ["two"]) / request.param
    files = sorted(folder.glob("found-*.json"))
    return folder, [json.loads(file.read_text()) for file in files]


def ledger(folder, name="first"):
    return read_ledger(folder / name / "fit-000")


def name_of_weight(folder):
    return "_flat_param" if folder.name == FLAT else "layers.0.weight"


def records(folder, name="first", rank=0):
    found = ledger(folder, name).records(rank)
    return [record for record in found if isinstance(record, Digests)]


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_two_runs_agree_on_every_rank(cell):
    folder, found = cell
    assert [entry["second"] for entry in found] == [None] * len(found)
    comparison = compare_ledgers(ledger(folder), ledger(folder, "second"))
    assert comparison.equal
    assert len(comparison.ranks) == len(found)
    assert all(rank.places > 60 for rank in comparison.ranks)  # probes, too


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_a_change_on_one_rank_differs_from_the_reference(cell):
    folder, found = cell
    for error in (entry["fault"] for entry in found):
        assert error["type"] == "DriftError"
        assert (error["group"], error["epoch"]) in {("weights", "1"), ("", "1")}
    assert name_of_weight(folder) in found[-1]["fault"]["names"]
    assert found[-1]["fault"]["count"] == "1"


COPIES = [*REPLICATED, *LAUNCHED, *WITH_HOROVOD, "hsdp", HYBRID]


@pytest.mark.parametrize("cell", COPIES, indirect=True)
def test_copies_that_differ_on_one_rank_raise_on_all(cell):
    _, found = cell
    who = "Ranks 0 and 1 differ from each other" if len(found) == 2 else "from rank 0"
    for error in (entry["fault without reference"] for entry in found):
        assert (error["type"], error["names"]) == ("DriftError", "('layers.0.weight',)")
        assert f"{who} in epoch 0" in error["message"]


@pytest.mark.parametrize("cell", [*SHARDED, FLAT, *SHARDED_ON_FOUR], indirect=True)
def test_shards_are_not_compared_with_each_other(cell):
    """They differ in every training, and none is refused."""
    folder, _ = cell
    expected = {1} if folder.name == FLAT else {3, 4}
    assert ledger(folder).header.stack["world.sharded_parameters"] in expected


@pytest.mark.parametrize("cell", TENSOR_PARALLEL, indirect=True)
def test_parameters_that_each_rank_has_are_compared(cell):
    _, found = cell
    for error in (entry["fault of a copy"] for entry in found):
        assert (error["type"], error["names"]) == ("DriftError", "('layers.3.bias',)")


LOCATED = [ON_ONE[0], ON_ONE[10], "ddp", "ddp_d9m, logical ranks", "fsdp1", "fsdp2", "tp"]


@pytest.mark.parametrize("cell", LOCATED, indirect=True)
def test_locate_names_step_rank_and_weight_of_a_fault_on_one_rank(cell):
    folder, found = cell
    located = found[0]["located"]
    assert located["cause"] == "weights", located
    assert (located["ranks"], located["moment"], located["step"]) == ([len(found) - 1], "batch", 1)
    assert (located["kind"], located["name"]) == ("weight", name_of_weight(folder))
    assert located["magnitude"]["count"] == 1


@pytest.mark.parametrize("cell", RACING, indirect=True)
def test_locate_names_step_rank_and_operation_of_a_race_on_one_rank(cell):
    _, found = cell
    located = found[0]["located op"]
    assert (located["cause"], located["kind"]) == ("op", "op"), located
    assert (located["ranks"], located["step"]) == ([len(found) - 1], 0)
    assert located["name"] == "layers.1::d9m_strategies.race.default"
    assert located["op"]["inputs_equal"]


@pytest.mark.parametrize(
    ("cell", "moment", "step"), [("ddp", "batch", 1), ("tp", "epoch", 2)], indirect=["cell"]
)
def test_locate_names_a_copy_that_differs_in_every_run(cell, moment, step):
    """Where ranks hold shards, the end of the epoch: probes of shards are not compared."""
    located = cell[1][0]["located drift"]
    assert (located["cause"], located["ranks"]) == ("rank drift", [1]), located
    assert (located["moment"], located["step"]) == (moment, step)
    assert located["name"] == "layers.3.bias"
    assert located["magnitude"]["examples"][0][0] == [0]
    assert "last batch began" not in located["text"]


@pytest.mark.parametrize("cell", REPEATED, indirect=True)
def test_steps_run_twice(cell):
    assert ledger(cell[0]).header.settings["replay_every"] == 2


@pytest.mark.parametrize("cell", ["fsdp1", "fsdp2", "tp"], indirect=True)
def test_steps_of_divided_weights_do_not_run_twice(cell):
    for error in (entry["replayed"] for entry in cell[1]):
        assert error["type"] == "SettingError"
        assert "divides the weights among the ranks" in error["message"]


@pytest.mark.parametrize("cell", [name for name in ALL if name != HYBRID], indirect=True)
def test_resumed_within_an_epoch_it_has_the_same_bits(cell):
    """At the end of that epoch; after the next one, but for the weight that was changed there."""
    folder, found = cell
    for rank, entry in enumerate(found):
        straight, resumed = (records(folder, name, rank) for name in ("first", "fault"))
        (epoch,) = (own for own in resumed if (own.moment, own.epoch) == ("epoch", 0))
        assert epoch in straight
        assert entry["fault"]["epoch"] == "1"
    assert found[-1]["fault"]["count"] == "1"


@pytest.mark.parametrize("cell", FULL, indirect=True)
def test_resumed_from_a_full_checkpoint_it_ends_with_the_same_bits(cell):
    _, found = cell
    for entry in found:
        assert entry["second"] is entry["resumed from full"] is None


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_patched_operations_are_called_and_give_the_same_bits(cell, request):
    """The patch of a gradient that the CPU computes alike: a sum of two terms."""
    folder, found = cell
    # One call for each of two batches of two epochs on this rank, and for each step that is
    # replayed; with logical ranks, for each of two in a batch.
    replicated = request.node.callspec.params["cell"] in REPEATED
    called = {6, 10} if replicated else {4}
    for rank, entry in enumerate(found):
        assert entry["second"] is None
        assert int((folder / "second" / f"calls-{rank}").read_text()) in called


@pytest.mark.parametrize("cell", [HYBRID], indirect=True)
def test_hybrid_sharding_of_fsdp1_is_not_resumed(cell):
    _, found = cell
    for error in (entry["refused"] for entry in found):
        assert error["type"] == "InexactResumeError"
        assert "with which the optimizer's state differs after it is loaded" in error["message"]


@pytest.mark.parametrize("name", LAUNCHED)
def test_processes_that_lightning_starts_take_over_session_and_fits(launched, two, name):
    """Seed and fits are those of the process that starts them, which gets the ledger back."""
    found = [json.loads((launched / name / f"found-{rank}.json").read_text()) for rank in (0, 1)]
    parts = ("first", "second", "next")
    first, second, following = (ledger(launched / name, part) for part in parts)
    assert compare_ledgers(first, ledger(two / "ddp")).equal
    last = first.outcome(0).last
    assert found[0]["left"] == [str(first.path), last.totals["weights"], []]
    assert [run.header.fit for run in (first, second, following)] == [0, 0, 1]
    assert following.outcome(0).last.totals["weights"] != last.totals["weights"]
    failed = ledger(launched / name, "fault")
    assert [failed.outcome(rank).end.status for rank in (0, 1)] == ["failed"] * 2


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Stands for Lightning's, which runs on GPUs alone."""


class XLAStrategy(SingleDeviceStrategy):
    """Stands for Lightning's."""


class OwnStrategy(DeepSpeedStrategy):
    """A user's."""


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (DeepSpeedStrategy, "in partitions that the parameters do not show. Use one device"),
        (OwnStrategy, "in partitions that the parameters do not show. Use one device"),
        (XLAStrategy, "the generators of XLA devices are neither seeded nor restored"),
        ("derives", "it derives from no strategy whose runs were recorded in tests"),
    ],
)
def test_other_strategies_are_refused_at_setup(strategy, reason, fit, tmp_path, monkeypatch):
    if strategy == "derives":
        strategy = SingleDeviceStrategy
        monkeypatch.setattr(strategies, "_RECORDED", ())
    name = strategy.__name__
    with pytest.raises(SettingError, match=f"strategy of the Trainer is {name}, .*{reason}"):
        fit(trainer_strategy=strategy(torch.device("cpu")))
    assert not list(tmp_path.glob("**/fit-*"))


def test_notebooks_fork():
    assert StrategyRegistry["ddp_notebook"] == StrategyRegistry["ddp_fork"] | {
        "strategy_name": "ddp_notebook"
    }


@pytest.mark.parametrize("name", SAME_BITS)
def test_checkpointing_and_compiling_change_no_bit(one, name):
    """``aot_eager`` compiles; Inductor's kernels may round differently."""
    stacks = [ledger(one / cell).header.stack for cell in ("single device", name)]
    assert [COMPILER_CACHE in stack for stack in stacks] == [False, "compiled" in name]
    plain, own = ([record.groups for record in records(one / cell)] for cell in (ON_ONE[0], name))
    assert plain == own


@pytest.mark.parametrize("name", ["fsdp1", "fsdp1, wrapped layers", "fsdp2", "fsdp2, CPU offload"])
def test_a_sharded_ledger_has_the_digests_of_the_whole_model(two, name):
    """DDP computes the same sums of two gradients, and its ledger has the same digests."""
    sharded, whole = records(two / name), records(two / "ddp")
    assert [record.groups["weights"] for record in sharded] == [
        record.groups["weights"] for record in whole
    ]
    assert [record.groups["optimizers"] for record in sharded] == [
        record.groups["optimizers"] for record in whole
    ]
    assert records(two / name, rank=1)[-1].groups == sharded[-1].groups


def test_the_number_of_ranks_does_not_enter_into_the_digests(two, four):
    initial = [
        records(folder / name)[0].groups["weights"]
        for folder, name in (
            (two, "fsdp1"),
            (two, "fsdp2"),
            (two, "tp"),
            *((four, name) for name in SHARDED_ON_FOUR[:3]),
            (four, "hsdp"),
            (four, "fsdp2 and tp"),
            (four, HYBRID),
        )
    ]
    assert all(weights == initial[0] for weights in initial)
    assert len(set(initial[0].values())) == 4


def find_last(folder):
    return max(folder.glob("*.ckpt"), key=lambda file: int(file.stem.partition("=")[2]))


@pytest.mark.parametrize(
    ("kind", "cell"),
    [("", name) for name in ("fsdp1", "fsdp2", "tp", "fsdp2 and tp")]
    + [("full ", name) for name in ("fsdp1", "fsdp2", "tp")],
    indirect=["cell"],
)
def test_a_checkpoint_has_the_weights_of_the_ledger(capsys, kind, cell, tmp_path):
    """A full one or a sharded one, in one file; the first parameter that differs is named."""
    folder, _ = cell
    last = find_last(folder / f"{kind}checkpoints")
    if not kind:
        dcp_to_torch_save(last, last := tmp_path / "whole.pt")
    command = ["verify", "--allow-objects", str(last)]
    assert main([*command, str(ledger(folder).path)]) == 0
    assert " are those of epoch 1 (step" in capsys.readouterr().out
    assert main([*command, str(ledger(folder, "fault").path)]) == 1
    step = records(folder)[-1].step
    assert f"; of epoch 1 (step {step}) differ layers.0.weight\n" in capsys.readouterr().out
