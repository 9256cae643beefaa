"""``d9m install-horovod`` without a build: what it chooses, does and prints."""

import json
import sys

import pytest

from lightning_d9m.errors import CommandError
from lightning_d9m.tools.cli.machine import install_horovod


@pytest.fixture
def install(monkeypatch, tmp_path, d9m):
    """Return a function that installs without the steps; it gives what it printed, and the steps.

    ``problems`` are what trials of the installed Horovod find, in order.
    """
    taken = []

    def build(folder, target):
        taken.append("build")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "horovod-1.whl").touch()
        return folder / "horovod-1.whl"

    def run(problems, *words):
        found = iter(problems)
        monkeypatch.setattr(install_horovod, "_try_installed", lambda _: next(found))
        command = ["install-horovod", "--gpu", "none", "--cache", tmp_path, "--json", *words]
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
        folder = tmp_path / install_horovod._find_target(mpi=False, gpu="none").key
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


def test_what_torch_must_be(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(CommandError, match="--gpu nccl needs a CUDA build"):
        install_horovod._find_target(mpi=False, gpu="nccl")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CommandError, match="has none: install torch first"):
        install_horovod._find_target(mpi=False, gpu="none")


def test_kernels_are_compiled_for_the_present_devices(monkeypatch):
    """Unless the user chooses; without a device, Horovod's own list remains."""

    def list_targets(gpu, *devices):
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(devices))
        monkeypatch.setattr("torch.cuda.get_device_capability", devices.__getitem__)
        return install_horovod._find_target(mpi=False, gpu=gpu).capabilities

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("HOROVOD_BUILD_CUDA_CC_LIST", raising=False)
    assert list_targets("auto", (9, 0), (8, 0), (9, 0)) == ("80", "90")
    assert list_targets("nccl") == list_targets("none", (9, 0)) == ()
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "70, 90")
    assert list_targets("auto", (8, 0)) == ("70", "90")
