"""Lightning's progress bars stay whole: what they count and show is what they do without us."""

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from torch import nn
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback


def step(self, batch, batch_idx):
    images, classes = batch
    loss = nn.functional.cross_entropy(self.layers(images), classes)
    self.log("shown", loss, prog_bar=True)
    return loss


class Watch(Callback):
    """Note at each batch what the bar shows, and how far it has come."""

    def __init__(self, bar):
        self.bar = bar
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        if isinstance(self.bar, RichProgressBar):
            task = self.bar.progress.tasks[self.bar.train_progress_bar_id]
            place = task.completed, task.total
        else:
            place = self.bar.train_progress_bar.n, self.bar.train_progress_bar.total
        self.seen.append((*place, sorted(self.bar.get_metrics(trainer, module))))


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_stays_whole(kind, tmp_path, capfd):
    def run(*ours):
        watch = Watch(kind(refresh_rate=1))
        words = QUIET | {"enable_progress_bar": True}
        callbacks = [*ours, watch.bar, watch]
        trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=callbacks, **words)
        trainer.fit(make_model(training_step=step), make_loader(), make_loader(shuffle=False))
        written = "".join(capfd.readouterr())
        assert "Epoch 0" in written
        return watch.seen, written

    plain, _ = run()
    ours, written = run(DeterminismCallback(ledger_dir=tmp_path, probes=("loss",), replay_every=3))
    assert ours == plain
    assert [place for *place, _ in ours] == [[number, 6] for number in (1, 2, 3, 4, 5, 6)]
    assert all(shown == ["shown"] for *_, shown in ours)
    logged = ("PYTHONHASHSEED was", "d9m: 1 epoch recorded")  # before and after the bars
    rest = [line for line in written.splitlines() if not any(text in line for text in logged)]
    assert "d9m" not in "\n".join(rest)
