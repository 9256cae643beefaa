"""Loops of Fabric and Accelerate: wrappers of model, optimizer and loader are seen through."""

from pathlib import Path

import pytest
from accelerate import Accelerator
from lightning.fabric import Fabric
from recorded_loop import train
from scripts import execute
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import DataLoader

from lightning_d9m import (
    InexactResumeError,
    Recorder,
    SettingError,
    compare,
    deterministic,
    read_ledger,
)
from lightning_d9m.engine.control import session
from lightning_d9m.tools.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
# On a CPU, too: --cpu starts one process. Port 0 is a free one.
ON_TWO_PROCESSES = [
    "--multi_gpu",
    "--num_processes=2",
    "--num_machines=1",
    "--mixed_precision=no",
    "--dynamo_backend=no",
    "--main_process_port=0",
]
WEIGHTS = {"0.weight", "0.bias", "3.weight", "3.bias"}


def prepare_fabric(model, optimizer, loader):
    fabric = Fabric(accelerator="cpu", devices=1)
    return (*fabric.setup(model, optimizer), fabric.setup_dataloaders(loader), fabric.backward)


def prepare_accelerate(model, optimizer, loader):
    accelerator = Accelerator(cpu=True)
    return (*accelerator.prepare(model, optimizer, loader), accelerator.backward)


@pytest.mark.parametrize("prepare", [prepare_fabric, prepare_accelerate])
@pytest.mark.parametrize("loading", [{"shuffle": False}, {"num_workers": 1}])
def test_a_wrapped_loop_resumes_within_an_epoch(tmp_path, prepare, loading):
    words = {"prepare": prepare, "loading": loading}
    straight = train(tmp_path / "straight", **words)
    saved = train(tmp_path / "resumed", stop=9, **words)
    resumed = train(tmp_path / "resumed", state=saved, **words)
    assert compare(straight.ledger, resumed.ledger).verdict == "equal"
    groups = read_ledger(resumed.ledger).outcome(0).last.groups
    assert {"0.weight", "1.bias", "4.weight"} <= groups["weights"].keys()
    assert "0.exp_avg.0.weight" in groups["optimizers"]


def test_models_and_optimizers_of_deepspeed_are_refused(tmp_path):
    """Those of ZeRO stages 1 and 2 hold partitions, and the module is an ordinary one."""
    model, place = nn.Linear(1, 1), {"__module__": "deepspeed.runtime.engine"}
    engine = type("DeepSpeedEngine", (nn.Linear,), place)(1, 1)
    optimizer = type("DeepSpeedZeroOptimizer", (), place)()
    with pytest.raises(SettingError, match="The optimizer is DeepSpeedZeroOptimizer with DeepSpe"):
        Recorder(tmp_path, model, optimizer)
    model.weight.ds_id = 0  # with stage 3
    for part in (model, engine):
        with pytest.raises(SettingError, match="with DeepSpeed, which keeps the states of optimiz"):
            Recorder(tmp_path, part)


def test_a_loader_of_the_program_with_the_name_of_a_librarys_is_not_one(tmp_path):
    """It has no loader within it, whose order would be seeded."""
    orders = []
    for kind in (DataLoader, type("DataLoaderShard", (DataLoader,), {"__module__": __name__})):
        session.restart_fits()
        with deterministic(seed=2), Recorder(tmp_path / kind.__name__, nn.Linear(1, 1)) as run:
            orders.append([*map(int, run.batches(kind(range(64), None, shuffle=True)))])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("strategy", [*ShardingStrategy])
def test_only_shards_within_groups_of_ranks_are_not_resumed(tmp_path, strategy):
    words = {"sharding_strategy": strategy, "__module__": "torch.distributed.fsdp"}
    kind = type("FullyShardedDataParallel", (nn.Linear,), words)
    with deterministic(), Recorder(tmp_path, nn.Sequential(kind(1, 1))) as run:
        state = run.state_dict()
        if "HYBRID" not in strategy.name:
            run.load_state_dict(state)
            return
        with pytest.raises(InexactResumeError, match="This loop would not resume exactly") as it:
            run.load_state_dict(state)
    assert f"divided with sharding_strategy={strategy.name}" in it.value.reasons[0]


@pytest.mark.parametrize(
    ("name", "start", "words"),
    [
        ("fabric", [], ["--devices", "2"]),
        ("accelerate_loop", ["-m", "accelerate.commands.launch", *ON_TWO_PROCESSES], []),
    ],
)
def test_two_processes_repeat_and_resume(tmp_path, forking_python, name, start, words):
    """Both are started as their users start them; each rank has a part of the data."""

    def run(folder, *more):
        command = [forking_python, *start, EXAMPLES / f"{name}.py", *words, "--folder", folder]
        execute(*command, *more, OMP_NUM_THREADS="1")

    run(tmp_path / "straight", "--epochs=2")
    run(tmp_path / "resumed", "--epochs=1")
    run(tmp_path / "resumed", "--epochs=2", "--resume")
    ledgers = [tmp_path / "straight/fit-000", tmp_path / "resumed/fit-001"]
    comparison = compare(*ledgers)
    assert (comparison.verdict, len(comparison.ranks)) == ("equal", 2)
    outcomes = [read_ledger(ledgers[1]).outcome(rank) for rank in (0, 1)]
    assert outcomes[0].last.groups["weights"].keys() == WEIGHTS
    assert outcomes[0].last.loss != outcomes[1].last.loss
    saved = tmp_path / "resumed"
    (weights,) = [*saved.glob("checkpoint.pt"), *saved.glob("checkpoint/*.safetensors")]
    assert main(["verify", str(weights), str(ledgers[1])]) == 0
