"""``LIGHTNING_D9M=1 python train.py``, in processes of their own, on a project without us."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from lightning_d9m.cli.main import main
from lightning_d9m.ledger.folder import list_fits, read_ledger

PROJECT = Path(__file__).parents[2] / "support" / "autoload_training.py"
ENTRY_POINTS = {
    "torch.backends": "load",
    "lightning.pytorch.callbacks_factory": "make_lightning_callbacks",
    "pytorch_lightning.callbacks_factory": "make_pytorch_lightning_callbacks",
}
STYLES = ("lightning", "lightning.pytorch", "pytorch_lightning")


def run(*words, folder, python=sys.executable, **variables):
    """Run Python in a folder, with ``LIGHTNING_D9M=1`` and other variables of ours."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "LIGHTNING_"))}
    environment |= {"PYTHONHASHSEED": "0", "LIGHTNING_D9M": "1"}
    environment |= {"LIGHTNING_D9M_LEDGER_DIR": str(folder / "d9m")} | variables
    done = subprocess.run(
        [python, *map(str, words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done, found[-1] if found else {}


@pytest.mark.parametrize(("group", "function"), ENTRY_POINTS.items())
def test_the_entry_points_are_installed(group, function):
    """Without them nothing below can work; `pip install -e .` installs those of pyproject.toml."""
    values = [entry.value for entry in entry_points(group=group) if entry.name == "lightning_d9m"]
    assert values == [f"lightning_d9m.lightning.autoload.entry_points:{function}"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train once under each way to import Lightning."""
    found = {}
    for style in STYLES:
        folder = tmp_path_factory.mktemp("project")
        done, found[style] = run(PROJECT, style, "first", "second", folder=folder)
        assert done.returncode == 0, done.stderr
        found[style]["ledgers"] = [read_ledger(fit) for fit in list_fits(folder / "d9m")]
    return found


@pytest.mark.parametrize("style", STYLES)
def test_every_import_style_is_deterministic_from_the_first_weight_on(trained, style):
    assert trained[style]["registered"]
    assert trained[style]["first"] == trained["lightning"]["first"]
    assert trained[style]["first"][1] == ["AddedCallback"]
    assert [ledger.header.seed for ledger in trained[style]["ledgers"]] == [0, 0]


def test_two_trainers_in_one_process_differ_as_they_do_in_another_run(trained):
    first, second = trained["lightning"]["first"], trained["lightning"]["second"]
    assert first != second
    assert trained["pytorch_lightning"]["second"] == second


def test_every_way_to_make_a_trainer(tmp_path, forking_python):
    """One list for two Trainers, barebones, the LR finder, LightningCLI, a callback of its own."""
    acts = ["list", "list again", "barebones", "fast_dev_run", "learning rate", "command line"]
    words = (PROJECT, "lightning.pytorch", *acts, "own")
    done, found = run(*words, folder=tmp_path, python=forking_python)
    assert done.returncode == 0, done.stderr
    assert found["list"] != found["list again"]
    for name in ("list", "list again", "barebones", "fast_dev_run"):
        assert found[name][1] == ["AddedCallback"]
    assert found["command line"] == ["AddedCallback"]
    assert found["own"] == ["DeterminismCallback"]
    # Each fit has one ledger; the learning rate's finder trains without any.
    assert len(list_fits(tmp_path / "d9m")) == 6


@pytest.mark.parametrize("launch", ["ddp", "spawn"])
def test_processes_that_lightning_starts_inherit_the_variable(launch, tmp_path):
    done, _ = run(PROJECT, "lightning.pytorch", launch, folder=tmp_path, LIGHTNING_D9M_SEED="5")
    assert done.returncode == 0, done.stderr
    (fit,) = list_fits(tmp_path / "d9m")
    headers = read_ledger(fit).headers
    assert {rank: header.seed for rank, header in headers.items()} == {0: 5, 1: 5}


def test_what_cannot_be_obeyed_breaks_no_import_and_stops_the_trainer(tmp_path):
    done, _ = run(PROJECT, "lightning.pytorch", "first", folder=tmp_path, LIGHTNING_D9M_SEED="abc")
    said = [line for line in done.stderr.splitlines() if line.startswith("lightning_d9m:")]
    assert len(said) == 1
    assert "LIGHTNING_D9M_SEED is 'abc'; allowed: a whole number." in said[0]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lightning_d9m.errors.SettingError: LIGHTNING_D9M=1 asks for")
    assert "is not possible: The variable LIGHTNING_D9M_SEED is 'abc'" in last


@pytest.mark.parametrize("lacking", ["errors", "control.session"])
def test_a_broken_installation_breaks_no_import(lacking, tmp_path):
    """A package of ours that lacks a module: torch works, and no Trainer is built."""
    code = f"""
        import sys
        sys.modules["lightning_d9m.{lacking}"] = None
        import torch
        import pytorch_lightning
        print(float(torch.ones(2).sum()))
        pytorch_lightning.Trainer(accelerator="cpu")
        print("built")
    """
    (tmp_path / "program.py").write_text("\n".join(line[8:] for line in code.splitlines()))
    done, _ = run("program.py", folder=tmp_path)
    assert done.stdout.split() == ["2.0"]
    assert done.stderr.count("LIGHTNING_D9M=1 has no effect") == 1
    assert f"import of lightning_d9m.{lacking} halted" in done.stderr.splitlines()[-1]


def test_a_program_that_enables_determinism_itself_keeps_its_session(tmp_path):
    """Its call loads torch from the midst of our own modules."""
    code = """
        import lightning_d9m
        session = lightning_d9m.enable(seed=3)
        import pytorch_lightning
        from lightning_d9m.control.session import active_session
        assert active_session() is session
        assert "horovod_d9m" in pytorch_lightning.strategies.StrategyRegistry
        trainer = pytorch_lightning.Trainer(accelerator="cpu", logger=False)
        assert [type(c).__name__ for c in trainer.callbacks].count("AddedCallback") == 1
        print("{}")
    """
    (tmp_path / "program.py").write_text("\n".join(line[8:] for line in code.splitlines()))
    done, _ = run("program.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_variable_nothing_is_loaded(value, tmp_path):
    code = (
        "import torch, sys; print([m for m in sys.modules if m.startswith('lightning_d9m.')],"
        "torch.initial_seed() != 0, torch.are_deterministic_algorithms_enabled())"
    )
    done, _ = run("-c", code, folder=tmp_path, LIGHTNING_D9M=value)
    autoload = "lightning_d9m.lightning.autoload"
    loaded = [
        "lightning_d9m.version",
        "lightning_d9m.lightning",
        autoload,
        f"{autoload}.entry_points",
    ]
    assert done.stdout.strip() == f"{loaded} True False"


def test_torch_alone_is_seeded_too(tmp_path):
    code = "import torch; print(torch.initial_seed(), torch.are_deterministic_algorithms_enabled())"
    done, _ = run("-c", code, folder=tmp_path, LIGHTNING_D9M_SEED="7")
    assert done.stdout.split() == ["7", "True"]


def test_repeat_of_a_project_that_never_mentions_us(tmp_path, monkeypatch, capsys, forking_python):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_D9M", raising=False)
    command = [forking_python, str(PROJECT), "lightning.pytorch", "first"]
    assert main(["repeat", "-n", "2", "--", *command]) == 0
    assert "equal: 2 runs agree bit for bit" in capsys.readouterr().out
