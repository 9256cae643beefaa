"""Variables steer a fit: it is surveyed, killed at a place after a checkpoint, or resumed."""

import json
import signal
from types import SimpleNamespace

import pytest
import torch
from trainings import make_loader

from lightning_d9m.errors import SettingError
from lightning_d9m.launch import interruption_points
from lightning_d9m.launch.interruption_points import EpochShape
from lightning_d9m.ledger.format.records import Digests
from lightning_d9m.lightning import interruptions


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def killing(monkeypatch):
    """Let a fit of this process be killed without ending the process."""

    def kill(pid, number):
        assert (pid, number) == (interruption_points.os.getpid(), signal.SIGKILL)
        raise KilledError

    monkeypatch.setattr(interruption_points.os, "kill", kill)


@pytest.fixture
def steered(fit, tmp_path, monkeypatch):
    """Return a function that trains 2 epochs of 6 batches as the first fit of a process."""

    def train(*, interrupt="", resume="", **words):
        monkeypatch.setattr(interruption_points._FaultState, "fits", 0)
        monkeypatch.setenv("LIGHTNING_D9M_INTERRUPT", interrupt)
        monkeypatch.setenv("LIGHTNING_D9M_CHECKPOINT_DIR", str(tmp_path / "steered"))
        monkeypatch.setenv("LIGHTNING_D9M_RESUME", str(resume))
        return fit(**words)

    (tmp_path / "steered").mkdir()
    train.folder = tmp_path / "steered"
    return train


def test_a_survey_says_what_each_epoch_consists_of_and_changes_no_bit(steered):
    words = {"trainer_accumulate_grad_batches": 2, "trainer_val_check_interval": 3}
    surveyed = steered(interrupt="survey", **words)
    epochs = [EpochShape(**entry) for entry in json.loads((steered.folder / "survey").read_text())]
    assert epochs == [EpochShape(0, 6, 2, 12), EpochShape(1, 6, 2, 12)]
    assert surveyed.outcome(0).final == steered(**words).outcome(0).final


# Place; then what the checkpoint says of it: trained batches in all, batches of the epoch.
PLACES = [
    ("epoch:0", 6, None),
    ("batch:1:2", 8, 2),
    ("batch:1:3", 9, 3),
    ("validation:0:4", 6, 6),
    ("validated:0", 6, 6),
]


@pytest.mark.parametrize(("place", "batches", "within"), PLACES)
def test_a_fit_is_killed_at_its_place_and_an_unchanged_program_resumes_it(
    steered, place, batches, within
):
    words = {"trainer_accumulate_grad_batches": 2}
    straight = steered(**words)
    with pytest.raises(KilledError):
        steered(interrupt=place, **words)
    assert (steered.folder / "killed").read_text() == place
    checkpoint = torch.load(steered.folder / "interrupted.ckpt", weights_only=True)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["total"]["processed"] == batches
    if within is not None:
        assert progress["current"]["processed"] == within
    resumed = steered(resume=steered.folder / "interrupted.ckpt", **words)
    assert resumed.outcome(0).final == straight.outcome(0).final
    assert [record.as_record()["kind"] for record in resumed.records(0)].count("digests") == 4


def test_a_fit_may_be_killed_some_batches_after_the_checkpoint(steered, fit):
    with pytest.raises(KilledError):
        steered(interrupt="batch:0:2+7")
    checkpoint = torch.load(steered.folder / "interrupted.ckpt", weights_only=True)
    loops = checkpoint["loops"]["fit_loop"]
    assert loops["epoch_loop.batch_progress"]["total"]["processed"] == 2
    assert fit.trainer.fit_loop.epoch_loop.batch_progress.total.processed == 9


def test_only_the_first_fit_of_a_process_is_steered(steered, fit):
    with pytest.raises(KilledError):
        steered(interrupt="epoch:0")
    (steered.folder / "killed").unlink()
    fit(again=True)
    assert not (steered.folder / "killed").exists()


def test_a_second_fit_of_the_same_trainer_is_not_steered(steered, fit):
    steered(interrupt="survey")
    trainer = fit.trainer
    trainer.fit_loop.max_epochs = 3
    trainer.fit(trainer.lightning_module, make_loader(), make_loader(shuffle=False))
    assert len(json.loads((steered.folder / "survey").read_text())) == 2


def test_an_evaluation_is_not_steered(steered, fit, monkeypatch):
    steered()
    monkeypatch.setattr(interruption_points._FaultState, "fits", 0)
    monkeypatch.setenv("LIGHTNING_D9M_RESUME", "no-such-file")
    fit.trainer.validate(fit.trainer.lightning_module, make_loader(shuffle=False), verbose=False)


def test_misuse_is_named(steered, monkeypatch):
    with pytest.raises(SettingError, match="LIGHTNING_D9M_RESUME is 'no-such-file', which does"):
        steered(resume="no-such-file")
    with pytest.raises(SettingError, match="LIGHTNING_D9M_INTERRUPT is 'soon'; allowed"):
        steered(interrupt="soon")
    monkeypatch.setattr(interruption_points._FaultState, "fits", 0)
    with pytest.raises(SettingError, match="LIGHTNING_D9M_CHECKPOINT_DIR is not set"):
        interruptions.apply_interrupt_variables(
            SimpleNamespace(callbacks=[]), "fit", {"LIGHTNING_D9M_INTERRUPT": "survey"}
        )


def test_the_last_bit_of_each_weight_changes(fit, monkeypatch):
    plain = fit()
    monkeypatch.setenv("LIGHTNING_D9M_LAST_BITS", "1")
    ledgers = [fit(), fit()]
    assert ledgers[0].header.settings["last_bits"] == 1
    assert "last_bits" not in plain.header.settings
    first, *others = [next(digests_of(one)) for one in (plain, *ledgers)]
    assert others[0] == others[1]  # the same number, the same bits
    assert not set(first.groups["weights"].values()) & set(others[0].groups["weights"].values())


def digests_of(ledger):
    return (record for record in ledger.line_records(0) if isinstance(record, Digests))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_changed_weight_is_the_next_number(dtype):
    module = torch.nn.Linear(50, 4, dtype=dtype)
    before = module.weight.detach().clone()
    assert interruptions.change_last_bits(module, {"LIGHTNING_D9M_LAST_BITS": "3"}) == {
        "last_bits": 3
    }
    above = torch.nextafter(before, torch.full_like(before, torch.inf))
    below = torch.nextafter(before, torch.full_like(before, -torch.inf))
    assert ((module.weight == above) | (module.weight == below)).all()
    assert (module.weight == above).any()
    assert (module.weight == below).any()
    assert interruptions.change_last_bits(module, {}) == {}
    with pytest.raises(SettingError, match="LAST_BITS is 'x'; allowed: digits, such as 1"):
        interruptions.change_last_bits(module, {"LIGHTNING_D9M_LAST_BITS": "x"})
