"""Variables steer a fit: it is surveyed, killed at a place after a checkpoint, or resumed."""

import json
from types import SimpleNamespace

import pytest
import torch
from interruptions import KilledError, begin_run, interrupt  # noqa: F401 - a fixture
from trainings import make_loader

from lightning_d9m import compare
from lightning_d9m.errors import SettingError
from lightning_d9m.launch import interruption_points
from lightning_d9m.launch.interruption_points import EpochShape
from lightning_d9m.ledger.format.records import Digests
from lightning_d9m.lightning import callback

SURVEY = "points/survey"


@pytest.fixture
def train(begin_run, fit):  # noqa: F811 - the fixture
    """Return a function that trains 2 epochs of 6 batches as the first fit of a process."""

    def run(*, interrupt="", resume="", **words):
        begin_run(interrupt, resume)
        return SimpleNamespace(ledger=fit(**words).path)

    return run


def test_a_survey_says_what_each_epoch_consists_of_and_changes_no_bit(train, tmp_path):
    words = {"trainer_accumulate_grad_batches": 2, "trainer_val_check_interval": 3}
    surveyed = train(interrupt="survey", **words)
    epochs = [EpochShape(**entry) for entry in json.loads((tmp_path / SURVEY).read_text())]
    assert epochs == [EpochShape(0, 6, 2, 12), EpochShape(1, 6, 2, 12)]
    assert compare(surveyed.ledger, train(**words).ledger).verdict == "equal"


# Place; then the epoch and the batches of it that the checkpoint has.
PLACES = {
    "epoch:0": (1, 0),
    "batch:1:2": (1, 2),
    "batch:0:3+7": (0, 3),
    "validation:0:4": (0, 6),
    "validated:0": (0, 6),
}


def test_a_fit_is_killed_at_its_place_and_an_unchanged_program_resumes_it(train, tmp_path):
    shapes, breaks = interrupt(train, tmp_path, *PLACES, trainer_accumulate_grad_batches=2)
    assert shapes == [(6, "batch")] * 2
    assert [(entry.epoch, entry.batch) for entry in breaks] == [*PLACES.values()]


def test_only_the_first_fit_of_a_process_is_steered(train, fit, tmp_path, monkeypatch):
    """Neither a second one, of another or of the same Trainer, nor an evaluation."""
    with pytest.raises(KilledError):
        train(interrupt="epoch:0")
    (tmp_path / "points/killed").unlink()
    fit(again=True)
    assert not (tmp_path / "points/killed").exists()
    train(interrupt="survey")
    trainer, model = fit.trainer, fit.trainer.lightning_module
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, make_loader(), make_loader(shuffle=False))
    assert len(json.loads((tmp_path / SURVEY).read_text())) == 2
    monkeypatch.setattr(interruption_points._FaultState, "fits", 0)
    monkeypatch.setenv("LIGHTNING_D9M_RESUME", "no-such-file")
    trainer.validate(model, make_loader(shuffle=False), verbose=False)


def test_misuse_is_named(train, monkeypatch):
    with pytest.raises(SettingError, match="LIGHTNING_D9M_RESUME is 'no-such-file', which does"):
        train(resume="no-such-file")
    with pytest.raises(SettingError, match="LIGHTNING_D9M_INTERRUPT is 'soon'; allowed"):
        train(interrupt="soon")
    monkeypatch.setattr(interruption_points._FaultState, "fits", 0)
    with pytest.raises(SettingError, match="LIGHTNING_D9M_CHECKPOINT_DIR is not set"):
        callback.apply_interrupt_variables(
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
    assert callback.change_last_bits(module, {"LIGHTNING_D9M_LAST_BITS": "3"}) == {"last_bits": 3}
    above = torch.nextafter(before, torch.full_like(before, torch.inf))
    below = torch.nextafter(before, torch.full_like(before, -torch.inf))
    assert ((module.weight == above) | (module.weight == below)).all()
    assert (module.weight == above).any()
    assert (module.weight == below).any()
    assert callback.change_last_bits(module, {}) == {}
    with pytest.raises(SettingError, match="LAST_BITS is 'x'; allowed: digits, such as 1"):
        callback.change_last_bits(module, {"LIGHTNING_D9M_LAST_BITS": "x"})
