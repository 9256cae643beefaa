"""Weights that change after a checkpoint was saved, or within a validation, are named."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import nn
from trainings import make_model

from lightning_d9m import InexactResumeError
from lightning_d9m.hashing.training_state import ModelTensors
from lightning_d9m.lightning.resume.program_state import digest_tensors


def averaging():
    """Return a model that averages its last bias in the module's own hook."""

    def average(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.average.lerp_(self.layers[4].bias, 0.1)

    model = make_model(on_train_batch_end=average)
    model.register_buffer("average", torch.zeros(10))
    return model


class Swap(Callback):
    """Validates averaged weights, as by a second set of them."""

    def on_validation_start(self, trainer, pl_module):
        self.trained = pl_module.layers[4].bias.data
        pl_module.layers[4].bias.data = self.trained * 0.9

    def on_validation_end(self, trainer, pl_module):
        pl_module.layers[4].bias.data = self.trained


def test_a_hook_of_the_module_is_named_and_later_checkpoints_are_refused(fits, caplog):
    with caplog.at_level("INFO"):
        fits.fit(model=averaging, extra=[saver(fits, 2)])
    assert "just saved cannot be resumed exactly" in caplog.text
    with pytest.raises(InexactResumeError, match="on_train_batch_end, changes average"):
        fits.resume(model=averaging)


def test_a_value_that_the_modules_hook_logs_for_the_epoch_is_named(fits, caplog):
    """It counts in the mean, and a resumed run does not log it again."""

    def log(self, outputs, batch, batch_idx):
        self.log("late", float(batch_idx), on_epoch=True)

    def logging():
        return make_model(on_train_batch_end=log)

    with caplog.at_level("INFO"):
        fits.fit(model=logging, extra=[saver(fits, 2)])
    assert "changes the logged value 'late' of on_train_batch_end" in caplog.text
    with pytest.raises(InexactResumeError, match="changes the logged value 'late'"):
        fits.resume(model=logging)


def saver(fits, batch):
    """Return a callback that saves in two batches; the second overwrites the first."""

    class Saver(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, data, batch_idx):
            if batch_idx in (batch, batch + 1) and trainer.current_epoch == 0:
                trainer.save_checkpoint(fits.checkpoint)

    return Saver()


def test_a_checkpoint_at_the_end_of_an_epoch_is_resumed(fits):
    fits.check({"hook": "on_train_epoch_end", "batch": 6}, model=averaging)


@pytest.mark.parametrize("callback", [Swap, partial(WeightAveraging, use_buffers=True)])
def test_weights_that_a_validation_has_swapped_are_named(fits, callback):
    """Lightning's callback swaps the values of parameters, which stay the same tensors."""
    words = {"callbacks": lambda: [callback()]}
    fits.refuse(
        r"a validation that had changed layers\.\d\.",
        at={"hook": "on_validation_batch_end", "batch": 6},
        **words,
    )
    fits.check({"hook": "on_validation_end", "batch": 6}, **words)


def test_each_way_to_change_a_tensor_is_found():
    module = nn.BatchNorm1d(3)
    module.register_buffer("table", torch.eye(3).to_sparse())
    trainer = SimpleNamespace(strategy=object(), is_global_zero=True)
    before = digest_tensors(trainer, ModelTensors(module))
    assert digest_tensors(trainer, ModelTensors(module)) == before
    module.weight.data.copy_(torch.zeros(3))  # which torch's counter of versions does not see
    module.bias.data = torch.ones(3)
    module.running_mean = torch.ones(3)
    module.table = (2 * torch.eye(3)).to_sparse()
    after = digest_tensors(trainer, ModelTensors(module))
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["weight", "bias", "running_mean", "table"]
