"""Each piece of what a checkpoint holds matters: without it, the bits are others, or it is said."""

import random

import numpy as np
import pytest
import torch
from adapters.resuming import Fits, evidence
from torch.utils.data import DataLoader
from trainings import NoisyDigits, make_model

from lightning_d9m import D9mError
from lightning_d9m.adapters.checkpoint_file import KEY

pytestmark = pytest.mark.usefixtures("unseeded", "new_process")


class OwnOrder:
    """A batch sampler with a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(8)

    def __iter__(self):
        for _ in range(6):
            yield self.rng.permutation(96)[:16].tolist()

    def __len__(self):
        return 6


def own_order():
    return DataLoader(NoisyDigits(), batch_sampler=OwnOrder())


def drawing_step(self, batch, batch_idx):
    """Draw from every kind of generator, as user code does."""
    noise = random.random() + float(np.random.rand()) + torch.rand(64) + self.own.random()
    loss = torch.nn.functional.cross_entropy(self.layers(batch[0] + 0.01 * noise), batch[1])
    self.log("train_loss", loss, on_step=True, on_epoch=True)
    return loss


def make_drawing_model():
    model = make_model(training_step=drawing_step)
    model.own = random.Random(6)
    return model


RUN = {
    "loader": own_order,
    "model": make_drawing_model,
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


# What is left out or changed, for each piece that a rank saves.
PIECES = {
    "Python's generator": (["rng", "python"], lambda old: PYTHON),
    "NumPy's generator": (["rng", "numpy", "state", "pos"], lambda old: old - 1),
    "torch's generator": (["rng", "torch"], lambda old: OTHER),
    "all generators of the process": (["rng"], None),
    "generators that a model keeps": (["generators"], lambda old: {}),
    "generators that a sampler keeps": (["samplers"], lambda old: {}),
    "gradients of micro-batches": (["gradients"], lambda old: {}),
    "sums of what was logged": (["results"], lambda old: {}),
    "metrics of an earlier validation": (["metrics"], lambda old: {}),
    "evaluations that were not written yet": (["testimony", "evaluations"], lambda old: []),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Train once straight and once to the middle of an epoch, between two micro-batches."""
    from lightning_d9m.control import session

    fits = Fits(tmp_path_factory.mktemp("pieces"), lambda: setattr(session, "_fits", 0))
    straight = evidence(fits.fit(**RUN))
    fits.interrupt(**RUN, at={"batch": 5})
    return fits, straight


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


def test_every_piece_is_tested(interrupted):
    fits, _ = interrupted
    (rank,) = torch.load(fits.checkpoint, weights_only=True)[KEY]["ranks"]
    tested = {path[0] for path, _ in PIECES.values()}
    assert set(rank) - tested == {"ledger", "reload_epoch"}
    assert all(rank[name] for name in tested)
