"""Kinds of programs that resumed without a word once, each by processes, workers and threads.

``python tests/support/resume_matrix.py FOLDER [KIND...]`` prints a row for each kind and a word for
each cell. `equal`: a resumed run ends with the bytes of a straight one; `refused`: an error names
the reason; `ended`: the check of the first steps ends it.
"""

import functools
import os
import shutil
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from trainings import QUIET
from written_programs import in_forks, name_outcome

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.control import session
from lightning_d9m.tools.launch.processes import make_rank_variables

SIZE = 96


class Data(Dataset):
    """Rows that do not depend on anything; subclasses change them."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.linspace(-1, 1, 3) * (index % 7) + 0.01 * index


class Epochs(Data):
    """Has the epoch in each sample, by ``set_epoch``."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return super().__getitem__(index) + self.epoch


class Means(Data):
    """Rounds a mean of many numbers, which depends on the number of threads."""

    def __getitem__(self, index):
        rows = torch.sin(torch.arange(300_000, dtype=torch.float32) * (index + 1))
        return super().__getitem__(index) + rows.mean() * 1e3


class Stream(IterableDataset):
    """Yields rows, and draws from its own generator."""

    def __init__(self):
        self.generator, self.place = torch.Generator().manual_seed(1), 0

    def __iter__(self):
        self.place %= SIZE  # where it ended, or where a state says
        while self.place < SIZE:
            self.place += 1
            yield torch.rand(3, generator=self.generator)

    def state_dict(self):
        return {"place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.place = state["place"]
        self.generator.set_state(state["generator"])

    def __len__(self):
        return SIZE


class Prioritized(Sampler):
    """Draws by weights that the model changes while it is iterated."""

    def __init__(self):
        self.weights = torch.ones(SIZE)

    def __len__(self):
        return SIZE

    def __iter__(self):
        for _ in range(SIZE):
            yield int(torch.multinomial(self.weights, 1))


class Config:
    """A helper class with a variable."""

    temperature = 1.0


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, whose state it does not save."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        loss = closure()
        self.inner.step()
        return loss


class Model(L.LightningModule):
    """A regression; the kind of program says what its step multiplies the loss by, and saves."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.held, self.factors = kind, {"level": 1.0}, [1.0]
        self.shared = torch.ones(1).share_memory_()
        self.get, self.levels = functools.partial(grow, held=self.held), [1.0]
        self.append = self.levels.append
        torch.default_generator.manual_seed(5)  # unlike torch.manual_seed, numbers no fit
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 9), torch.nn.Linear(9, 1))
        self.accumulates = kind == "FSDP2 that accumulates"
        self.automatic_optimization = kind != "GradScaler" and not self.accumulates
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.workers = 0

    def training_step(self, batch, index):
        loss = self.net(batch).square().mean() * KINDS[self.kind].get("factor", lambda _: 1.0)(self)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            if self.accumulates:
                self.manual_backward(loss)
                if index % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
                return loss
            optimizer.zero_grad()
            self.manual_backward(self.scaler.scale(loss))
            self.scaler.step(optimizer.optimizer)
            self.scaler.update()
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.net(batch).square().mean(), sync_dist=True)

    def on_train_epoch_start(self):
        if self.kind == "epoch set in a hook":
            self.trainer.train_dataloader.dataset.epoch = self.current_epoch
        if self.kind == "max_epochs in a hook" and self.current_epoch == 1:
            self.trainer.fit_loop.max_epochs = EPOCHS + 1

    def on_save_checkpoint(self, checkpoint):
        if self.kind == "a hook that saves draws":
            torch.rand(3)
        if not self.automatic_optimization:
            checkpoint["scaler"] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint):
        if "scaler" in checkpoint:
            self.scaler.load_state_dict(checkpoint["scaler"])

    def configure_model(self):
        if self.kind.startswith("FSDP2"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def train_dataloader(self):
        return make_loader(self.kind, self.workers)

    def val_dataloader(self):
        return DataLoader(Data(), 16)

    def configure_optimizers(self):
        named = dict(self.named_parameters())
        order = {*named} if self.kind == "groups from sets" else named
        optimizer = torch.optim.Adam([{"params": [named[name] for name in order]}], 0.01)
        if self.kind == "Lookahead":
            return Lookahead(optimizer)
        plan = functools.partial(schedule, model=self)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, plan)]


def schedule(_, model):
    """Return a factor of the learning rate that steps change."""
    return model.factors[0]


def grow(model, name="level", held=None):
    """Return a number of the model, or of what is held, after it has grown."""
    if held is None:
        setattr(model, name, getattr(model, name) * 1.01)
        return getattr(model, name)
    held[name] *= 1.01
    return held[name]


def prioritize(model):
    """Change the weights by which the sampler draws."""
    loader = model.trainer.train_dataloader
    loader.sampler.weights[model.global_step % SIZE] += 9
    return 1.0


EPOCHS = 3
FSDP2 = functools.partial(ModelParallelStrategy, save_distributed_checkpoint=False)
# Each steers the training by what it keeps; its factor is called in each step.
KINDS = {
    "plain": {},
    "set_epoch() of a dataset": {"data": Epochs, "shuffle": True},
    "epoch set in a hook": {"data": Epochs},
    "EarlyStopping, and the job again": {
        "callbacks": lambda: [EarlyStopping("val", patience=1, mode="max")]
    },
    "groups from sets": {},
    "a hook that saves draws": {},
    "a new dataset for each epoch": {"words": {"reload_dataloaders_every_n_epochs": 1}},
    "class variable": {"factor": lambda _: grow(Config, "temperature")},
    "partial": {"factor": lambda model: model.get(model)},
    "bound method": {"factor": lambda model: model.append(1.0) or len(model.levels)},
    "closure of LambdaLR": {"factor": lambda model: grow(model, 0, model.factors)},
    "shared tensor": {"factor": lambda model: float(model.shared.mul_(1.01))},
    "Lookahead": {},
    "prioritized sampler": {"sampler": Prioritized, "factor": prioritize},
    "max_epochs in a hook": {},
    "GradScaler": {},
    "mean of a large sample": {"data": Means},
    "StatefulDataLoader": {"loader": StatefulDataLoader, "shuffle": True},
    "StatefulDataLoader of a stream": {"loader": StatefulDataLoader, "data": Stream},
    "accumulation": {"words": {"accumulate_grad_batches": 2}},
    "find_unused_parameters": {"strategy": "ddp_find_unused_parameters_true"},
    "FSDP2": {"strategy": FSDP2},
    "FSDP2 that accumulates": {"strategy": FSDP2},
}


def make_loader(kind, workers):
    """Return the training loader of a kind."""
    given = KINDS[kind]
    words = {"sampler": given["sampler"]()} if "sampler" in given else {}
    words |= {"shuffle": True} if given.get("shuffle") else {}
    data = given.get("data", Data)()
    if "loader" in given and distributed.is_initialized() and "data" not in given:
        # Lightning cannot make torchdata's loader again to split the samples.
        words = {"sampler": DistributedSampler(data)}
    return given.get("loader", DataLoader)(data, 4, num_workers=workers, **words)


class Saver(L.Callback):
    """Saves a checkpoint within the second epoch, and one at its end."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 3):
            trainer.save_checkpoint(self.folder / "within.ckpt")

    def on_train_epoch_end(self, trainer, _):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.folder / "end.ckpt")


def train(kind, folder, place, workers, threads, variables):
    """Train as one rank; return the bytes of the weights, and of the number of steps."""
    os.environ |= variables | {"PYTHONHASHSEED": "0"}
    session.restart_fits()
    given, processes = KINDS[kind], int(variables.get("WORLD_SIZE", 1))
    saves = folder / "resumed" if place else folder
    saves.mkdir(exist_ok=True, parents=True)
    strategy = given.get("strategy", "ddp") if processes > 1 else "auto"
    determinism = DeterminismCallback(seed=3, ledger_dir=folder, threads=threads)
    module = Model(kind)
    module.workers = workers
    trainer = L.Trainer(
        **{**QUIET, "enable_checkpointing": False, "max_epochs": EPOCHS, "devices": processes},
        **given.get("words", {}),
        strategy=strategy() if callable(strategy) else strategy,
        callbacks=[determinism, *given.get("callbacks", list)(), Saver(saves)],
    )
    trainer.fit(module, ckpt_path=folder / f"{place}.ckpt" if place else None)
    whole = [getattr(own, "full_tensor", own.detach)() for own in module.parameters()]
    return b"".join(own.detach().numpy().tobytes() for own in whole) + bytes([trainer.global_step])


def judge(kind, folder, processes, workers, threads):
    """Return a word for a resume within an epoch, and for one at its end; with the first error."""
    words = []
    straight = None
    for place in ("", "within", "end"):
        given = folder, place, workers, threads
        ranks = make_rank_variables(processes) if processes > 1 else [{}]
        found = in_forks([functools.partial(train, kind, *given, own) for own in ranks])[0]
        straight = found if straight is None else straight
        words += [name_outcome(straight, found)] if place or isinstance(found, str) else []
        if words and words[-1] in ("failed", "refused", "ended"):
            sys.stderr.write(f"{kind} {given[1:]}: {found[-1500:]}\n")
    shutil.rmtree(folder)
    return words


def main():
    """Print the table."""
    torch.set_num_threads(1)
    folder, *chosen = sys.argv[1:]
    counts = Counter()
    for kind in chosen or KINDS:
        cells = []
        for processes, workers, threads in product(
            (1, 2 if kind.startswith("FSDP2") else 3), (0, 2), (1, 2)
        ):
            if (kind.startswith("FSDP2") and processes == 1) or (processes > 1 and threads > 1):
                continue
            words = judge(kind, Path(folder), processes, workers, threads)
            counts.update(words)
            cells.append(f"{processes}/{workers}/{threads} {', '.join(words)}")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)  # noqa: T201
    print(dict(counts))  # noqa: T201


if __name__ == "__main__":
    main()
