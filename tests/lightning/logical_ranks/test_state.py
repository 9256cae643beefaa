"""Steps that change state train alike on any number of processes, and as plain DDP does."""

import os
from collections import UserList, deque
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from rank_processes import RANK, call_on_ranks
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MaxMetric, MeanMetric, MetricTracker
from trainings import fit

from lightning_d9m import DDPDeterministicStrategy, RankLostError

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
GENERATOR = torch.Generator().manual_seed(0)
NOISE = torch.Generator()
TRAIN = torch.randn(48, 6, generator=GENERATOR)
VALIDATION = torch.randn(16, 6, generator=GENERATOR)


class Base(L.LightningModule):
    """A regression, of which others change parts."""

    steered_by, interval = "", "epoch"

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

    def loss(self, rows):
        return (self.net(rows) - rows.square().sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        """Let a logged value steer the learning rate."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
        if not self.steered_by:
            return optimizer
        plan = ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
        words = {"monitor": self.steered_by, "interval": self.interval, "strict": False}
        return [optimizer], [{"scheduler": plan, **words}]


class Collector(L.Callback):
    """Logs a mean over what it collects in each validation, and the first sample of a batch."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.log("sample", batch[0][0, 0])

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, loader=0):
        self.found += outputs if isinstance(outputs, list) else [outputs]

    def on_validation_epoch_end(self, trainer, module):
        self.log("collected", torch.stack(self.found).square().mean(), sync_dist=True)
        self.found.clear()


class Counter(UserList):
    """An object whose class derives from one of the standard library."""

    def __init__(self):
        super().__init__()
        self.steps, self.table = 0, {"sum": torch.zeros(1)}


class Settings:
    """A class whose variable a step changes."""

    scale = 1.0


class Warmup:
    def __init__(self):
        self.scale = 1.0

    def grow(self):
        self.scale *= 1.1
        return self.scale


class Backwards(L.Callback):
    """Counts backward passes, of which a process of DDP has one for each step."""

    def __init__(self):
        self.calls = torch.zeros(1)

    def on_before_backward(self, trainer, module, loss):
        self.calls += 1


class Data(L.LightningDataModule):
    """Keeps a number for the model."""

    def __init__(self, *loaders):
        super().__init__()
        self.loaders, self.level = loaders, 1.0

    def train_dataloader(self):
        return self.loaders[0]

    def val_dataloader(self):
        return self.loaders[1]


def grow(state):
    state["scale"] *= 1.1
    return state["scale"]


def advance():
    advance.calls += 1
    return advance.calls


class Keeping(Base):
    """Keeps state wherever a program can; the loss depends on all of it."""

    steered_by = "collected"
    average = 0.0

    def __init__(self):
        super().__init__()
        # A self-supervised method: a momentum encoder, a target that is copied, a queue.
        self.momentum, self.target = nn.Linear(6, 5), nn.Linear(6, 5)
        for parameter in [*self.momentum.parameters(), *self.target.parameters()]:
            parameter.requires_grad = False
        self.register_buffer("queue", torch.zeros(2, 5))
        self._calls, self.note = 0, None
        # Metrics, one in a dict, and lists that steps and hooks fill.
        self.val_loss, self.best = MeanMetric(), MaxMetric()
        self.parts = {"double": MeanMetric()}
        self.outputs, self.by_name, self.sizes = [], {}, []
        # An object, a class, a function and a closure.
        self.counter, advance.calls, Keeping.average = Counter(), 0, 0.0
        number = [0]

        def count():
            number[0] += 1
            return number[0]

        self.count = count
        # A weight of each sample, a window of values, and a tracker, which copies its metric.
        self.weights, self.recent = torch.ones(len(TRAIN)), deque(maxlen=8)
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        # A partial, a method of another object, and a hook of a tensor.
        Settings.scale = 1.0
        self.grow, self.warm, self.backwards = partial(grow, {"scale": 1.0}), Warmup().grow, None
        seen = [0]

        def turn(gradient):
            seen[0] += 1
            return gradient * (1 + seen[0] / 40)

        self.net[0].weight.register_hook(turn)

    def configure_callbacks(self):
        self.backwards = Backwards()
        return [Collector(), self.backwards]

    def weigh(self, rows):
        """Write to the weights of the samples of a batch, and to a window."""
        places = (rows[:, None] == TRAIN).all(2).nonzero()[:, 1]
        self.recent.append(float(rows.sum()))
        self.weights[places] *= 1 + 0.1 * rows[:, 0].tanh()
        return self.weights[places].mean()

    def reach(self):
        """Change what others hold: a class, the datamodule, the Trainer, an optimizer."""
        Settings.scale *= 1.1
        self.trainer.datamodule.level *= 0.9
        self.trainer.reached = getattr(self.trainer, "reached", 1.0) * 1.05
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.99
        held = Settings.scale * self.trainer.datamodule.level * self.trainer.reached
        return held * self.grow() * self.warm() * (1 + self.backwards.calls.item() / 40)

    def training_step(self, batch, batch_idx):
        loss = self.attack(batch[0] * self.count_all() / 40) + self.follow(batch[0])
        loss = loss * self.reach() / 5 * self.weigh(batch[0])
        self.log("train", loss, sync_dist=True, on_epoch=True)
        return loss

    def attack(self, rows):
        """Leave gradients behind within a step, of which plain Lightning trains none."""
        rows = rows.clone().requires_grad_()
        self.loss(rows).backward()
        return self.loss((rows + 0.1 * rows.grad.tanh()).detach())

    def follow(self, rows):
        with torch.no_grad():
            pairs = zip(self.momentum.parameters(), self.net[0].parameters(), strict=True)
            for slow, fast in pairs:
                slow.data.mul_(0.8).add_(0.2 * fast.data)  # without a version
            if self.global_step >= 3:
                self.target.load_state_dict(self.momentum.state_dict())
                self._late = getattr(self, "_late", 0.0) + 0.5
            key = self.momentum(rows)
            self.queue = torch.cat([self.queue[1:], key[:1]])
        self._calls += 1
        self.note = {"calls": self._calls, "weights": [self.net[0].weight.detach().clone()]}
        wanted = key + self.target(rows) + self.queue.mean() * self._calls
        wanted = wanted * self.note["weights"][0].abs().sum() + getattr(self, "_late", 0.0)
        return (self.net[0](rows) - wanted).square().mean() * 0.01

    def count_all(self):
        self.counter.steps += 1
        self.counter.table["sum"] += 0.1
        Keeping.average = 0.9 * Keeping.average + 0.1 * self.counter.steps
        scale = self.counter.steps + self.count() + self.counter.table["sum"]
        return scale + advance() + Keeping.average

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.outputs.append(loss)
        self.by_name.setdefault("rows", []).append(batch[0].sum(0))
        self.val_loss(loss)
        self.tracker.update(loss)
        self.parts["double"].update(2 * loss)
        self.log("metric", self.val_loss, on_epoch=True)
        return loss

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        parts = batch if isinstance(outputs, list) else [batch]
        self.sizes += [part[0].sum() for part in parts]

    def on_validation_epoch_end(self):
        self.best(self.val_loss.compute())  # in a hook, as a template with Hydra does
        self.log("best", self.best.compute(), sync_dist=True)
        self.log("tracked", self.tracker.compute())
        self.log("double", self.parts["double"].compute())
        self.parts["double"].reset()
        for name, values in {"outputs": self.outputs, "sizes": self.sizes, **self.by_name}.items():
            self.log(name, torch.stack(values).mean(), sync_dist=True)
        self.outputs.clear()
        self.sizes.clear()
        self.by_name = {}


class Steered(Base):
    """Is steered by a value of each step, which no rank of plain DDP has in common.

    It draws from a generator of the file, and from one that it makes in a step. It has buffers that
    plain DDP cannot send: sparse, expanded, and of a shape that depends on the batch.
    """

    steered_by, interval = "train_step", "step"

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "adjacency", (torch.eye(6) + 0.1 * torch.ones(6, 6).triu()).to_sparse()
        )
        self.register_buffer("scale", torch.ones(1).expand(6))
        self.register_buffer("seen", torch.zeros(0))

    def configure_callbacks(self):
        return [EarlyStopping("train_step", patience=2, mode="max")]

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "noise"):
            self.noise = torch.Generator().manual_seed(4)
        draws = torch.rand(2, generator=self.noise) + torch.rand(2, generator=NOISE)
        rows = (self.adjacency @ batch[0].t()).t() * self.scale
        self.adjacency = (self.adjacency * 0.99).coalesce()
        self.seen = batch[0][0][batch[0][0] > 0].clone()
        loss = self.loss(rows * draws.sum() * float(torch.rand(1)))
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss


class Stopping(Base):
    """Ends the training in the step of one logical rank, which only one process computes."""

    def training_step(self, batch, batch_idx):
        if (batch[0] == TRAIN[15]).all(1).any():
            self.trainer.should_stop = True
        return self.loss(batch[0])


class Halting(Base):
    """Ends the training in a hook of the last process alone, after a step or an epoch."""

    def configure_callbacks(self):
        return [Halt()]

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    validation_step = training_step


class Halt(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if RANK == PROCESSES - 1 and trainer.global_step == 2:
            trainer.should_stop = True

    def on_validation_end(self, trainer, module):
        if RANK == PROCESSES - 1 and trainer.global_step > 2:
            trainer.should_stop = True


class Leaving(Base):
    """Ends the training in a hook of the last process alone, within a step."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def on_after_backward(self):
        if RANK == PROCESSES - 1 and self.global_step == 1:
            self.trainer.should_stop = True


class Failing(Base):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and RANK == PROCESSES - 1:
            raise ValueError("this step fails")
        return self.loss(batch[0])


def train(model):
    """Train with four logical ranks, on four processes with plain DDP; validate and train again.

    Return the weights, buffers and logged values.
    """
    plain = PROCESSES == 4
    place = (PROCESSES, RANK) if plain else (1, 0)
    data = TensorDataset(TRAIN)
    training = DataLoader(data, 3, sampler=DistributedSampler(data, *place, shuffle=False))
    validation = DataLoader(TensorDataset(VALIDATION), batch_size=2)
    trainer = fit(
        model,
        data := Data(training, validation),
        seed=None if plain else 3,
        max_epochs=2,
        devices=PROCESSES,
        strategy="ddp" if plain else DDPDeterministicStrategy(logical_ranks=4),
    )
    steps = trainer.global_step
    if isinstance(model, Keeping):
        trainer.validate(model, validation, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, data)
    state = {name: value.to_dense().tolist() for name, value in model.state_dict().items()}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if isinstance(model, Keeping):  # after the run, on all processes
        logged["after"] = float(model.tracker.compute_all().sum())
    own = {name: getattr(model, name, None) for name in ("_calls", "_late")}
    return [state, logged, own, steps, trainer.global_step]


def find_error():
    """Return the error of a training that one rank fails; all may train again."""
    try:
        train(Failing())
    except (ValueError, RankLostError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def train_all():
    if PROCESSES == 4:  # each process of plain DDP would train another
        return {"Keeping": train(Keeping())}
    error = find_error()
    programs = {
        kind.__name__: train(kind()) for kind in (Steered, Keeping, Stopping, Halting, Leaving)
    }
    return {"error": error, **programs}


@pytest.fixture(scope="module")
def found():
    ranks = {count: call_on_ranks(train_all, count) for count in (1, 3, 4)}
    return {(count, rank): own for count in ranks for rank, own in enumerate(ranks[count])}


@pytest.mark.parametrize("program", ["Keeping", "Steered", "Stopping", "Halting", "Leaving"])
def test_every_number_of_processes_has_the_same_bits(found, program):
    for rank in range(3):
        state, logged, *rest = found[3, rank][program]
        expected, first, *others = found[1, 0][program]
        if rank:  # what a hook logs of a batch is the process's own, as in DDP
            logged, first = ({**values, "sample": 0} for values in (logged, first))
        assert [state, logged, *rest] == [expected, first, *others], rank


def test_the_values_are_those_of_plain_ddp_but_for_rounding(found):
    state, logged, *rest = found[1, 0]["Keeping"]
    plain_state, plain_logged, *plain_rest = found[4, 0]["Keeping"]
    assert rest == plain_rest
    assert logged == pytest.approx(plain_logged, rel=1e-4)
    assert state.keys() == plain_state.keys()
    for name, values in state.items():
        pair = map(torch.tensor, (values, plain_state[name]))
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-5, msg=name)


def test_an_error_of_one_rank_is_named_on_all_which_train_again(found):
    """The programs of the other tests come after it."""
    for (count, rank), programs in found.items():
        if count < 4 and rank == count - 1:
            assert programs["error"] == "ValueError: this step fails"
        elif count < 4:
            assert programs["error"].startswith("RankLostError: ")
            assert f"Rank {count - 1} ended with ValueError: this step fails." in programs["error"]
