"""The model with which a program ends is compared with that of another run."""

import pytest
import torch

import lightning_d9m
from lightning_d9m.cli.main import main

PROGRAM = """
import os, sys
import torch
import lightning_d9m

torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
with lightning_d9m.deterministic(), lightning_d9m.Recorder("runs", model) as run:
    for batch in run.batches(torch.utils.data.DataLoader(torch.zeros(2, 3))):
        run.step()
    run.epoch()
if {other}:
    torch.nn.init.constant_(model.bias, int(os.environ["LIGHTNING_D9M_LEDGER_DIR"][-1]))
lightning_d9m.record_final(model, accuracy=0.5)
"""


@pytest.mark.parametrize(("other", "verdict"), [(False, "equal"), (True, "different")])
def test_repeat_compares_it(tmp_path, monkeypatch, capsys, forking_python, other, verdict):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM.format(other=other))
    assert main(["repeat", "-n", "2", "--", forking_python, "train.py"]) == int(other)
    out = capsys.readouterr().out
    assert out.startswith(f"{verdict}: ")
    assert ("the final state" in " ".join(out.split())) == other


def test_what_is_recorded(tmp_path):
    model = torch.nn.Linear(3, 2)
    folder = lightning_d9m.record_final(model, ledger_dir=tmp_path, accuracy=0.5)
    assert folder == tmp_path / "final-000"
    ledger = lightning_d9m.read_ledger(folder)
    final = ledger.outcome(0).final
    assert set(final.groups["weights"]) == {"weight", "bias"}
    assert final.scalars == {"accuracy": (0.5).hex()}
    assert lightning_d9m.compare(folder, folder).equal
