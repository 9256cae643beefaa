"""Trainings under strategies and precisions on one to four processes: a launch runs many of them.

The table of docs/strategies.md says which of these tests a training passes; those of Fabric run
with a Recorder.
"""

import json
import re
from pathlib import Path

import pytest
import strategy_cells as cells
import torch
from ledger_runs import list_batches
from lightning.fabric import Fabric
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from rank_processes import run_ranks
from strategy_cells import FABRIC, FLAT_ONES, LAUNCHED, PIPELINE
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_d9m import HorovodDeterministicStrategy, SettingError
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.engine.ledger.stack import COMPILER_CACHE
from lightning_d9m.integrations.strategies import strategies
from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.comparison.ledgers import compare_ledgers

SCRIPT = Path(__file__).parents[1] / "support" / "strategies.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folders = {}

    def train(launch):
        if launch in folders:
            return folders[launch]
        folder = folders[launch] = tmp_path_factory.mktemp("cells")
        words = {"horovod": launch == "horovod"}
        count = {"launched": 0, "horovod": 2}.get(launch, launch)
        run_ranks(SCRIPT, count, folder, *cells.LAUNCHES[launch], **words)
        return folder

    return train


@pytest.fixture
def cell(request, trained):
    """Return the folder of a cell, and what each rank found."""
    launch = cells.find_launch(request.param)
    if launch == "horovod":
        pytest.importorskip("horovod", reason="`d9m install-horovod` builds it")
    folder = trained(launch) / request.param
    files = sorted(folder.glob("found-*.json"))
    return folder, [json.loads(file.read_text()) for file in files]


def of_cells(names):
    return pytest.mark.parametrize("cell", names, indirect=True)


def ledger(folder, name="first"):
    return read_ledger(folder / name / "fit-000")


def name_of_weight(folder):
    if folder.name in FLAT_ONES:
        return "_flat_param"
    return "layers.3.weight" if folder.name == PIPELINE else "layers.0.weight"


def records(folder, name="first", rank=0):
    found = ledger(folder, name).records(rank)
    return [record for record in found if isinstance(record, Digests)]


@of_cells(cells.ALL)
def test_two_runs_agree_on_every_rank_and_patched_operations_give_the_same_bits(cell):
    """The patch of a gradient that the CPU computes alike: a sum of two terms."""
    folder, found = cell
    assert [entry["second"] for entry in found] == [None] * len(found)
    comparison = compare_ledgers(ledger(folder), ledger(folder, "second"))
    assert comparison.equal
    assert len(comparison.ranks) == len(found)
    assert all(rank.places > 50 for rank in comparison.ranks)  # probes, too
    for rank in range(len(found)):
        # One call for each of two batches of two epochs on this rank; with logical ranks, for each
        # of two in a batch. The last rank of a pipeline calls it for each of two parts of a batch,
        # and once for shapes.
        called = 9 * rank if folder.name == PIPELINE else 8 if "logical" in folder.name else 4
        assert int((folder / "second" / f"calls-{rank}").read_text()) == called


@of_cells(cells.ALL)
def test_a_change_on_one_rank_differs_from_the_reference(cell):
    folder, found = cell
    for error in (entry["fault"] for entry in found):
        assert error["type"] == "DriftError"
        assert (error["group"], error["epoch"]) in {("weights", "1"), ("", "1")}
    assert name_of_weight(folder) in found[-1]["fault"]["names"]
    assert found[-1]["fault"]["count"] == "1"


@of_cells(cells.COPIES)
def test_copies_that_differ_on_one_rank_raise_on_all(cell):
    _, found = cell
    who = "Ranks 0 and 1 differ from each other" if len(found) == 2 else "from rank 0"
    for error in (entry["fault without reference"] for entry in found):
        assert (error["type"], error["names"]) == ("DriftError", "('layers.0.weight',)")
        assert f"{who} in epoch 0" in error["message"]


@of_cells(cells.DIVIDED)
def test_shards_are_not_compared_with_each_other(cell):
    """They differ in every training, and none is refused."""
    folder, found = cell
    stack = ledger(folder).header.stack
    if folder.name == PIPELINE:
        assert stack["world.pipeline_stages"] == len(found)
    else:
        expected = {1} if folder.name in FLAT_ONES else {3, 4}
        assert stack["world.sharded_parameters"] in expected


@of_cells(cells.REFERRED)
def test_what_one_rank_cannot_read_stops_all(cell):
    errors = [entry["other reference"] for entry in cell[1]]
    assert [error["type"] for error in errors] == ["D9mError", "LedgerError"]
    assert errors[0]["message"].startswith("Rank 1 failed, so this rank 0 stops too")


@of_cells([cells.DDP])
def test_probes_of_ddp(cell):
    """They change no bit; gradients are taken before and after the ranks exchange them."""
    folder, _ = cell
    batches = []
    for rank in (0, 1):
        plain, probed = (ledger(folder, name).outcome(rank).final for name in ("plain", "first"))
        assert plain == probed
        batches.append(dict(list_batches(ledger(folder), rank)[0][3]))
    kinds = ("local_gradient", "gradient")
    local, reduced = ([own[kind, "layers.0.weight", 0] for own in batches] for kind in kinds)
    assert local[0] != local[1]
    assert reduced[0] == reduced[1] not in local


@of_cells(cells.TENSOR_PARALLEL)
def test_parameters_that_each_rank_has_are_compared(cell):
    _, found = cell
    for error in (entry["fault of a copy"] for entry in found):
        assert (error["type"], error["names"]) == ("DriftError", "('layers.3.bias',)")


@of_cells(cells.LOCATED)
def test_locate_names_step_rank_and_weight_of_a_fault_on_one_rank(cell):
    folder, found = cell
    located = found[0]["located"]
    assert located["cause"] == "weights", located
    assert (located["ranks"], located["moment"], located["step"]) == ([len(found) - 1], "batch", 1)
    assert (located["kind"], located["name"]) == ("weight", name_of_weight(folder))
    assert (located["magnitude"]["count"], located["magnitude"]["ulps"]) == (1, 64)


@of_cells(cells.RACING)
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


@of_cells([name for name in cells.ALL if name not in cells.HYBRIDS])
def test_resumed_within_an_epoch_it_has_the_same_bits(cell):
    """At the end of that epoch; after the next one, but for the weight that was changed there."""
    folder, found = cell
    for rank, entry in enumerate(found):
        straight, resumed = (records(folder, name, rank) for name in ("first", "fault"))
        (epoch,) = (own for own in resumed if (own.moment, own.epoch) == ("epoch", 0))
        assert epoch in straight
        assert entry["fault"]["epoch"] == "1"


@of_cells(cells.FULL)
def test_resumed_from_a_full_checkpoint_it_ends_with_the_same_bits(cell):
    _, found = cell
    for entry in found:
        assert entry["second"] is entry["resumed from full"] is None


@of_cells(cells.HYBRIDS)
def test_hybrid_sharding_of_fsdp1_is_not_resumed(cell):
    _, found = cell
    for error in (entry["refused"] for entry in found):
        assert error["type"] == "InexactResumeError"
        assert "with which the optimizer's state differs after it is loaded" in error["message"]


@of_cells(LAUNCHED)
def test_processes_that_lightning_starts_take_over_session_and_fits(cell, trained):
    """Seed and fits are those of the process that starts them, which gets the ledger back."""
    folder, found = cell
    first, second, following = (ledger(folder, part) for part in ("first", "second", "next"))
    assert compare_ledgers(first, ledger(trained(2) / "ddp")).equal
    last = first.outcome(0).last
    assert found[0]["left"] == [str(first.path), last.totals["weights"], []]
    assert [run.header.fit for run in (first, second, following)] == [0, 0, 1]
    assert following.outcome(0).last.totals["weights"] != last.totals["weights"]
    failed = ledger(folder, "fault")
    assert [failed.outcome(rank).end.status for rank in (0, 1)] == ["failed"] * 2


def derive(name, base=SingleDeviceStrategy):
    """Return a class that stands for Lightning's of this name, or for one that derives from it."""
    return type(name, (base,), {"__module__": base.__module__})


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (
            derive("Own", derive("DeepSpeedStrategy")),
            "in partitions that the parameters do not show. Use one device",
        ),
        (derive("XLAStrategy"), "the generators of XLA devices are neither seeded nor restored"),
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


def test_the_table_says_what_these_tests_show():
    """Other words would be claims without a test."""
    words = {
        "agree": {"yes"},
        "fault": {"yes"},
        "ranks": {"", "all weights", "the copies", "nothing", "replicated parameters"},
        "resume": {"exact", "exact, also full checkpoints", "refused"},
        "probes": {"yes", "[outside](probes.md)", "of shards", "of stages"},
        "locate": {"yes", ""},
    }
    assert {column: {row[column] for row in cells.TABLE.values()} for column in words} == words
    alone = [name for name in cells.ALL if name not in {*cells.COPIES, *cells.DIVIDED}]
    assert alone == cells.LAUNCHES[1]


def test_notebooks_fork():
    assert StrategyRegistry["ddp_notebook"] == StrategyRegistry["ddp_fork"] | {
        "strategy_name": "ddp_notebook"
    }


@of_cells([name for name in cells.ALL if re.search("checkpointing|compiled", name)])
def test_checkpointing_and_compiling_change_no_bit(cell):
    """``aot_eager`` compiles; Inductor's kernels may round differently."""
    folder, _ = cell
    places = folder.with_name("single device"), folder
    stacks = [ledger(place).header.stack for place in places]
    assert [COMPILER_CACHE in stack for stack in stacks] == [False, "compiled" in folder.name]
    plain, own = ([record.groups for record in records(place)] for place in places)
    assert plain == own


WHOLE = [name for name in cells.LAUNCHES[2] if "fsdp" in name and not re.search("flat|bf16", name)]


@of_cells(WHOLE)
def test_a_sharded_ledger_has_the_digests_of_the_whole_model(cell):
    """DDP computes the same sums of two gradients, and its ledger has the same digests."""
    folder, _ = cell
    ddp = folder.with_name("Fabric, ddp" if folder.name.startswith(FABRIC) else "ddp")
    sharded, whole = records(folder), records(ddp)
    for group in ("weights", "optimizers"):
        assert [own.groups[group] for own in sharded] == [own.groups[group] for own in whole]
    assert records(folder, rank=1)[-1].groups == sharded[-1].groups


def test_the_number_of_ranks_does_not_enter_into_the_digests(trained):
    names = [*cells.FULL, *cells.HYBRIDS, "fsdp1, 4 ranks", "fsdp2, 4 ranks"]
    folders = [trained(cells.find_launch(name)) / name for name in names if FABRIC not in name]
    initial = [records(folder)[0].groups["weights"] for folder in folders]
    assert all(weights == initial[0] for weights in initial)
    assert len(set(initial[0].values())) == 4


@pytest.mark.parametrize(
    ("kind", "cell"),
    [(kind, name) for kind in ("", "full ") for name in cells.SHARDED],
    indirect=["cell"],
)
def test_a_checkpoint_has_the_weights_of_the_ledger(capsys, kind, cell, tmp_path):
    """A full one or a sharded one, in one file; the first parameter that differs is named."""
    folder, _ = cell
    last = folder / f"{kind}checkpoints" / "step=4.ckpt"
    if not kind:
        dcp_to_torch_save(last, last := tmp_path / "whole.pt")
    command = ["verify", "--allow-objects", str(last)]
    assert main([*command, str(ledger(folder).path)]) == 0
    assert " are those of epoch 1 (step" in capsys.readouterr().out
    assert main([*command, str(ledger(folder, "fault").path)]) == 1
    step = records(folder)[-1].step
    assert f"; of epoch 1 (step {step}) differ layers.0.weight\n" in capsys.readouterr().out
