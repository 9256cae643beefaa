"""Every message of the package has a test that names it; those that no other names are here.

A message counts as named when a text in a test holds two or more successive words of it that stand
in no other message.
"""

import argparse
import ast
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripts import load_script

from lightning_d9m.errors import D9mError
from lightning_d9m.launch.left_files import FileWatch
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.records import Header
from lightning_d9m.ledger.format.writer import LedgerWriter

TESTS = Path(__file__).parents[1]
PREFIX = "lightning_d9m."


@dataclass
class Ground:
    """What a case may use: a folder, pytest's monkeypatch, and the module that raises."""

    folder: Path
    patch: pytest.MonkeyPatch
    module: Any

    def file(self, text="", name="file"):
        path = self.folder / name
        path.write_text(text)
        return path

    def refuse(self, owner, name, error):
        def refusing(*_, **__):
            raise error

        self.patch.setattr(owner, name, refusing)

    def ledger(self, fit, rank=0):
        path = self.folder / fit / f"rank-{rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        header = Header(
            rank=rank, world_size=1, fit=0, seed=0, created="", package="", settings={}, stack={}
        )
        with LedgerWriter(path) as writer:
            writer.write(header.as_record())
        return path.parent


NOTHING = OSError(5, "Input/output error")
ABSENT = FileNotFoundError(2, "No such file or directory")


def asks(function, **words):
    """A case that checks the arguments of a command."""

    def func(g):
        given = {
            "runs": 2,
            "tries": 1,
            "timeout": None,
            "interrupt": False,
            "allow_objects": False,
            "processes": None,
            "last_bits": False,
            "threads": None,
        } | words
        call = getattr(g.module, function)
        arguments = argparse.Namespace(**given)
        return call(arguments, ["true"]) if call.__code__.co_argcount == 2 else call(arguments)

    return func


def use_full_folder(g):
    g.patch.chdir(g.folder)
    for number in range(1000):
        (g.folder / "d9m-runs" / f"{number:03d}").mkdir(parents=True)
    g.module.make_output(None)


def repeat_what_fails(g):
    why = import_module(f"{PREFIX}errors").CommandError("why")
    g.refuse(import_module(f"{PREFIX}launch.run"), "run_once", why)
    plans = [{"title": "run 1 of 2"}]
    g.module._repeat(plans, g.module.Runs([], g.folder), FileWatch([], g.folder))


def find_unlike_runs(g):
    found = iter([{"fit-000": 1}, {"fit-000": 1, "fit-001": 2}])
    runs = g.module.Runs(["true"], g.folder)
    g.patch.setattr(
        runs, "run", lambda *_, **__: import_module(f"{PREFIX}launch.run").Run(next(found))
    )
    g.module.Runner(runs, {}).run_pair("whole run")


def save_a_checkpoint_of_something_else(g):
    path = g.folder / "model.ckpt"
    torch.save([1], path)
    g.module.load_checkpoint(path)


def import_the_other_package(g):
    g.patch.setattr(g.module, "import_module", lambda _: SimpleNamespace(Callback=Path))
    g.module.make_callback("pytorch_lightning")


def build_without_cmake(g):
    for tool in ("c++", "make"):
        (g.folder / tool).write_text("#!/bin/sh\n")
        (g.folder / tool).chmod(0o755)
    g.patch.setenv("PATH", str(g.folder))
    target = g.module.Target(torch="", mpi=False, nccl=False)
    g.module.find_tools(target, {"PATH": str(g.folder)})


def run_pip_that_fails(g):
    failed = subprocess.CompletedProcess([], 1, "", "no")
    g.patch.setattr(g.module.subprocess, "run", lambda *_, **__: failed)
    g.module._pip("horovod")


def name_a_pipe(g):
    path = g.folder / "pipe"
    os.mkfifo(path)
    list(g.module.list_files([path], []))


def count_too_many_ranks(g):
    g.patch.setattr(g.module, "MAX_RANKS", 0)
    read_ledger(g.ledger("fit-000"))


def set_variable(name, value, function, *words, **named):
    def func(g):
        g.patch.setenv(name, value)
        return getattr(g.module, function)(*words, **named)

    return func


def forbid_a_value(g):
    g.patch.setenv(g.module.NCCL, "NVLS")
    g.module._choose(next(v for v in g.module.VARIABLES if v.name == g.module.NCCL))


def forget_the_flags(g):
    g.patch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    g.module.verify_flags(g.module.wanted_flags(fill_uninitialized_memory=True))


# The module that raises, what makes it raise, and words of the message that no other message of the
# module has. If these are few, also values that are filled in.
CASES = [
    ("lightning.checkpoint_io", save_a_checkpoint_of_something_else, "it holds no dict."),
    (
        "lightning.checkpoint_io",
        lambda g: g.module.load_checkpoint(g.folder),
        ("… cannot be read: …", "{folder} cannot be read: ", "Is a directory"),
    ),
    (
        "horovod.build",
        lambda g: g.module.find_tools(
            g.module.Target(torch="", mpi=False, nccl=False), {"CXX": "no-compiler-of-this-name"}
        ),
        (
            "is not on PATH: install it (Debian: `apt-get install …`) and run",
            "'no-compiler-of-this-name' is not",
        ),
    ),
    (
        "horovod.build",
        build_without_cmake,
        "but 'cmake' is not on PATH: install it (Debian: `apt-get install cmake`",
    ),
    ("cli.install_horovod", run_pip_that_fails, "` failed with exit status"),
    (
        "launch.processes",
        lambda g: g.module._start(["true"], g.module.ProcessStart({}, g.folder / "none" / "log")),
        ("The log … cannot be made: …", "The log {folder}/none/log cannot", "No such file"),
    ),
    ("cli.repeat", repeat_what_fails, ("In ……: …", "In run 1 of 2", ": why")),
    (
        "launch.run",
        use_full_folder,
        ("… holds 1000 repetitions already.", "d9m-runs holds 1000 repetitions already."),
    ),
    (
        "launch.run",
        lambda g: (g.refuse(Path, "mkdir", ABSENT), g.module.make_output(g.folder / "new")),
        "Give another with --output.",
    ),
    (
        "launch.run",
        lambda g: g.module.make_output(g.file() / "new"),
        (
            "The folder … cannot be made: …",
            "The folder {folder}/file/new cannot",
            "Not a directory",
        ),
    ),
    (
        "launch.interruption_points",
        lambda g: (g.file("x", g.module.SURVEY), g.module.read_survey(g.folder)),
        ("… cannot be read: …", "{folder}/", "Expecting value: line 1 column 1"),
    ),
    (
        "cli.report",
        lambda g: (
            path := g.file(),
            g.refuse(Path, "open", NOTHING),
            g.module.check_output(path, force=False),
        ),
        ("… cannot be read: …", "{folder}/file cannot be read: ", "Input/output error"),
    ),
    (
        "cli.report",
        lambda g: g.module.check_output(g.folder, force=False),
        "name a file in a folder that exists (-o).",
    ),
    (
        "cli.report",
        lambda g: g.module.write_page(g.folder, ""),
        ("… cannot be written: …", "{folder} cannot", "Is a directory"),
    ),
    ("locate.search", find_unlike_runs, "The two runs left different ledgers:"),
    (
        "lightning.autoload.auto_callback",
        import_the_other_package,
        "was imported after a Trainer of",
    ),
    (
        "control.settings",
        lambda g: g.module.validate_choice("on_drift", "ignore", ("raise", "warn")),
        ("… is …; allowed: ….", "on_drift is 'ignore'; allowed: ", "raise", "warn"),
    ),
    (
        "control.env_settings",
        lambda g: g.module.read_value("LIGHTNING_D9M_SEED", "x", int),
        ("The variable … is …; allowed: ….", "LIGHTNING_D9M_SEED is 'x'; allowed: "),
    ),
    (
        "logical_ranks.buckets",
        lambda g: g.module.check_options(op="max", bucket_bytes=0),
        "is not known: pass 'average' or 'sum'.",
    ),
    (
        "logical_ranks.buckets",
        lambda g: g.module.check_options(op="sum", bucket_bytes=0, compression="zip"),
        "is not known: pass 'fp16', 'bf16' or None.",
    ),
    (
        "logical_ranks.buckets",
        lambda g: g.module.check_options(op="sum", bucket_bytes=-1),
        "is not allowed: pass a whole number, 0 or more.",
    ),
    (
        "horovod.environment",
        set_variable("NCCL_ALGO", "NVLS", "set_variables", initialized=False, stall_seconds=1.0),
        "which lets NCCL reduce by NVLS",
    ),
    (
        "launch.interruption_points",
        lambda g: g.module.parse_point("epoch:x"),
        "with whole numbers, and +N",
    ),
    ("lint.scanner", lambda g: g.module.choose_version("new"), "is not a version of torch."),
    ("control.torch_flags", forget_the_flags, "something changed it during the run"),
    (
        "logical_ranks.tree",
        lambda g: g.module.Blocks(8, 0),
        ("…=… is not allowed: pass a whole number from 1.", "processes=0 is"),
    ),
    ("control.settings", lambda g: g.module.Settings(seed=-1), "allowed: a whole number from"),
    ("control.environment", forbid_a_value, "which a deterministic session does not allow."),
    (
        "probes.dumps",
        lambda g: g.module.Dump(g.file(), 0).save(
            g.module.ProbePoint(0, 0, 0), ("loss", "loss", 0), {}
        ),
        ("… cannot be written: …", "{folder}/file", "Not a directory"),
    ),
    ("ledger.folder", count_too_many_ranks, "ranks; a ledger has at most"),
    (
        "ledger.format.writer",
        lambda g: LedgerWriter(g.folder),
        ("The ledger … cannot be made: …", "The ledger {folder} cannot", "exists"),
    ),
    (
        "ledger.folder",
        lambda g: (g.refuse(Path, "iterdir", NOTHING), read_ledger(g.folder)),
        ("… cannot be read: …", "{folder} cannot be read: ", "Input/output error"),
    ),
    (
        "ledger.format.files",
        lambda g: g.module.open_regular(g.folder / "none"),
        ("… cannot be read: …", "{folder}/none cannot be read: ", "No such file"),
    ),
    (
        "patches.catalog.catalog",
        lambda g: g.module.find_op("no_such_op"),
        "The catalog has no op",
    ),
    (
        "audit.ops.torch_docs",
        lambda g: g.module.read_documentation(""),
        "in the expected form",
    ),
    ("lint.files", name_a_pipe, "is neither a file nor a folder."),
]


def split(words):
    """Return the words of a message, and the values that are filled in."""
    return (words, ()) if isinstance(words, str) else (words[0], words[1:])


@pytest.mark.parametrize(
    ("raiser", "func", "words"),
    CASES,
    ids=[f"{raiser}-{split(words)[0]}" for raiser, _, words in CASES],
)
def test_a_message(raiser, func, words, tmp_path, monkeypatch):
    ground = Ground(tmp_path, monkeypatch, import_module(PREFIX + raiser))
    with pytest.raises(D9mError) as caught:
        func(ground)
    monkeypatch.undo()
    template, values = split(words)
    text = str(caught.value)
    assert re.search(re.escape(template).replace("…", ".+"), text), text
    for value in values:
        assert value.format(folder=tmp_path) in text
    assert caught.traceback[-1].frame.f_globals["__name__"] == PREFIX + raiser


def words_of(text):
    """Return all pairs of successive words, without marks, on one side of what is filled in."""
    parts = [re.findall(r"[\w=.\[\]-]*\w", part) for part in re.split(r"…|\.\*", text)]
    return {pair for part in parts for pair in pairwise(part)}


def read_texts():
    """Yield the texts in the tests, docstrings left out."""
    for path in [*TESTS.rglob("test_*.py"), *(TESTS / "support").glob("*_refusals.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr):
                node.value = ast.Constant(None) if is_text(node.value) else node.value
            if is_text(node):
                yield re.sub(r"\\([^\w\s])", r"\1", node.value)


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def find_unnamed(messages, texts, cases):
    """Return the messages of which no text holds words of their own, and that no case raises."""
    pairs = {message: words_of(message) for _, message in messages}
    count = Counter(pair for found in pairs.values() for pair in found)
    named = {pair for text in texts for pair in words_of(text)}
    return [
        (module, message)
        for module, message in messages
        if not any(count[pair] == 1 and pair in named for pair in pairs[message])
        and not any(
            PREFIX + raiser == module and split(words)[0] in message for raiser, _, words in cases
        )
    ]


@cache
def read_messages():
    found = load_script("docs/write_errors.py").read_messages()
    return list(dict.fromkeys(entry for messages in found.values() for entry in messages))


def test_every_message_is_named_in_a_test():
    assert not find_unnamed(read_messages(), read_texts(), CASES)


def test_each_case_raises_one_message():
    """Another message of the same module does not fit its words."""
    messages = read_messages()
    for raiser, _, words in CASES:
        template, own = split(words)[0], [m for module, m in messages if module == PREFIX + raiser]
        fitting = [m for m in own if m == template] or [m for m in own if template in m]
        assert len(fitting) == 1, (raiser, words, fitting)


def test_few_words_come_with_a_value():
    few = [case for case in CASES if len(words_of(split(case[2])[0])) < 3]
    assert not [raiser for raiser, _, words in few if not split(words)[1]]


def test_a_message_without_a_test_is_found():
    new = ("lightning_d9m.control.new", "The colour … is no number of stripes.")
    cases = [("control.settings", None, "number of stripes.")]  # another module's does not count
    assert find_unnamed([new], ["An odd thing happened."], cases) == [new]
    assert not find_unnamed([new], ["number of stripes"], [])
    assert not find_unnamed([new], [], [("control.new", None, "number of stripes.")])
