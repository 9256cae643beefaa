"""What switches portable bits on: a setting, a session, the recorder, and d9m repeat."""

from types import SimpleNamespace

import pytest
import torch

from lightning_d9m import Recorder, Settings, deterministic
from lightning_d9m.cli.main import main
from lightning_d9m.errors import SettingError
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.lightning.resolved_settings import GivenSettings
from lightning_d9m.portability.mode import is_portable
from lightning_d9m.portability.random_numbers import draw


def test_a_session_computes_portable_bits_until_it_closes():
    with deterministic(portable=True):
        assert is_portable()
        with deterministic(seed=1):
            assert is_portable()
    assert not is_portable()


def test_only_a_portable_run_records_the_setting():
    assert "portable" not in Settings().as_record()
    assert Settings(portable=True).as_record()["portable"] is True


def test_a_run_cannot_leave_the_portable_bits_of_its_session():
    with deterministic(portable=True):
        assert GivenSettings().resolve().portable
        with pytest.raises(SettingError, match="portable is False"):
            GivenSettings(portable=False).resolve()


def test_a_recorder_is_portable_within_its_block_and_its_ledger_says_so(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.ones(4, 3)]
    with deterministic(seed=1), Recorder(tmp_path, model, optimizer, portable=True) as run:
        for batch in run.batches(data):
            assert is_portable()
            model(batch).sum().backward()
            optimizer.step()
            run.step()
        run.epoch()
        assert run.ledger is not None
    assert not is_portable()
    assert read_ledger(run.ledger).header.settings["portable"] is True


def test_repeat_takes_one_way_to_choose_its_runs(capsys):
    assert main(["repeat", "--portable", "-n", "3", "--", "true"]) == 2
    assert "--portable is given with" in capsys.readouterr().err


def test_a_generator_of_a_device_is_refused():
    generator = SimpleNamespace(device=torch.device("cuda:0"))
    with pytest.raises(SettingError, match="A generator is on cuda:0"):
        draw(4, generator)
