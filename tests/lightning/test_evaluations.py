"""Validations, tests and predictions leave digests of their outputs."""

import lightning.pytorch as lightning
import pytest
import torch
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback
from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import list_evaluations, list_fits, read_ledger
from lightning_d9m.ledger.format.records import Evaluation

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


def evaluate(verb, folder, model=None, loader=None, **settings):
    callback = DeterminismCallback(seed=3, ledger_dir=folder, **settings)
    trainer = lightning.Trainer(callbacks=[callback], **QUIET)
    loader = make_loader(shuffle=False) if loader is None else loader
    getattr(trainer, verb)(make_model() if model is None else model, loader)
    return read_ledger(list_evaluations(folder)[-1])


def evaluations(ledger):
    return [record.as_record() for record in ledger.records(0) if isinstance(record, Evaluation)]


VERBS = ["validate", "test", "predict"]


@pytest.mark.parametrize("verb", VERBS)
def test_an_evaluation_leaves_a_ledger_of_its_own(verb, tmp_path):
    one, other = (evaluate(verb, tmp_path) for _ in range(2))
    assert compare_ledgers(one, other).equal
    (record,) = evaluations(one)
    assert record["name"] == verb
    assert record["batches"] == 6
    assert list(record.get("scalars", {})) == ([] if verb == "predict" else ["val_loss"])
    assert [path.name for path in list_evaluations(tmp_path)] == [f"{verb}-000", f"{verb}-001"]
    assert list_fits(tmp_path) == []
    assert one.outcome(0).end.status == "finished"


def test_one_bit_of_one_output_is_seen(tmp_path):
    def predict_step(self, batch, batch_idx):
        outputs = self.layers(batch[0])
        if batch_idx == 4:
            outputs.view(torch.int32)[0, 0] ^= 1
        return outputs

    plain = evaluate("predict", tmp_path)
    flipped = evaluate("predict", tmp_path, make_model(predict_step=predict_step))
    comparison = compare_ledgers(plain, flipped)
    assert not comparison.equal
    one, other = evaluations(plain) + evaluations(flipped)
    assert one["outputs"] != other["outputs"]
    assert one["batches"] == other["batches"]


def test_other_weights_are_told_from_other_arithmetic(tmp_path):
    """The weights that were evaluated are in the ledger too."""
    model = make_model()
    plain = evaluate("test", tmp_path, model)
    with torch.no_grad():
        model.layers[0].bias[0] += 1
    other = evaluate("test", tmp_path, model)
    weights = [ledger.outcome(0).final.groups["weights"] for ledger in (plain, other)]
    assert [name for name in weights[0] if weights[0][name] != weights[1][name]] == [
        "layers.0.bias"
    ]


def test_each_validation_of_a_fit_is_in_its_ledger(fit):
    """The sanity check is not: it counts for nothing."""
    ledger = fit(trainer_num_sanity_val_steps=2)
    found = [(r["name"], r["epoch"], r["step"], r["batches"]) for r in evaluations(ledger)]
    assert found == [("validate", 0, 6, 6), ("validate", 1, 12, 6)]
    assert compare_ledgers(ledger, fit()).equal


def test_outputs_without_a_digest_are_said_and_stop_nothing(tmp_path):
    class Result:
        """Of the user's own."""

    ledger = evaluate("predict", tmp_path, make_model(predict_step=lambda *_: Result()))
    (record,) = evaluations(ledger)
    assert record["undigested"] == 6
    assert "Result" in record["problem"]
