"""``d9m locate`` in a training with Horovod's own fusion: the allreduce is the cause."""

import json
from pathlib import Path

import pytest
from forking_python import HOROVOD, shared_python

from lightning_d9m.cli.main import main

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
PORTED = Path(__file__).parent / "scripts" / "ported.py"


def test_horovods_own_fusion_is_located_in_the_allreduce(tmp_path, monkeypatch, capsys):
    """Each rank's local gradients are equal, and those after the allreduce differ on all ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_D9M", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    python = shared_python(*HOROVOD)
    horovodrun = [python, "-m", "horovod.runner.launch", "-np", "3", "--gloo"]
    command = [*horovodrun, python, str(PORTED)]
    status = main(["locate", "--json", "--tries", "2", "--", *command])
    assert status == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["cause"], found["ranks"]) == ("all-reduce", [0, 1, 2]), found
    assert found["kind"] == "gradient"
    assert found["name"].startswith("layers.")
