"""``d9m locate`` in a training that leaves Horovod's fusion as it is: the exchange is the cause."""

import json
import sys
from pathlib import Path

import pytest

from lightning_d9m.cli.main import main

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
PORTED = Path(__file__).parent / "ported.py"


def test_horovods_own_fusion_is_located_in_the_exchange(tmp_path, monkeypatch, capsys):
    """Each rank's own gradients were equal, and all four have other ones after the exchange."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_D9M", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", "-np", "4", "--gloo"]
    command = [*horovodrun, sys.executable, str(PORTED)]
    status = main(["locate", "--json", "--tries", "5", "--", *command])
    assert status == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["cause"], found["ranks"]) == ("all-reduce", [0, 1, 2, 3]), found
    assert found["kind"] == "gradient"
    assert found["name"].startswith("layers.")
