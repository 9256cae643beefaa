"""The ledger of a resumed run continues the one before: for readers and for a reference."""

import pytest
import torch
from ledger_runs import find_breaks
from resuming import evidence
from trainings import make_model

from lightning_d9m.cli.main import main
from lightning_d9m.errors import DriftError
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.lightning.saved_state import KEY


def test_compare_takes_it_for_a_straight_run_and_says_where_the_break_was(fits, capsys):
    straight = fits.fit()
    interrupted = fits.interrupt(at={"batch": 3})
    resumed = fits.resume()
    moments = [
        (fields["moment"], fields["epoch"])
        for fields in (record.as_record() for record in read_ledger(resumed).records(0))
        if fields["kind"] == "digests"
    ]
    assert moments == [("initial", 0), ("epoch", 0), ("epoch", 1), ("epoch", 2), ("final", 2)]
    assert main(["compare", str(straight), str(resumed)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "this run was interrupted and resumed at epoch 1, batch 3 (step 9)." in said
    assert main(["compare", str(straight), str(interrupted)]) == 1


def test_the_check_against_a_reference_goes_on(fits):
    """What was passed before the break is not asked for again; what comes after it is checked."""

    def disturb(self):
        if self.current_epoch == 2:
            with torch.no_grad():
                self.layers[4].bias[0] += 1e-3

    straight = fits.fit()
    words = {"words": {"reference": straight}}
    fits.interrupt(at={"batch": 3}, **words)
    resumed = fits.resume(**words)
    assert evidence(resumed) == evidence(straight)
    with pytest.raises(DriftError, match=r"They last agreed in epoch 1") as caught:
        fits.resume(**words, model=lambda: make_model(on_train_epoch_start=disturb))
    assert caught.value.epoch == 2


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_break_is_recorded_where_the_user_goes_on(fits):
    fits.interrupt(at={"batch": 3})
    checkpoint = torch.load(fits.checkpoint, weights_only=True)
    del checkpoint["callbacks"][KEY]
    torch.save(checkpoint, fits.checkpoint)
    with pytest.warns(UserWarning, match="with a break that the ledger records"):
        folder = fits.resume(words={"on_inexact_resume": "warn"})
    (found,) = find_breaks(folder / "rank-0.jsonl")
    assert "has no lightning_d9m state" in found.inexact[0]
    assert (found.epoch, found.step, found.batch) == (1, 9, 3)
