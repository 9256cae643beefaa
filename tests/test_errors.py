"""Errors that no test beside the code makes; tests/raise_sites.py lists those that none does."""

import subprocess
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from raise_sites import find_sites

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.errors import CommandError, D9mError, DriftError, file_errors

PREFIX = "lightning_d9m."


# What a case may use: a folder, pytest's monkeypatch, and the module that raises.
def find_unlike_runs(g):
    fit = SimpleNamespace(header=SimpleNamespace(fit=0), path=g.folder / "fit-000")
    found = iter([{"fit-000": fit}, {"fit-000": fit, "fit-001": fit}])
    runs = g.module.Runs(["true"], g.folder)
    run = import_module(f"{PREFIX}tools.launch.runs").RunResult
    g.patch.setattr(runs, "run", lambda *_, **__: run(next(found)))
    equal = SimpleNamespace(one_is_longer=False, verdict="equal")
    g.patch.setattr(g.module, "compare_ledgers", lambda *_: equal)
    next(g.module.Runner(runs, {}, beside=False).run_pairs("whole run", 1))


def go_into_a_loop_of_optimizers(g):
    header = SimpleNamespace(settings={"every_n_steps": 100})
    run = SimpleNamespace(ledger=SimpleNamespace(path="runs", header=header))
    g.module.find_segment(run, 3)


def go_without_a_terminal(g):
    words = {"step": 1, "rank": 0, "format": "text", "trace": False, "debugger": "pdb"}
    g.patch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    run = SimpleNamespace(ledger=SimpleNamespace(header=SimpleNamespace(world_size=1)))
    g.module._check_arguments(SimpleNamespace(**words, first_nonfinite=False), run)


def debug_a_compiled_module(g):
    g.patch.setattr(g.module, "is_compiled", lambda _: True)
    opened = SimpleNamespace(open_debugger=lambda *_: "a debugger")
    callback = g.module.InterruptingCallback(opened, SimpleNamespace(folder=None))
    callback.on_train_batch_start(SimpleNamespace(global_step=3), None)


def save_a_checkpoint_of_something_else(g):
    torch.save([1], g.folder / "model.ckpt")
    g.module.load_checkpoint(g.folder / "model.ckpt")


def import_the_other_package(g):
    g.patch.setattr(g.module, "import_module", lambda _: SimpleNamespace(Callback=Path))
    g.module.make_callback("pytorch_lightning")


def run_pip_that_fails(g):
    failed = subprocess.CompletedProcess([], 1, "", "no")
    g.patch.setattr(g.module.subprocess, "run", lambda *_, **__: failed)
    g.module._pip("horovod")


def count_too_many_ranks(g):
    g.patch.setattr(g.module, "MAX_RANKS", 0)
    (g.folder / "rank-0.jsonl").touch()
    read_ledger(g.folder)


# The module that raises, what makes it raise, and words of the message.
CASES = [
    (
        "integrations.lightning.saved_state",
        save_a_checkpoint_of_something_else,
        "it holds no dict.",
    ),
    (
        "integrations.lightning.saved_state",
        lambda g: g.module.load_checkpoint(g.folder),
        "{folder} cannot be read: [Errno 21] Is a directory",
    ),
    ("tools.cli.machine.install_horovod", run_pip_that_fails, "` failed with exit status"),
    (
        "tools.cli.locate",
        lambda g: g.module.run(
            SimpleNamespace(argv=["b"], expected="a", actual=None, no_determinism=False)
        ),
        "One run is given, a. Give two",
    ),
    (
        "tools.segments.segment",
        lambda g: g.module.find_first_fit(g.module.RunResult({})),
        "The command wrote no ledger of a fit.",
    ),
    ("tools.segments.goto", go_into_a_loop_of_optimizers, "Add lightning_d9m.Recorder"),
    ("tools.cli.goto", go_without_a_terminal, "pdb reads from the terminal"),
    (
        "integrations.lightning.interruption",
        debug_a_compiled_module,
        "a debugger cannot step through compiled code",
    ),
    ("tools.locate.runner", find_unlike_runs, "The two runs left different ledgers:"),
    (
        "integrations.lightning.callback",
        import_the_other_package,
        "was imported after a Trainer of",
    ),
    (
        "engine.control.settings",
        lambda g: g.module.validate_choice("on_drift", "ignore", ("raise", "warn")),
        "on_drift is 'ignore'; allowed: ",
    ),
    ("engine.ledger.folder", count_too_many_ranks, "ranks; a ledger has at most"),
    (
        "tools.lint.source",
        lambda g: list(g.module.list_files([Path("/dev/null")])),
        "is neither a file nor a folder.",
    ),
]


@pytest.mark.parametrize(("raiser", "make", "words"), CASES)
def test_a_message(raiser, make, words, tmp_path, monkeypatch):
    ground = SimpleNamespace(
        folder=tmp_path, patch=monkeypatch, module=import_module(PREFIX + raiser)
    )
    with pytest.raises(D9mError) as caught:
        make(ground)
    assert words.format(folder=tmp_path) in str(caught.value)
    assert caught.traceback[-1].frame.f_globals["__name__"] == PREFIX + raiser


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, ""), "The page a cannot be read: No such file or directory. Check"),
        (OSError(5, ""), "read: Input/output error. Check the path and the disk. Ask."),
        (ValueError("embedded null byte"), "read: embedded null byte. Ask."),
        (D9mError("ours"), "ours"),
    ],
)
def test_a_file_operation_that_fails(error, said):
    with (
        pytest.raises(D9mError) as caught,
        file_errors(CommandError, "The page a cannot be read", "Ask."),
    ):
        raise error
    assert said in str(caught.value)
    assert isinstance(caught.value, CommandError) == (said != "ours")


def test_an_error_has_the_facts_of_its_class_alone():
    with pytest.raises(TypeError, match=r"DriftError has no \['steps'\]"):
        DriftError("text", steps=3)


def test_a_site_is_each_call_that_makes_one_of_our_errors():
    source = "raise SettingError(\n    'no'\n)\nerrors.LedgerError('no')\nraise ValueError('no')\n"
    assert find_sites(source, "a") == [("a", 1, 3), ("a", 4, 4)]
