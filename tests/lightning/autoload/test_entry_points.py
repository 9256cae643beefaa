"""``LIGHTNING_D9M=1 python train.py``, on a project without us; what cannot be had is refused."""

import importlib
import inspect
import json
import logging
import sys
import textwrap
import zipfile
from pathlib import Path

import lightning.pytorch as lightning
import pytest
import torch
from scripts import execute
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, SettingError, TooLateError, compatibility
from lightning_d9m.engine.control.session import active_session, enable
from lightning_d9m.engine.ledger.folder import list_fits, read_ledger
from lightning_d9m.integrations.autoload import entry_points as autoload
from lightning_d9m.integrations.autoload.entry_points import call_after_import
from lightning_d9m.integrations.lightning.callback import make_callback
from lightning_d9m.integrations.lightning.trainer_session import resolve_seed

ROOT = Path(__file__).parents[3]
PROJECT = Path(__file__).parents[2] / "support" / "autoload_training.py"
# The second one in a new interpreter, where `import torch` opens the session; others are forks.
STYLES = FORKED, FRESH = ("lightning", "pytorch_lightning")


def run(*words, folder, python=sys.executable, **variables):
    """Run Python in a folder, with ``LIGHTNING_D9M=1`` and other variables of ours."""
    own = {"PYTHONHASHSEED": "0", "LIGHTNING_D9M": "1"}
    own |= {"LIGHTNING_D9M_LEDGER_DIR": str(folder / "d9m")} | variables
    without = ("PL_", "LIGHTNING_")
    done = execute(python, *words, folder=folder, fails=True, without=without, **own)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done, found[-1] if found else {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, forking_python):
    """Train once under two ways to import Lightning."""
    found = {}
    for style in STYLES:
        folder = tmp_path_factory.mktemp("project")
        python = sys.executable if style == FRESH else forking_python
        words = (PROJECT, style, "first", "second")
        done, found[style] = run(*words, folder=folder, python=python)
        assert done.returncode == 0, done.stderr
        found[style]["ledgers"] = [read_ledger(fit) for fit in list_fits(folder / "d9m")]
    return found


@pytest.mark.parametrize("style", STYLES)
def test_every_import_style_is_deterministic_from_the_first_weight_on(trained, style):
    """The package that is not used is not loaded."""
    assert trained[style]["registered"]
    assert trained[style]["first"] == trained[FORKED]["first"]
    assert trained[style]["first"][1] == ["AddedCallback"]
    assert [ledger.header.seed for ledger in trained[style]["ledgers"]] == [0, 0]
    assert trained[style]["packages"] == [style]
    assert trained[style]["is_callback"]


def test_every_way_to_make_a_trainer(tmp_path, forking_python, trained):
    """One list for two Trainers, barebones, the LR finder, LightningCLI, a callback of its own."""
    acts = ["first", "list", "list again", "barebones", "fast_dev_run", "learning rate"]
    words = (PROJECT, "lightning.pytorch", *acts, "command line", "own")
    done, found = run(*words, folder=tmp_path, python=forking_python)
    assert done.returncode == 0, done.stderr
    assert found["first"] == trained[FORKED]["first"]
    assert found["list"] != found["list again"]
    for name in ("list", "list again", "barebones", "fast_dev_run"):
        assert found[name][1] == ["AddedCallback"]
    assert found["command line"] == ["AddedCallback"]
    assert found["own"] == ["DeterminismCallback"]
    # Each fit has one ledger; the learning rate's finder trains without any.
    assert len(list_fits(tmp_path / "d9m")) == 7


@pytest.mark.parametrize(("launch", "ranks"), [("ddp", 2), ("spawn", 1)])
def test_processes_that_lightning_starts_inherit_the_variable(
    launch, ranks, tmp_path, forking_python
):
    """What is spawned is a new interpreter."""
    words = (PROJECT, "lightning.pytorch", launch)
    done, _ = run(*words, folder=tmp_path, python=forking_python, LIGHTNING_D9M_SEED="5")
    assert done.returncode == 0, done.stderr
    (fit,) = list_fits(tmp_path / "d9m")
    headers = read_ledger(fit).headers
    assert {rank: header.seed for rank, header in headers.items()} == dict.fromkeys(range(ranks), 5)


def test_what_cannot_be_obeyed_breaks_no_import_and_stops_the_trainer(tmp_path, forking_python):
    words = (PROJECT, "lightning.pytorch", "first")
    done, _ = run(*words, folder=tmp_path, python=forking_python, LIGHTNING_D9M_SEED="abc")
    said = [line for line in done.stderr.splitlines() if line.startswith("lightning_d9m:")]
    assert len(said) == 1
    assert "LIGHTNING_D9M_SEED is 'abc'; allowed: a whole number." in said[0]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lightning_d9m.errors.SettingError: LIGHTNING_D9M=1 asks for")
    assert "is not possible: The variable LIGHTNING_D9M_SEED is 'abc'" in last


def test_nothing_is_loaded_without_the_variable_and_a_broken_installation_breaks_no_import(
    tmp_path,
):
    """A package of ours that lacks a module: torch works, and no Trainer is built."""
    code = """
        import os, sys, torch, lightning_d9m_autoload
        for value in "", "0":
            os.environ["LIGHTNING_D9M"] = value
            lightning_d9m_autoload.load()  # as torch did at its import
            print([m for m in sys.modules if m.startswith("lightning_d9m.")])
            print(torch.initial_seed() != 0, torch.are_deterministic_algorithms_enabled())
        from lightning_d9m.integrations.autoload import entry_points
        os.environ["LIGHTNING_D9M"] = "1"
        for lacking in ("lightning_d9m.errors", "lightning_d9m.engine.control.session"):
            sys.modules[lacking] = None
            entry_points._AutoloadState.problem = None
            entry_points.load()
            print(float(torch.ones(2).sum()))
            try:
                entry_points.make_callbacks("lightning.pytorch")  # as a Trainer does
            except Exception as error:
                print(error)
            del sys.modules[lacking]
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(code))
    done, _ = run("program.py", folder=tmp_path, LIGHTNING_D9M="")
    *before, first, problem, second, other = done.stdout.splitlines()
    assert before == ["[]", "True False"] * 2
    assert done.stderr.count("LIGHTNING_D9M=1 has no effect") == 2
    assert (first, second) == ("2.0", "2.0")
    assert "import of lightning_d9m.errors halted" in problem
    assert "import of lightning_d9m.engine.control.session halted" in other


# What the installed metadata names, called as torch and Lightning do.
ENTRY_POINTS = """
import os, site, sys
from importlib.metadata import entry_points
site.addsitedir(sys.argv[1])
for group in ("torch.backends", "lightning.pytorch.callbacks_factory"):
    (entry_point,) = entry_points(group=group)
    try:
        print(entry_point.load()())
    except ImportError as error:
        print(error)
"""


def test_an_editable_installation_that_was_moved_breaks_no_import(tmp_path):
    """And a Trainer is refused only where determinism is asked for."""
    tree, installed = tmp_path / "tree", tmp_path / "site-packages"
    (tree / "lightning_d9m").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "lightning_d9m_autoload.py", "docs"):
        (tree / name).symlink_to(ROOT / name)
    for name in ("__init__.py", "version.py"):
        (tree / "lightning_d9m" / name).write_text((ROOT / "lightning_d9m" / name).read_text())
    build = "from hatchling.build import build_editable; print(build_editable('.'))"
    done, _ = run("-c", build, folder=tree)
    zipfile.ZipFile(tree / done.stdout.split()[-1]).extractall(installed)
    tree.rename(tmp_path / "moved")
    for value, callbacks in (("0", "[]"), ("1", "LIGHTNING_D9M=1 asks for a deterministic run, ")):
        words = ("-IS", "-c", ENTRY_POINTS, installed)
        done, _ = run(*words, folder=tmp_path, LIGHTNING_D9M=value)
        loaded, made = done.stdout.splitlines()
        assert loaded == "None", done.stderr
        assert made.startswith(callbacks)
        assert ("has no effect" in done.stderr) == (value == "1")


def test_a_program_that_enables_determinism_itself_keeps_its_session(tmp_path):
    """Lightning is a stub."""
    code = """
        import lightning_d9m
        session = lightning_d9m.enable(seed=3)
        from pytorch_lightning.strategies import StrategyRegistry
        from lightning_d9m.engine.control.session import active_session
        assert active_session() is session
        assert "horovod_d9m" in StrategyRegistry
    """
    (tmp_path / "pytorch_lightning").mkdir()
    stub = "register = lambda self, name, *_, **__: self.update({name: 1})\n"
    stub += "StrategyRegistry = type('Registry', (dict,), {'register': register})()"
    (tmp_path / "pytorch_lightning" / "strategies.py").write_text(stub)
    (tmp_path / "program.py").write_text(textwrap.dedent(code))
    done, _ = run("program.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "loaded"),
    [
        ("from lightning_d9m import Recorder", "0 True True"),
        ("from lightning_d9m.testing import assert_bit_exact", "0 True True"),
        ("import sys; sys.argv = ['d9m']; import lightning_d9m.version", "None None False"),
    ],
)
def test_a_program_may_import_us_before_torch_and_a_command_loads_none(tmp_path, line, loaded):
    """As isort sorts imports, or as a ``d9m`` command in whose variables it is."""
    code = f"""
        {line}
        import sys
        torch = sys.modules.get("torch")
        hooks = sys.modules.get("lightning_d9m.integrations.loop.optimizer_steps")
        print(torch and torch.initial_seed())
        print(torch and torch.are_deterministic_algorithms_enabled())
        print(bool(hooks and hooks.OptimizerSteps.installed))
    """
    done, _ = run("-c", textwrap.dedent(code), folder=tmp_path)
    assert " ".join(done.stdout.split()) == loaded, done.stderr


def test_torch_alone_is_seeded_too(tmp_path, forking_python):
    code = "import torch; print(torch.initial_seed(), torch.are_deterministic_algorithms_enabled())"
    done, _ = run("-c", code, folder=tmp_path, python=forking_python, LIGHTNING_D9M_SEED="7")
    assert done.stdout.split() == ["7", "True"]


def test_a_hook_acts_once_after_an_import_and_leaves_the_module_its_loader(tmp_path, monkeypatch):
    (tmp_path / "hooked_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen, finders = [], list(sys.meta_path)
    call_after_import("hooked_module", lambda: seen.append(sys.modules["hooked_module"].value))
    assert importlib.util.find_spec("hooked_module")  # as a program looks whether it exists
    loaded = importlib.import_module("hooked_module")
    importlib.reload(loaded)
    assert (seen, sys.meta_path) == ([1], finders)
    assert "exec_module" not in vars(loaded.__loader__)
    assert inspect.getsource(loaded) == "value = 1\n"
    call_after_import("hooked_module", lambda: seen.append(2))  # at once
    assert seen == [1, 2]
    del sys.modules["hooked_module"]


@pytest.fixture
def ask(monkeypatch):
    """Return a function that asks for determinism, with a state of the process."""

    def set_state(**state):
        monkeypatch.setenv("LIGHTNING_D9M", "1")
        kind = type("_State", (autoload._AutoloadState,), {"problem": None} | state)
        monkeypatch.setattr(autoload, "_AutoloadState", kind)

    return set_state


@pytest.fixture
def asked(ask, monkeypatch):
    ask(started=True)
    return monkeypatch


def test_lightning_does_not_log_that_it_adds_the_callback(asked, caplog):
    logger = logging.getLogger("lightning.fabric.utilities.registry")
    with caplog.at_level("INFO", logger.name):
        make_callback("lightning.pytorch").early_variables.restore()
        for name in ("other", "lightning_d9m"):
            logger.info("Adding 1 callbacks from entry point '%s': C", name)
    assert [record.message for record in caplog.records] == [
        "Adding 1 callbacks from entry point 'other': C"
    ]
    del asked


def test_variables_that_the_programs_own_callback_does_not_take_are_said(asked, tmp_path):
    asked.setenv("LIGHTNING_D9M_ON_DRIFT", "warn")
    asked.setenv("LIGHTNING_D9M_THREADS", "1")
    words = QUIET | {"max_epochs": 1, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(**words, callbacks=[DeterminismCallback()])
    with pytest.warns(UserWarning, match="these variables are ignored: LIGHTNING_D9M_ON_DRIFT"):
        trainer.fit(make_model(), make_loader(), make_loader(shuffle=False))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("LIGHTNING_D9M", "maybe", "The variable LIGHTNING_D9M is 'maybe'; allowed: 1 or 0."),
        ("LIGHTNING_D9M_SEED", "-1", r"seed is -1; .*settings come from LIGHTNING_D9M_SEED\.\)"),
        ("LIGHTNING_D9M_ON_DRIFT", "shrug", "is 'shrug'; allowed: raise or warn"),
        ("LIGHTNING_D9M_SEDE", "1", "Did you mean LIGHTNING_D9M_SEED?"),
    ],
)
def test_a_bad_variable_refuses_the_trainer(asked, variable, value, message):
    asked.setenv(variable, value)
    with pytest.raises(SettingError, match=message):
        autoload.make_callbacks("lightning.pytorch")


def test_a_session_that_was_not_opened_refuses_the_trainer(ask):
    """``TORCH_DEVICE_BACKEND_AUTOLOAD=0``: nothing was seeded before the model was built."""
    ask(started=False)
    said = r"asks for a seed before the model is built.*TORCH_DEVICE_BACKEND_AUTOLOAD is 0"
    with pytest.raises(TooLateError, match=said):
        autoload.make_callbacks("pytorch_lightning")
    ask(started=False, problem=ValueError())
    with pytest.raises(SettingError, match=r"is not possible: ValueError: no reason is given\."):
        autoload.make_callbacks("lightning.pytorch")


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        (torch, "__version__", "2.3.1", "torch is 2.3.1, and lightning_d9m needs 2.4 or later"),
        (compatibility, "imports_extensions", lambda: False, "loads no extensions when it is"),
    ],
    ids=["torch", "extensions"],
)
def test_a_stack_that_is_too_old_is_said_once_and_the_program_goes_on(
    ask, monkeypatch, capsys, place, name, value, message
):
    ask(started=False, unsupported={})
    monkeypatch.setattr(place, name, value)
    autoload.load()
    assert autoload.make_callbacks("lightning.pytorch") == []
    assert active_session() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightning_d9m: LIGHTNING_D9M=1 has no effect: ")
    assert message in line


def test_a_package_of_lightning_that_is_too_old_is_said_once_where_it_is_used(
    ask, monkeypatch, capsys
):
    """An old one that a program does not use takes nothing from it."""
    ask(started=True, unsupported={})
    monkeypatch.setattr(sys.modules["lightning"], "__version__", "2.1.4")
    assert len(autoload.make_callbacks("pytorch_lightning")) == 1
    for _ in range(2):
        assert autoload.make_callbacks("lightning.pytorch") == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "lightning_d9m: LIGHTNING_D9M=1 adds no callback to a Trainer: lightning is 2.1.4, and "
        "lightning_d9m needs 2.2 or later."
    )


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_nothing_is_added_when_nothing_is_asked(monkeypatch, value):
    monkeypatch.setenv("LIGHTNING_D9M", value)
    assert autoload.make_callbacks("lightning.pytorch") == []


def test_a_seed_that_nobody_chose_gives_way_to_seed_everything(asked, monkeypatch):
    """Two runs with other seeds must not draw the same order of samples."""
    with enable(seed=0) as session:
        monkeypatch.setenv("PL_GLOBAL_SEED", "42")
        assert resolve_seed(None) == 0
        session.seed_is_default = True
        assert resolve_seed(None) == 42
        assert resolve_seed(7) == 7
        session.seed_is_default = False
        assert resolve_seed(None) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    del asked
