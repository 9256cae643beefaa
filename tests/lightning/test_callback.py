"""``DeterminismCallback``: exact fits, a ledger for each, drift found, everything restored.

Variables steer a fit: it saves at points, resumes, or ends early.
"""

import importlib
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from interruptions import KilledError, begin_run, resume_points  # noqa: F401 - a fixture
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from trainings import NoisyDigits, make_loader, make_model

from lightning_d9m import DeterminismCallback, DriftError, SettingError, compare
from lightning_d9m.engine.control import session
from lightning_d9m.engine.hashing.digest import digest
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.engine.recording import interruption
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.output.comparison_text import state_verdict

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


class DrawingStream(IterableDataset):
    """A stream of batches whose iterator draws as soon as it is made."""

    def __iter__(self):
        digits = NoisyDigits(4)
        samples = [digits[index] for index in range(4)]
        images, classes = zip(*samples, strict=True)
        return iter([(torch.stack(images), torch.stack(classes))])


def equal(first, second):
    return compare_ledgers(first, second).equal


def draw_seed(worker):
    """Seed NumPy otherwise in each run; of a module, as workers of Python 3.14 need it."""
    np.random.seed(int.from_bytes(os.urandom(4), "little"))


def final_weights(ledger):
    return ledger.outcome(0).final.totals["weights"]


def digests_of(ledger):
    return [record for record in ledger.records(0) if isinstance(record, Digests)]


def test_two_runs_and_both_packages_agree_and_another_seed_does_not(fit):
    first = fit()
    assert all(equal(first, fit(package=package)) for package in PACKAGES)
    assert not any(equal(first, fit(package=package, seed=4)) for package in PACKAGES)


def draw(self):
    torch.rand(3)


def stream():
    torch.rand(5)
    return DrawingStream()


@pytest.mark.parametrize("make", [stream, lambda: DataLoader(stream(), batch_size=None)])
def test_no_validation_changes_what_training_draws(fit, make):
    """Iterators are made before the first hook, and the module's hooks come after ours."""
    drawing = make_model(on_validation_end=draw, val_dataloader=lambda _: make())
    words = {"val_check_interval": 0.5, "num_sanity_val_steps": 0}
    words |= {"reload_dataloaders_every_n_epochs": 1}
    words = {f"trainer_{name}": value for name, value in words.items()}
    fits = [fit(trainer_limit_val_batches=0), fit(), fit(trainer_val_check_interval=2)]
    fits.append(fit(model=drawing, validate=False, **words))
    assert {final_weights(ledger) for ledger in fits} == {final_weights(fits[0])}


def test_the_first_validation_is_the_same_with_and_without_a_sanity_check(fit):
    def val_dataloader(self):
        return make_loader(shuffle=False, sampler=RandomSampler(range(48)))

    def first_loss(steps):
        model = make_model(val_dataloader=val_dataloader)
        ledger = fit(model=model, validate=False, trainer_num_sanity_val_steps=steps)
        return digests_of(ledger)[1].scalars["val_loss"]

    assert first_loss(0) == first_loss(2)


@pytest.mark.parametrize("text", ["twelve", "-1", "4294967296"])
def test_a_variable_that_is_no_seed_is_named(fit, monkeypatch, text):
    monkeypatch.setenv("PL_GLOBAL_SEED", text)
    with pytest.raises(SettingError, match=f"PL_GLOBAL_SEED is '{text}'.*0 to 4294967295"):
        fit(seed=None)


def test_the_state_at_an_exception_is_compared(fit, tmp_path):
    """A program that catches the exception goes on with the weights of that moment."""

    def train(factor):
        def training_step(self, batch, batch_idx):
            if batch_idx + self.current_epoch > 5:
                raise MemoryError("in user code")
            return self.layers(batch[0]).square().mean() * factor**self.current_epoch

        model = make_model(training_step=training_step)
        with pytest.raises(MemoryError):
            fit(model=model, trainer_limit_val_batches=0)
        assert session.active_session() is None
        return max(tmp_path.glob("fit-*")), model

    (one, model), (other, _), (third, _) = map(train, (1.0, 1.0, 1.1))
    found = compare(one, other)
    assert (found.verdict, found.first) == ("equal", None)
    end = read_ledger(one).outcome(0).end
    assert (end.status, "MemoryError: in user code" in end.error) == ("failed", True)
    assert "ended by MemoryError, and the state there was compared." in state_verdict(found)
    assert compare(one, third).first.where == "the state at the exception (epoch 1, step 11)"
    digests = {name: digest(weight) for name, weight in model.named_parameters()}
    assert read_ledger(one).outcome(0).final.groups["weights"] == digests


def test_a_ledger_holds_initial_epochs_and_final(fit):
    def add_a_vector(self):
        self.trainer.callback_metrics["vector"] = torch.ones(3)  # no number: it is left out

    digests = digests_of(fit(model=make_model(on_validation_end=add_a_vector)))
    assert [(d.moment, d.epoch, d.step) for d in digests] == [
        ("initial", 0, 0),
        ("epoch", 0, 6),
        ("epoch", 1, 12),
        ("final", 1, 12),
    ]
    assert set(digests[1].groups) == {"weights", "buffers", "optimizers", "schedulers"}
    assert "layers.0.weight" in digests[1].groups["weights"]
    assert "layers.1.running_mean" in digests[1].groups["buffers"]
    assert "0.exp_avg.layers.0.weight" in digests[1].groups["optimizers"]
    assert float.fromhex(digests[1].loss) > 0
    assert set(digests[1].scalars) == {"train_loss", "val_loss"}


def test_final_weights_are_those_that_averaging_leaves(fit):
    lightning = importlib.import_module("lightning.pytorch")

    def average():
        model = make_model()
        model.layers[1] = torch.nn.Identity()  # with statistics to update, an epoch is added
        callback = lightning.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)
        return fit(model=model, trainer_callbacks=[callback], trainer_max_epochs=3)

    ledger = average()
    assert final_weights(ledger) != digests_of(ledger)[-2].totals["weights"]
    assert equal(ledger, average())


def test_one_changed_bit_raises_and_is_named(fit):
    reference = fit().path

    def on_train_epoch_end(self):
        if self.current_epoch == 1:
            with torch.no_grad():
                self.layers[4].bias.view(torch.int32)[3] ^= 1

    # The module's hook comes after the callback's: the final record is the first to see it.
    with pytest.raises(DriftError, match=r"layers\.4\.bias") as caught:
        fit(reference=reference, model=make_model(on_train_epoch_end=on_train_epoch_end))
    error = caught.value
    assert (error.moment, error.step, error.rank) == ("final", 12, 0)
    assert (error.group, error.names, error.count) == ("weights", ("layers.4.bias",), 1)


def test_an_unseeded_worker_is_seeded_and_an_unseeded_sample_is_found(fit):
    class Unseeded(NoisyDigits):
        def __getitem__(self, index):
            draw_seed(0)
            return super().__getitem__(index)

    reference = fit(loader=make_loader(num_workers=1)).path
    fit(reference=reference, loader=make_loader(num_workers=1, worker_init_fn=draw_seed))
    with pytest.raises(DriftError):
        fit(reference=reference, loader=DataLoader(Unseeded(), 16, shuffle=True))


def test_two_callbacks_are_refused(fit):
    with pytest.raises(SettingError, match="2 DeterminismCallbacks"):
        fit(trainer_callbacks=[DeterminismCallback()])


@pytest.mark.parametrize("value", [False, "warn"])
def test_deterministic_of_the_trainer_is_reconciled(fit, value):
    seen = []

    def on_train_start(self):
        seen.append(torch.are_deterministic_algorithms_enabled())
        seen.append(torch.is_deterministic_algorithms_warn_only_enabled())

    try:
        fit(trainer_deterministic=value, model=make_model(on_train_start=on_train_start))
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert seen == [True, False]


def test_a_flag_switched_off_while_training_is_an_error(fit):
    def on_train_batch_start(self, batch, batch_idx):
        torch.use_deterministic_algorithms(False)

    with pytest.raises(SettingError, match="deterministic"):
        fit(model=make_model(on_train_batch_start=on_train_batch_start))


def test_a_callback_that_fitted_a_model_of_a_local_class_is_pickled(fit):
    """Lightning has attached methods of the module to it, for logging."""
    fit()
    (callback,) = (c for c in fit.trainer.callbacks if isinstance(c, DeterminismCallback))
    assert callback.log.__self__ is fit.trainer.lightning_module
    again = pickle.loads(pickle.dumps(callback))  # noqa: S301 - our own
    assert (again.ledger, again.digest) == (callback.ledger, callback.digest)
    assert again.digest is not None


@pytest.fixture
def train(begin_run, fit):  # noqa: F811 - the fixture
    """Return a function that trains 2 epochs of 6 batches as the first fit of a process."""

    def run(*, interrupt="", resume="", **words):
        begin_run(interrupt, resume)
        return SimpleNamespace(ledger=fit(**words).path)

    return run


# Of two epochs of 6 batches, two of which are accumulated, with a validation of 6: the last two
# points of each kind, and (epoch, step, batch).
POINTS = {
    "epoch-1": (0, 3, 6), "epoch-2": (1, 6, 6), "step-2": (0, 2, 4), "step-4": (1, 4, 2),
    "accumulated-2": (0, 1, 3), "accumulated-4": (1, 3, 1), "validation-7": (1, 6, 6),
    "validation-12": (1, 6, 6), "validated-1": (0, 3, 6), "validated-2": (1, 6, 6),
}  # fmt: skip


def test_an_unchanged_program_saves_at_points_and_resumes(train, tmp_path):
    names = ("epoch-1", "step-2", "accumulated-2", "validation-7", "validated-1")
    words = {"trainer_accumulate_grad_batches": 2}
    assert resume_points(train, tmp_path, *names, **words) == POINTS


def test_only_the_first_fit_of_a_process_is_steered(train, fit, tmp_path, monkeypatch):
    """Neither a second one, of another or of the same Trainer, nor an evaluation."""
    with pytest.raises(KilledError):
        train(interrupt="epoch:0")
    (ledger,) = tmp_path.glob("**/fit-*")
    assert read_ledger(ledger).outcome(0).last.moment == "epoch"
    (tmp_path / "points/killed").unlink()
    fit(again=True)
    assert not (tmp_path / "points/killed").exists()
    train(interrupt="points")
    trainer, model = fit.trainer, fit.trainer.lightning_module
    saved = sorted((tmp_path / "points").iterdir())
    trainer.fit_loop.max_epochs = 9
    trainer.fit(model, make_loader(), make_loader(shuffle=False))
    assert sorted((tmp_path / "points").iterdir()) == saved
    monkeypatch.setattr(interruption._FaultState, "fits", 0)
    monkeypatch.setenv("LIGHTNING_D9M_RESUME", "no-such-file")
    trainer.validate(model, make_loader(shuffle=False), verbose=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"ignored_metrics": 3}, "ignored_metrics is 3; allowed: a name, or a list of names"),
        ({"unpatched_ops": 3}, "unpatched_ops is 3; allowed: a name"),
        ({"summary": "no"}, "summary is 'no'; allowed: True or False"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(words, message):
    with pytest.raises(SettingError, match=message):
        DeterminismCallback(**words)


def test_misuse_is_named(train, monkeypatch):
    with pytest.raises(SettingError, match="LIGHTNING_D9M_RESUME is 'no-such-file', which does"):
        train(resume="no-such-file")
    with pytest.raises(SettingError, match="LIGHTNING_D9M_INTERRUPT is 'soon'; allowed"):
        train(interrupt="soon")
    monkeypatch.delenv("LIGHTNING_D9M_CHECKPOINT_DIR")
    with pytest.raises(SettingError, match="LIGHTNING_D9M_CHECKPOINT_DIR is not set"):
        train(interrupt="points")
