"""Errors that no test beside the code makes; tests/raise_sites.py lists those that none does."""

import subprocess
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from raise_sites import find_sites

from lightning_d9m.errors import CommandError, D9mError, DriftError, file_errors
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.probes.trace import ProbePoint

PREFIX = "lightning_d9m."


class Ground:
    """What a case may use: a folder, pytest's monkeypatch, and the module that raises."""

    def __init__(self, folder, patch, module):
        self.folder, self.patch, self.module = folder, patch, module

    def file(self):
        path = self.folder / "file"
        path.write_text("")
        return path


def use_full_folder(g):
    g.patch.chdir(g.folder)
    for number in range(1000):
        (g.folder / "d9m-runs" / f"{number:03d}").mkdir(parents=True)
    g.module.make_output(None)


def find_unlike_runs(g):
    found = iter([{"fit-000": 1}, {"fit-000": 1, "fit-001": 2}])
    runs = g.module.Runs(["true"], g.folder)
    run = import_module(f"{PREFIX}launch.run").Run
    g.patch.setattr(runs, "run", lambda *_, **__: run(next(found)))
    g.module.Runner(runs, {}).run_pair("whole run")


def save_a_checkpoint_of_something_else(g):
    torch.save([1], g.folder / "model.ckpt")
    g.module.load_checkpoint(g.folder / "model.ckpt")


def import_the_other_package(g):
    g.patch.setattr(g.module, "import_module", lambda _: SimpleNamespace(Callback=Path))
    g.module.make_callback("pytorch_lightning")


def describe_build(g, environment):
    target = g.module.Target(torch="", mpi=False)
    return g.module.build_environment(target, g.folder, environment)


def build_without_cmake(g):
    for tool in ("c++", "make"):
        (g.folder / tool).write_text("#!/bin/sh\n")
        (g.folder / tool).chmod(0o755)
    g.patch.setenv("PATH", str(g.folder))
    describe_build(g, {"PATH": str(g.folder)})


def run_pip_that_fails(g):
    failed = subprocess.CompletedProcess([], 1, "", "no")
    g.patch.setattr(g.module.subprocess, "run", lambda *_, **__: failed)
    g.module._pip("horovod")


def count_too_many_ranks(g):
    g.patch.setattr(g.module, "MAX_RANKS", 0)
    (g.folder / "rank-0.jsonl").touch()
    read_ledger(g.folder)


def set_variables_with_nvls(g):
    g.patch.setenv("NCCL_ALGO", "NVLS")
    g.module.set_variables(initialized=False, stall_seconds=1.0)


def forbid_a_value(g):
    g.patch.setenv(g.module.NCCL, "NVLS")
    g.module._choose(next(v for v in g.module.VARIABLES if v.name == g.module.NCCL))


def forget_the_flags(g):
    g.patch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    with g.module.deterministic() as opened:
        torch.backends.cudnn.deterministic = False
        opened.verify()


def dump_below_a_file(g):
    point = ProbePoint(0, 0, 0)
    g.module.Dump(g.file(), 0).save(point, ("loss", "loss", 0), {})


def check_options(**given):
    return lambda g: g.module.check_options(**({"op": "sum", "bucket_bytes": 0} | given))


# The module that raises, what makes it raise, and words of the message.
CASES = [
    ("lightning.saved_state", save_a_checkpoint_of_something_else, "it holds no dict."),
    (
        "lightning.saved_state",
        lambda g: g.module.load_checkpoint(g.folder),
        "{folder} cannot be read: [Errno 21] Is a directory",
    ),
    (
        "horovod.build",
        lambda g: describe_build(g, {"CXX": "no-compiler-of-this-name"}),
        "'no-compiler-of-this-name' is missing: install it (Debian: `apt-get install ",
    ),
    (
        "horovod.build",
        build_without_cmake,
        "but 'cmake' is missing: install it (Debian: `apt-get install cmake`",
    ),
    ("cli.install_horovod", run_pip_that_fails, "` failed with exit status"),
    ("launch.run", use_full_folder, "d9m-runs holds 1000 repetitions already."),
    ("locate.search", find_unlike_runs, "The two runs left different ledgers:"),
    (
        "lightning.callback",
        import_the_other_package,
        "was imported after a Trainer of",
    ),
    (
        "control.settings",
        lambda g: g.module.validate_choice("on_drift", "ignore", ("raise", "warn")),
        "on_drift is 'ignore'; allowed: ",
    ),
    (
        "control.settings",
        lambda g: g.module.read_value("LIGHTNING_D9M_SEED", "x", int),
        "LIGHTNING_D9M_SEED is 'x'; allowed: ",
    ),
    (
        "logical_ranks.gradients",
        check_options(op="max"),
        "is not known: pass 'average' or 'sum'.",
    ),
    (
        "logical_ranks.gradients",
        check_options(compression="zip"),
        "is not known: pass 'fp16', 'bf16' or None.",
    ),
    (
        "logical_ranks.gradients",
        check_options(bucket_bytes=-1),
        "is not allowed: pass a whole number, 0 or more.",
    ),
    ("horovod.environment", set_variables_with_nvls, "which lets NCCL reduce by NVLS"),
    ("control.session", forget_the_flags, "something changed it during the run"),
    (
        "logical_ranks.tree",
        lambda g: g.module.Blocks(8, 0),
        "processes=0 is not allowed: pass a whole number from 1.",
    ),
    ("control.settings", lambda g: g.module.Settings(seed=-1), "allowed: a whole number from"),
    ("control.environment", forbid_a_value, "which a deterministic session does not allow."),
    ("probes.dumps", dump_below_a_file, "{folder}/file"),
    ("ledger.folder", count_too_many_ranks, "ranks; a ledger has at most"),
    (
        "lint.source",
        lambda g: list(g.module.list_files([Path("/dev/null")])),
        "is neither a file nor a folder.",
    ),
]


@pytest.mark.parametrize(("raiser", "make", "words"), CASES)
def test_a_message(raiser, make, words, tmp_path, monkeypatch):
    ground = Ground(tmp_path, monkeypatch, import_module(PREFIX + raiser))
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
