"""Fits that are interrupted and resumed, and what they leave, epoch by epoch."""

import copy
import importlib
import logging
import random

import numpy as np
import pytest
from ledger_runs import find_breaks
from torch.utils.data import DataLoader, IterableDataset, default_collate
from trainings import QUIET, NoisyDigits, make_loader, make_model

from lightning_d9m import DeterminismCallback, InexactResumeError
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.integrations.trainer.lightning_private import completes_batch
from lightning_d9m.tools.comparison.ledgers import compare_ledgers


class OwnOrder:
    """A batch sampler of the user's with a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(8)

    def __iter__(self):
        for _ in range(6):
            yield self.rng.permutation(96)[:16].tolist()

    def __len__(self):
        return 6


class Curriculum:
    """A batch sampler that counts its epochs, and shuffles a list and an array in place."""

    def __init__(self):
        self.epoch, self.order, self.weights = 0, list(range(96)), np.arange(96)

    def __iter__(self):
        self.epoch += 1
        random.shuffle(self.order)
        np.random.shuffle(self.weights)
        for batch in range(6):
            order = self.order[16 * batch : 16 * batch + 15]
            yield [*order, int(self.weights[batch + self.epoch])]

    def __len__(self):
        return 6


class Numbers(IterableDataset):
    """A stream that cannot say where it was."""

    def __iter__(self):
        digits = NoisyDigits()
        return (digits[index] for index in range(96))

    def __len__(self):
        return 96


def stream():
    return DataLoader(Numbers(), batch_size=16)


class DrawingDigits(NoisyDigits):
    """A dataset with a generator of its own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(11)

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + 0.01 * self.rng.random(), label


class DrawingCollate:
    """A function with a generator of its own."""

    def __init__(self):
        self.rng = random.Random(12)

    def __call__(self, samples):
        images, labels = default_collate(samples)
        return images.float() + 0.01 * self.rng.random(), labels


class Interrupted(Exception):  # noqa: N818 - it stands for what is no error
    """Stands for whatever ends a run before its time."""


def make_saver(path, *, epoch=1, batch=2, hook="on_train_batch_end", stop=True):
    """Return a callback that saves a checkpoint in a hook, and ends the run there.

    It saves when a ModelCheckpoint would: at the end of an epoch after the module's own hook.
    """
    base = importlib.import_module("lightning.pytorch.callbacks").Checkpoint

    class Saver(base):
        saved = logging.Logger("saved")  # noqa: LOG001 - nothing of which a checkpoint holds

    def save(self, trainer, *arguments, **_):
        place = trainer.fit_loop.epoch_progress.current.started - 1
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if trainer.sanity_checking or self.saved.disabled or place < epoch or batches < batch:
            return
        self.saved.disabled = True
        trainer.save_checkpoint(path)
        if stop:
            raise Interrupted

    setattr(Saver, hook, save)
    return Saver()


def in_order():
    return make_loader(shuffle=False)


class Fits:
    """Trains as runs of their own would.

    Args:
        folder: For ledgers and checkpoints.
        new_process: Lets the next fit count as the first of its process.
    """

    def __init__(self, folder, new_process):
        self.folder = folder
        self.new_process = new_process
        self.checkpoint = folder / "interrupted.ckpt"

    def fit(
        self, *, loader=make_loader, model=make_model, validate=in_order, callbacks=list,
        extra=(), resume=None, words=None, datamodule=None, **trainer_words,
    ):  # fmt: skip
        """Train; return the ledger's folder."""
        import lightning.pytorch as L

        self.new_process()
        before = set(self.folder.glob("fit-*"))
        callback = DeterminismCallback(**({"seed": 3, "ledger_dir": self.folder} | (words or {})))
        earlier = trainer_words.pop("earlier", list)()  # callbacks that precede ours
        self.trainer = L.Trainer(
            **({"max_epochs": 3, "default_root_dir": self.folder} | QUIET | trainer_words),
            callbacks=[*earlier, callback, *callbacks(), *extra],
        )
        self.model = model()
        if datamodule is not None:
            data = {"datamodule": datamodule()}
        else:
            data = {"train_dataloaders": loader()}
            if validate:
                data["val_dataloaders"] = validate()
        try:
            self.trainer.fit(self.model, **data, ckpt_path=resume)
        finally:
            self.made = sorted(set(self.folder.glob("fit-*")) - before)
        (folder,) = self.made or [None]  # no step, no ledger
        return folder

    def check(self, *places, progress=False, **words):
        """Train and save at places, resume from each, and compare with the first training.

        ``progress`` compares the counts of the loops, too.
        """
        paths = {self.folder / f"{number}.ckpt": place for number, place in enumerate(places)}
        savers = [make_saver(path, **place, stop=False) for path, place in paths.items()]
        straight = self.fit(**words | {"enable_checkpointing": True}, extra=savers)
        counts = copy.deepcopy(self.trainer.fit_loop.state_dict())
        for path, place in paths.items():
            agree(straight, self.fit(**words, resume=path))
            expected = copy.deepcopy(counts)
            between = place.get("hook") == "on_train_epoch_end"
            if not between and not completes_batch(self.trainer.fit_loop.epoch_loop):
                # Lightning before 2.5 counts the start of the epoch that is continued again.
                for count in ("ready", "started"):
                    expected["epoch_progress"]["total"][count] += 1
            assert not progress or self.trainer.fit_loop.state_dict() == expected

    def interrupt(self, *, at=None, **words):
        """Train until a checkpoint is saved and the run is ended there; return the folder."""
        saver = make_saver(self.checkpoint, **(at or {}))
        try:
            self.fit(**{"enable_checkpointing": True} | words, extra=[saver])
        except Interrupted:
            (folder,) = self.made
            return folder
        raise AssertionError("the run was not interrupted")

    def refuse(self, message, *, at=None, **words):
        """Train until a checkpoint is saved from which no run is resumed; return the error."""
        self.interrupt(at=at, **words)
        with pytest.raises(InexactResumeError, match=message) as caught:
            self.resume(**words)
        return caught.value

    def resume(self, **words):
        """Go on from the checkpoint."""
        return self.fit(**words, resume=self.checkpoint)


def evidence(folder):
    """Return what a run recorded at each moment, by what identifies it."""
    found = {}
    for record in read_ledger(folder).records(0):
        fields = record.as_record()
        if isinstance(record, Digests):
            found[record.moment, record.epoch] = fields
        elif fields["kind"] == "evaluation":
            found["evaluation", fields["step"]] = fields
    return found


def agree(straight, last):
    """Hold an interrupted and resumed run against a straight one, moment by moment."""
    expected, actual = evidence(straight), evidence(last)
    for key, record in expected.items():
        assert actual.get(key) == record, key
    comparison = compare_ledgers(read_ledger(straight), read_ledger(last))
    assert comparison.equal, comparison
    breaks, problem = find_breaks(last / "rank-0.jsonl")
    assert breaks
    assert not any((problem, *(entry.inexact for entry in breaks)))
