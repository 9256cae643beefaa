"""Each piece of what a checkpoint holds matters: without it, the bits are others, or it is said."""

import random

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from adapters.resuming import Fits, OwnOrder, evidence
from torch.utils.data import DataLoader, default_collate
from trainings import NoisyDigits, make_model

from lightning_d9m import D9mError
from lightning_d9m.adapters.checkpoint_file import KEY

pytestmark = pytest.mark.usefixtures("unseeded", "new_process")


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


class DrawingCallback(L.Callback):
    """A callback with a generator of its own."""

    def __init__(self):
        self.rng = np.random.RandomState(13)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        batch[0].add_(0.01 * self.rng.rand())


def own_order():
    return DataLoader(DrawingDigits(), batch_sampler=OwnOrder(), collate_fn=DrawingCollate())


class Device:
    """Stands for an accelerator: a generator that is none of the CPU's."""

    def __init__(self):
        self.generator = torch.Generator()

    def get_rng_state_all(self):
        return [self.generator.get_state()]

    def set_rng_state_all(self, states):
        self.generator.set_state(states[0])


DEVICE = Device()


def drawing_step(self, batch, batch_idx):
    """Draw from every kind of generator, as user code does."""
    noise = random.random() + float(np.random.rand()) + torch.rand(64) + self.own.random()
    noise = noise + torch.rand(64, generator=self.noise) + self.numpy.random() + self.legacy.rand()
    noise = noise + torch.rand(64, generator=DEVICE.generator)
    loss = torch.nn.functional.cross_entropy(self.layers(batch[0] + 0.01 * noise), batch[1])
    self.log("train_loss", loss, on_step=True, on_epoch=True)
    return loss


def make_drawing_model():
    model = make_model(training_step=drawing_step)
    DEVICE.generator.manual_seed(2)
    model.own = random.Random(6)
    model.noise = torch.Generator().manual_seed(3)
    model.numpy = np.random.default_rng(4)
    model.legacy = np.random.RandomState(5)
    return model


RUN = {
    "loader": own_order,
    "model": make_drawing_model,
    "callbacks": lambda: [DrawingCallback()],
    "validate": lambda: DataLoader(DrawingDigits(), batch_size=16),
    "accumulate_grad_batches": 2,
    "val_check_interval": 4,
}
OTHER = torch.Generator().manual_seed(1).get_state()


PYTHON = {
    "version": 3,
    "words": torch.cat([torch.arange(1, 625), torch.tensor([624])]),
    "gauss": None,
}


def change(rank, path, value):
    """Put another value into a nested dict."""
    *above, last = path
    for name in above:
        rank = rank[name]
    if value is None:
        del rank[last]
    else:
        rank[last] = value(rank[last])


GENERATORS = [
    "model.own",
    "model.noise",
    "model.numpy",
    "model.legacy",
    "callbacks.1.rng",
    "train.0.dataset.rng",
    "train.0.collate_fn.rng",
    "validate.0.dataset.rng",
]
# What is left out or changed, for each piece that a rank saves.
PIECES = {
    "Python's generator": (["rng", "python"], lambda old: PYTHON),
    "NumPy's generator": (["rng", "numpy", "state", "pos"], lambda old: old - 1),
    "torch's generator": (["rng", "torch"], lambda old: OTHER),
    "a device's generator": (["rng", "devices"], lambda old: {}),
    "all generators of the process": (["rng"], None),
    **{f"the generator {name}": (["generators", name], None) for name in GENERATORS},
    "generators that a sampler keeps": (["samplers"], lambda old: {}),
    "gradients of micro-batches": (["gradients"], lambda old: {}),
    "sums of what was logged": (["results"], lambda old: {}),
    "metrics of an earlier validation": (["metrics"], lambda old: {}),
    "evaluations that were not written yet": (["testimony", "evaluations"], lambda old: []),
    "where its ledger stood": (["ledger"], lambda old: {}),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Train once straight and once to the middle of an epoch, between two micro-batches."""
    from lightning_d9m.control import seeding, session

    fits = Fits(tmp_path_factory.mktemp("pieces"), lambda: setattr(session, "_fits", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "simulated", DEVICE, raising=False)
        patch.setattr(seeding, "_initialised_devices", lambda: [("simulated", DEVICE)])
        straight = evidence(fits.fit(**RUN))
        fits.interrupt(**RUN, at={"batch": 5})
        yield fits, straight


def resume(interrupted, edit):
    """Resume from the checkpoint with its state edited; return whether the evidence is equal."""
    fits, straight = interrupted
    checkpoint = torch.load(fits.checkpoint, weights_only=True)
    del checkpoint[KEY]["seal"]  # which would tell at once
    edit(checkpoint)
    path = fits.folder / "edited.ckpt"
    torch.save(checkpoint, path)
    found = evidence(fits.fit(**RUN, resume=path))
    return all(found.get(key) == record for key, record in straight.items())


@pytest.mark.usefixtures("unseeded")
class TestPieces:
    """A checkpoint that was saved between two micro-batches."""

    def test_ends_at_the_same_bits_when_nothing_is_left_out(self, interrupted):
        assert resume(interrupted, lambda checkpoint: None)

    @pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES.keys())
    def test_does_not_without(self, interrupted, piece):
        path, value = piece
        assert not resume(
            interrupted, lambda checkpoint: change(checkpoint[KEY]["ranks"][0], path, value)
        )

    @pytest.mark.parametrize(
        ("path", "value"),
        [(["place", "batch"], lambda n: n - 1), (["fit"], lambda n: n + 1)],
        ids=["its place", "which fit it is"],
    )
    def test_does_not_without_what_all_ranks_share(self, interrupted, path, value):
        assert not resume(interrupted, lambda checkpoint: change(checkpoint[KEY], path, value))

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            ([KEY], None, "holds no state of lightning_d9m"),
            ([KEY, "format"], lambda n: 99, "has format 99; this version reads 1"),
            ([KEY, "settings", "seed"], lambda n: 4, "saved with seed=4; now it is 3"),
            ([KEY, "world_size"], lambda n: 2, "saved by 2 ranks; now there are 1"),
            ([KEY, "place", "moment"], lambda n: "within", "while batch 5 of epoch 1 was trained"),
        ],
        ids=["all of it", "a newer format", "another seed", "another world", "half a batch"],
    )
    def test_says_what_cannot_be_exact(self, interrupted, path, value, message):
        with pytest.raises(D9mError, match=message):
            resume(interrupted, lambda checkpoint: change(checkpoint, path, value))

    def test_a_changed_weight_is_trained_on_without_the_seal(self, interrupted):
        def flip(checkpoint):
            checkpoint["state_dict"]["layers.4.bias"].view(torch.uint8)[0] ^= 1

        assert not resume(interrupted, flip)


def test_every_piece_is_tested(interrupted):
    """What else there is has a test of its own: when loaders were loaded, and the last loss."""
    fits, _ = interrupted
    (rank,) = torch.load(fits.checkpoint, weights_only=True)[KEY]["ranks"]
    tested = {path[0] for path, _ in PIECES.values()}
    assert set(rank) - tested == {"reload_epoch"}
    assert all(rank[name] for name in tested)
    assert set(rank["rng"]) == {"python", "numpy", "torch", "devices"}
    assert set(rank["generators"]) == set(GENERATORS)
    assert set(rank["testimony"]) == {"evaluations", "loss"}


class Stages(L.LightningDataModule):
    """Gives other data in every second epoch."""

    def train_dataloader(self):
        stage = self.trainer.current_epoch // 2
        return DataLoader(NoisyDigits(96 + 16 * stage), batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(NoisyDigits(), batch_size=16)


def without(fits, name, **words):
    """Resume with a piece of the rank's left out, and with nothing left out; return the folders."""
    whole = fits.resume(**words)
    checkpoint = torch.load(fits.checkpoint, weights_only=True)
    del checkpoint[KEY]["seal"]
    rank = checkpoint[KEY]["ranks"][0]
    *above, last = name
    for part in above:
        rank = rank[part]
    rank[last] = None
    torch.save(checkpoint, fits.checkpoint)
    return evidence(whole), evidence(fits.resume(**words))


@pytest.mark.usefixtures("unseeded")
def test_when_loaders_were_loaded_matters(tmp_path, new_process):
    fits = Fits(tmp_path, new_process)
    words = {"datamodule": Stages, "reload_dataloaders_every_n_epochs": 2}
    straight = evidence(fits.fit(**words))
    fits.interrupt(**words, at={"epoch": 1})
    whole, lacking = without(fits, ["reload_epoch"], **words)
    assert whole == straight
    assert lacking != straight


@pytest.mark.usefixtures("unseeded")
def test_the_last_loss_matters_at_the_end_of_an_epoch(tmp_path, new_process):
    fits = Fits(tmp_path, new_process)
    straight = evidence(fits.fit(max_epochs=2))
    fits.interrupt(max_epochs=2, at={"batch": 6})
    whole, lacking = without(fits, ["testimony", "loss"], max_epochs=2)
    assert whole == straight
    assert lacking != straight
