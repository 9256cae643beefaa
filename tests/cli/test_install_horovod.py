"""``d9m install-horovod`` without a build: what it chooses, does and prints."""

import json
import sys

import pytest
import torch

from lightning_d9m.errors import CommandError
from lightning_d9m.integrations.strategies.horovod.build import name_wheel
from lightning_d9m.tools.cli import install_horovod


@pytest.fixture
def install(monkeypatch, tmp_path, d9m):
    """Return a function that installs without the steps; it gives what it printed, and the steps.

    ``problems`` are what trials of the installed Horovod find, in order.
    """
    taken = []

    def build(folder, _torch, *, mpi):
        taken.append("build")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "horovod-1.whl").touch()
        return folder / "horovod-1.whl"

    def run(problems, *words):
        found = iter(problems)
        monkeypatch.setattr(install_horovod, "_try_installed", lambda mpi: next(found))
        command = ["install-horovod", "--cache", tmp_path, "--json", *words]
        return *d9m(*command), taken

    monkeypatch.setattr(install_horovod, "_build_into", build)

    def install(*words):
        taken.extend(word.rpartition("/")[2] for word in words if word.endswith(".whl"))

    monkeypatch.setattr(install_horovod, "_pip", install)
    return run


@pytest.mark.parametrize(
    ("problems", "cached", "words", "done", "expected"),
    [
        ([None], True, [], "kept", []),
        (["It hung.", None], True, [], "installed", ["horovod-0.whl"]),
        (["It hung.", None], False, [], "built", ["build", "horovod-1.whl"]),
        ([None], True, ["--rebuild"], "built", ["build", "horovod-1.whl"]),
    ],
)
def test_it_does_what_is_missing(install, tmp_path, problems, cached, words, done, expected):
    if cached:
        folder = tmp_path / name_wheel(torch.__version__, mpi=False)
        folder.mkdir()
        (folder / "horovod-0.whl").touch()
    status, out, _, taken = install(problems, *words)
    assert (status, taken) == (0, expected)
    facts = json.loads(out)
    assert facts["done"] == done
    assert facts["wheel"] is None or facts["wheel"].endswith(expected[-1])


def test_an_installation_that_does_not_work(install):
    status, _, err, _ = install(["It hung.", "It hung again."])
    assert status == 3
    assert "allreduce of two processes failed: It hung again." in err


def test_torch_must_be_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CommandError, match="has none: install torch first"):
        install_horovod._find_torch()
