"""Trainings under strategies and precisions on one to four processes: a launch runs many of them.

Those of the Trainer, and with the prefix ``Fabric`` loops with a recorder. Each cell of
docs/strategies.md names one of these tests.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from forking_python import HOROVOD, shared_python
from lightning.fabric import Fabric
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from rank_processes import run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_d9m import HorovodDeterministicStrategy, SettingError
from lightning_d9m.cli.main import main
from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.records import Digests
from lightning_d9m.ledger.stack import COMPILER_CACHE
from lightning_d9m.lightning import strategies

SUPPORT = Path(__file__).parents[1] / "support"


def of_fabric(*names):
    """Return the names of cells of Fabric."""
    return [f"Fabric, {name}" for name in names]


ONE, COMPILED_MODULE = "single device", "single device, compiled module"
# They change when something is computed, and no bit of the result.
SAME_BITS = [
    *(f"{ONE}, {name}" for name in ("checkpointing", "reentrant checkpointing", "compiled layers")),
    COMPILED_MODULE,
]
VALUES = ("bf16-mixed", "bf16-true", "16-true", "64-true", "torch.func", "float8")
ON_ONE = [ONE, *(f"{ONE}, {name}" for name in VALUES), *SAME_BITS]
PLAIN_DDP = [
    "ddp",
    *(f"ddp, {n}" for n in ("unused parameters", "fp16_compress_hook", "static_graph")),
]
# That with logical ranks is the last one: its errors close the connections of the ranks.
REPLICATED = [*PLAIN_DDP, "ddp, bf16-mixed", "ddp_d9m, logical ranks"]
FLAT, HYBRID = "fsdp1, flat parameters", "fsdp1, hybrid"
SHARDED = [
    "fsdp1",
    "fsdp1, wrapped layers",
    "fsdp2",
    "fsdp2, bf16-true",
    "fsdp2, CPU offload",
    "tp",
    FLAT,
]
SHARDED_ON_FOUR = ["fsdp1, 4 ranks", "fsdp2, 4 ranks", "tp, 4 ranks", "fsdp2 and tp"]
# Lightning starts two processes for each training.
LAUNCHED = ["ddp_spawn", "ddp_fork"]
WITH_HOROVOD = ["horovod_d9m", "horovod_d9m, logical ranks"]
PIPELINE = "Fabric, pipeline"  # whose ranks train different stages
# Cells by script and number of processes; 0 if the script starts them.
LAUNCHES = {
    ("strategy", 1): ON_ONE,
    ("strategy", 2): [*SHARDED, *REPLICATED],
    ("strategy", 4): [*SHARDED_ON_FOUR, "hsdp", HYBRID],
    ("strategy", 0): LAUNCHED,
    ("horovod", 2): WITH_HOROVOD,
    ("fabric", 1): of_fabric(ONE),
    ("fabric", 2): [*of_fabric(*PLAIN_DDP, "fsdp1", "fsdp2", "tp", FLAT), PIPELINE],
    ("fabric", 4): of_fabric("hsdp", "fsdp2 and tp", HYBRID),
    ("fabric", 0): of_fabric(*LAUNCHED),
}
ALL = [name for names in LAUNCHES.values() for name in names]
HYBRIDS = [HYBRID, *of_fabric(HYBRID)]
REPEATED = [*ON_ONE, *REPLICATED, *LAUNCHED, *WITH_HOROVOD]
COPIES = [*REPEATED[len(ON_ONE) :], "hsdp", *of_fabric(*PLAIN_DDP, *LAUNCHED, "hsdp"), *HYBRIDS]
TENSOR_PARALLEL = ["tp", "tp, 4 ranks", "fsdp2 and tp", *of_fabric("tp", "fsdp2 and tp")]
FULL = ["fsdp1", "fsdp2", "tp", "tp, 4 ranks", "hsdp", "fsdp2 and tp"]
FULL += of_fabric("fsdp2", "tp", "hsdp", "fsdp2 and tp")
RACING = ["ddp", "fsdp2", "Fabric, fsdp2"]
LOCATED = [ONE, COMPILED_MODULE, "ddp", "ddp_d9m, logical ranks", "fsdp1", "fsdp2", "tp", PIPELINE]
LOCATED += of_fabric(ONE, "ddp", "ddp_spawn", "fsdp1", "fsdp2", "tp", FLAT, "hsdp", "fsdp2 and tp")


def launch(script, count, folder, names):
    """Train cells in one launch."""
    program, python = SUPPORT / f"{script}_training.py", shared_python()
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    if script == "horovod":
        pytest.importorskip("horovod", reason="`d9m install-horovod` builds it")
        python = shared_python(*HOROVOD)
        command = [python, "-m", "horovod.runner.launch", "-np", "2", "--gloo", python]
        command.append(SUPPORT / "strategy_training.py")
        subprocess.run(
            [*command, folder, *names], env=variables | {"PYTHONHASHSEED": "0"}, check=True
        )
    elif count:
        run_ranks(program, count, folder, *names)
    else:
        subprocess.run([python, program, folder, *names], env=variables, check=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that finds the folder of a cell; each launch is done once for all tests."""
    folders = {}

    def find(name):
        place = next(place for place, names in LAUNCHES.items() if name in names)
        if place not in folders:
            folders[place] = tmp_path_factory.mktemp("cells")
            names = [own.removeprefix("Fabric, ") for own in LAUNCHES[place]]
            launch(*place, folders[place], names)
        return folders[place] / name.removeprefix("Fabric, ")

    return find


class Trained:
    """A cell: its folder, and what each rank found."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        files = sorted(folder.glob("found-*.json"))
        self.found = [json.loads(file.read_text()) for file in files]
        self.prefix = "" if name.startswith("Fabric") else "layers."

    @property
    def weight(self):
        """The weight that a fault changes."""
        own = {"flat parameters": "_flat_param", "pipeline": "3.weight"}
        return own.get(self.name.rpartition(", ")[2], f"{self.prefix}0.weight")

    def ledger(self, name="first"):
        return read_ledger(self.folder / name / "fit-000")

    def records(self, name="first", rank=0):
        found = self.ledger(name).records(rank)
        return [record for record in found if isinstance(record, Digests)]


@pytest.fixture
def find(trained):
    return lambda name: Trained(name, trained(name))


@pytest.fixture
def cell(request, find):
    return find(request.param)


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_two_runs_agree_on_every_rank(cell):
    """Of which the second patches a gradient that the CPU computes alike: a sum of two terms."""
    assert [entry["second"] for entry in cell.found] == [None] * len(cell.found)
    comparison = compare_ledgers(cell.ledger(), cell.ledger("second"))
    assert comparison.equal
    assert len(comparison.ranks) == len(cell.found)
    assert all(rank.places > 50 for rank in comparison.ranks)  # probes, too
    for rank in range(len(cell.found)):
        calls = int((cell.folder / "second" / f"calls-{rank}").read_text())
        # One call for each batch of two epochs on this rank, and for each step that is replayed;
        # with logical ranks, for each of two in a batch. The last rank of a pipeline calls it for
        # each of two parts of 6 batches, and once for shapes.
        assert calls in ({25 * rank} if cell.name == PIPELINE else {4, 6, 10, 12})


@pytest.mark.parametrize("cell", ALL, indirect=True)
def test_a_change_on_one_rank_differs_from_the_reference(cell):
    for error in (entry["fault"] for entry in cell.found):
        assert error["type"] == "DriftError"
        assert (error["group"], error["epoch"]) in {("weights", "1"), ("", "1")}
    assert cell.weight in cell.found[-1]["fault"]["names"]
    assert cell.found[-1]["fault"]["count"] == "1"


@pytest.mark.parametrize("cell", COPIES, indirect=True)
def test_copies_that_differ_on_one_rank_raise_on_all(cell):
    who = "Ranks 0 and 1 differ from each other" if len(cell.found) == 2 else "from rank 0"
    for error in (entry["fault without reference"] for entry in cell.found):
        assert (error["type"], error["names"]) == ("DriftError", f"('{cell.weight}',)")
        assert f"{who} in epoch 0" in error["message"]


SHARDS = [*SHARDED, *SHARDED_ON_FOUR, PIPELINE]
SHARDS += of_fabric("fsdp1", "fsdp2", "tp", FLAT, "fsdp2 and tp")


@pytest.mark.parametrize("cell", SHARDS, indirect=True)
def test_shards_are_not_compared_with_each_other(cell):
    """They differ in every training, and none is refused."""
    stack = cell.ledger().header.stack
    if cell.name == PIPELINE:
        assert stack["world.pipeline_stages"] == len(cell.found)
    else:
        expected = {1} if cell.weight == "_flat_param" else {3, 4}
        assert stack["world.sharded_parameters"] in expected


@pytest.mark.parametrize("cell", TENSOR_PARALLEL, indirect=True)
def test_parameters_that_each_rank_has_are_compared(cell):
    for error in (entry["fault of a copy"] for entry in cell.found):
        assert (error["type"], error["names"]) == ("DriftError", f"('{cell.prefix}3.bias',)")


@pytest.mark.parametrize("cell", LOCATED, indirect=True)
def test_locate_names_step_rank_and_weight_of_a_fault_on_one_rank(cell):
    located, last = cell.found[0]["located"], len(cell.found) - 1
    assert located["cause"] == "weights", located
    assert (located["ranks"], located["moment"], located["step"]) == ([last], "batch", 1)
    assert (located["kind"], located["name"]) == ("weight", cell.weight)
    assert located["magnitude"]["count"] == 1


@pytest.mark.parametrize("cell", RACING, indirect=True)
def test_locate_names_step_rank_and_operation_of_a_race_on_one_rank(cell):
    located = cell.found[0]["located op"]
    assert (located["cause"], located["kind"]) == ("op", "op"), located
    assert (located["ranks"], located["step"]) == ([len(cell.found) - 1], 0)
    assert located["name"] == f"{cell.prefix}1::d9m_strategies.race.default"
    assert located["op"]["inputs_equal"]


@pytest.mark.parametrize(
    ("cell", "moment", "step"), [("ddp", "batch", 1), ("tp", "epoch", 2)], indirect=["cell"]
)
def test_locate_names_a_copy_that_differs_in_every_run(cell, moment, step):
    """Where ranks hold shards, the end of the epoch: probes of shards are not compared."""
    located = cell.found[0]["located drift"]
    assert (located["cause"], located["ranks"]) == ("rank drift", [1]), located
    assert (located["moment"], located["step"]) == (moment, step)
    assert located["name"] == "layers.3.bias"
    assert located["magnitude"]["examples"][0][0] == [0]
    assert "last batch began" not in located["text"]


@pytest.mark.parametrize("cell", REPEATED, indirect=True)
def test_steps_run_twice(cell):
    assert cell.ledger().header.settings["replay_every"] == 2


@pytest.mark.parametrize("cell", ["fsdp1", "fsdp2", "tp"], indirect=True)
def test_steps_of_divided_weights_do_not_run_twice(cell):
    for error in (entry["replayed"] for entry in cell.found):
        assert error["type"] == "SettingError"
        assert "divides the weights among the ranks" in error["message"]


@pytest.mark.parametrize("cell", [name for name in ALL if name not in HYBRIDS], indirect=True)
def test_resumed_within_an_epoch_it_has_the_same_bits(cell):
    """At the end of that epoch; after the next one, but for the weight that was changed there."""
    for rank, entry in enumerate(cell.found):
        straight, resumed = (cell.records(name, rank) for name in ("first", "fault"))
        (epoch,) = (own for own in resumed if (own.moment, own.epoch) == ("epoch", 0))
        assert epoch in straight
        assert entry["fault"]["epoch"] == "1"
    assert cell.found[-1]["fault"]["count"] == "1"


@pytest.mark.parametrize("cell", FULL, indirect=True)
def test_resumed_from_a_full_checkpoint_it_ends_with_the_same_bits(cell):
    for entry in cell.found:
        assert entry["second"] is entry["resumed from full"] is None


@pytest.mark.parametrize("cell", HYBRIDS, indirect=True)
def test_hybrid_sharding_of_fsdp1_is_not_resumed(cell):
    for error in (entry["refused"] for entry in cell.found):
        assert error["type"] == "InexactResumeError"
        assert "with which the optimizer's state differs after it is loaded" in error["message"]


@pytest.mark.parametrize("name", LAUNCHED)
def test_processes_that_lightning_starts_take_over_session_and_fits(find, name):
    """Seed and fits are those of the process that starts them, which gets the ledger back."""
    cell = find(name)
    first, second, following, failed = map(cell.ledger, ("first", "second", "next", "fault"))
    assert compare_ledgers(first, find("ddp").ledger()).equal
    last = first.outcome(0).last
    assert cell.found[0]["left"] == [str(first.path), last.totals["weights"], []]
    assert [run.header.fit for run in (first, second, following)] == [0, 0, 1]
    assert following.outcome(0).last.totals["weights"] != last.totals["weights"]
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


def test_fabric_takes_no_strategy_of_horovod():
    """Fabric has its own classes of strategies, and Horovod's derives from those of the Trainer."""
    for strategy in ("horovod_d9m", HorovodDeterministicStrategy()):
        with pytest.raises(ValueError, match="You selected an invalid strategy name"):
            Fabric(strategy=strategy, accelerator="cpu")


def test_notebooks_fork():
    assert StrategyRegistry["ddp_notebook"] == StrategyRegistry["ddp_fork"] | {
        "strategy_name": "ddp_notebook"
    }


@pytest.mark.parametrize("cell", SAME_BITS, indirect=True)
def test_checkpointing_and_compiling_change_no_bit(cell, find):
    """``aot_eager`` compiles; Inductor's kernels may round differently."""
    stacks = [own.ledger().header.stack for own in (find(ONE), cell)]
    assert [COMPILER_CACHE in stack for stack in stacks] == [False, "compiled" in cell.name]
    plain, own = ([record.groups for record in one.records()] for one in (find(ONE), cell))
    assert plain == own


@pytest.mark.parametrize(
    "cell",
    ["fsdp1", "fsdp1, wrapped layers", "fsdp2", "fsdp2, CPU offload", *of_fabric("fsdp1", "fsdp2")],
    indirect=True,
)
def test_a_sharded_ledger_has_the_digests_of_the_whole_model(cell, find):
    """DDP computes the same sums of two gradients, and its ledger has the same digests."""
    sharded, whole = cell.records(), find("ddp" if cell.prefix else "Fabric, ddp").records()
    for group in ("weights", "optimizers")[: 2 if cell.prefix else 1]:
        assert [own.groups[group] for own in sharded] == [own.groups[group] for own in whole]
    assert cell.records(rank=1)[-1].groups == sharded[-1].groups


def test_the_number_of_ranks_does_not_enter_into_the_digests(find):
    names = ("fsdp1", "fsdp2", "tp", *SHARDED_ON_FOUR, "hsdp", HYBRID)
    initial = [find(name).records()[0].groups["weights"] for name in names]
    assert all(weights == initial[0] for weights in initial)
    assert len(set(initial[0].values())) == 4


@pytest.mark.parametrize(
    ("kind", "cell"),
    [("", name) for name in ("fsdp1", "fsdp2", "tp", "fsdp2 and tp")]
    + [("full ", name) for name in ("fsdp1", "fsdp2", "tp")],
    indirect=["cell"],
)
def test_a_checkpoint_has_the_weights_of_the_ledger(capsys, kind, cell, tmp_path):
    """A full one or a sharded one, in one file; the first parameter that differs is named."""
    files = (cell.folder / f"{kind}checkpoints").glob("*.ckpt")
    last = max(files, key=lambda file: int(file.stem.partition("=")[2]))
    if not kind:
        dcp_to_torch_save(last, last := tmp_path / "whole.pt")
    command = ["verify", "--allow-objects", str(last)]
    assert main([*command, str(cell.ledger().path)]) == 0
    assert " are those of epoch 1 (step" in capsys.readouterr().out
    assert main([*command, str(cell.ledger("fault").path)]) == 1
    step = cell.records()[-1].step
    assert f"; of epoch 1 (step {step}) differ layers.0.weight\n" in capsys.readouterr().out
