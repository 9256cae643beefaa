"""``d9m doctor``: each problem is found when it is there, and vanishes with its fix."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from lightning_d9m.adapters.cli import main
from lightning_d9m.adapters.doctor import format_finding
from lightning_d9m.control import diagnosis
from lightning_d9m.control.diagnosis import Finding, find_problems


@pytest.fixture
def healthy(monkeypatch):
    """An environment in which there is nothing to mend."""
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "NCCL_", "CUBLAS_", "OMP_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(diagnosis, "describe_hash_seed_problem", lambda: None)


def statuses():
    return {finding.name: finding.status for finding in find_problems()}


def test_a_healthy_environment_has_nothing_to_mend(healthy, capsys):
    assert "problem" not in statuses().values()
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("\nNothing to mend.\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("NCCL_ALGO", "Tree,NVLS"),
        ("HOROVOD_FUSION_THRESHOLD", "67108864"),
        ("HOROVOD_AUTOTUNE", "1"),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
    ],
)
def test_a_variable_that_allows_nondeterminism_is_found(healthy, monkeypatch, capsys, name, value):
    monkeypatch.setattr(diagnosis, "_has", lambda package: True)
    monkeypatch.setattr(diagnosis, "version", lambda package: "0.28.1")
    monkeypatch.setattr(diagnosis, "distribution", lambda package: Distribution("mpi_lib_v2.so"))
    assert statuses()[name] == "ok"
    monkeypatch.setenv(name, value)
    assert statuses()[name] == "problem"
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert output.startswith(f"problem  {name}: {value}\n")
    assert "Fix: Unset it" in output
    assert output.endswith("1 problem found.\n")


class Distribution:
    """An installed distribution with one file."""

    def __init__(self, name):
        self.files = [type("File", (), {"name": name})]


def test_horovod_without_its_extension_is_found(healthy, monkeypatch):
    monkeypatch.setattr(diagnosis, "_has", lambda package: True)
    monkeypatch.setattr(diagnosis, "version", lambda package: "0.28.1")
    monkeypatch.setattr(diagnosis, "distribution", lambda package: Distribution("mpi_ops.py"))
    assert statuses()["Horovod"] == "problem"


def test_a_missing_lightning_is_noted_and_horovod_not_looked_at(healthy, monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(diagnosis, "version", missing)
    assert statuses()["Lightning"] == "note"
    assert "Horovod" not in statuses()


def test_an_old_torch_is_found(healthy, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert statuses()["torch"] == "problem"


def test_threads_are_noted_until_they_are_fixed(healthy, monkeypatch):
    assert statuses()["CPU threads"] == "note"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert statuses()["CPU threads"] == "ok"


@pytest.mark.parametrize(("seed", "status"), [("0", 0), ("7", 0), ("random", 1), (None, 1)])
def test_the_hash_seed_counts_as_python_was_started(seed, status):
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_d9m", "doctor", "--json"],
        env=variables | ({} if seed is None else {"PYTHONHASHSEED": seed}),
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    found = {finding["name"]: finding["status"] for finding in report["findings"]}
    assert found["PYTHONHASHSEED"] == ("problem" if status else "ok")
    assert done.returncode == status
    assert report["stack"]["torch.version"] == torch.__version__


def test_lines_fit_80_columns():
    finding = Finding("a name", "problem", "value " * 30, "reason " * 30, "fix " * 30)
    lines = list(format_finding(finding))
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("problem  a name: value")


def test_problems_come_first(healthy, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    assert [finding.status for finding in find_problems()][:2] == ["problem", "note"]
