"""Programs that logical ranks do not support; see lightning/logical_ranks/test_refusals.py.

Usage, for each of several ranks: logical_refusals.py FOLDER, which writes the error of each.
"""

import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric
from trainings import QUIET

from lightning_d9m import (
    DDPDeterministicStrategy,
    DeterminismCallback,
    RanksDisagreeError,
    SettingError,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch about torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

# Bound to the function itself, before anything could replace it.
all_reduce = torch.distributed.all_reduce
functional_all_to_all = functional_collectives.all_to_all_single
all_reduce_op = torch.ops._c10d_functional.all_reduce_.default
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
DATA = RandomDataset(32, 16)


def fit(folder, model=None, loader=None, callbacks=None, options=None, ranks=4, **words):
    """Train one epoch, and return the Trainer."""
    strategy = words.pop("strategy", None)
    strategy = strategy or DDPDeterministicStrategy(logical_ranks=ranks, **options or {})
    callbacks = [DeterminismCallback()] if callbacks is None else callbacks
    resumed, predicted = words.pop("resumed", None), words.pop("predicted", None)
    trainer = L.Trainer(
        default_root_dir=folder,
        devices=PROCESSES,
        strategy=strategy,
        callbacks=callbacks,
        **{"max_epochs": 1} | QUIET | words,
    )
    loader = DataLoader(DATA, batch_size=2) if loader is None else loader
    if predicted is not None:
        trainer.found = trainer.predict(BoringModel(), DataLoader(RandomDataset(32, predicted)))
        return trainer
    trainer.fit(model or BoringModel(), loader, ckpt_path=resumed)
    return trainer


def make_model(step=None, optimizer=None, **attributes):
    """Return a model with other steps or attributes."""
    model = BoringModel()
    for name, value in attributes.items():
        setattr(model, name, value)
    if step is not None:
        model.training_step = lambda batch, batch_idx: step(model, batch)
    if optimizer is not None:
        model.configure_optimizers = lambda: optimizer(model.parameters())
    return model


def make_parallel_model(make):
    """Return a model whose ``setup`` adds a part that needs the process group."""
    model = BoringModel()
    model.setup = lambda stage: setattr(model, "part", make())
    return model


def make_divided_parameter():
    """Return a module whose parameter is divided among the processes."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    part = nn.Module()
    part.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    return part


class Numbers(IterableDataset):
    """Numbers without indices."""

    def __iter__(self):
        return iter(torch.ones(8, 32))


class Batches:
    """Batches that no DataLoader makes."""

    def __iter__(self):
        return iter(torch.ones(4, 2, 32))


class Keeper(Dataset):
    """Draws from a generator that it keeps."""

    def __init__(self):
        self.noise = torch.Generator()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(32, generator=self.noise)


class OwnSampler(DistributedSampler):
    """A user's sampler."""


class ShorterForTheLast(BatchSampler):
    """Leaves out a batch of the samples of the last logical rank."""

    def __iter__(self):
        order = list(self.sampler)
        batches = list(BatchSampler(order, self.batch_size, self.drop_last))
        return iter(batches[int(len(DATA) - 1 in order) :])


def compute_metric(model, batch):
    """Compute a metric over all processes within a step."""
    model.mean.update(model(batch).sum())
    return model.mean.compute()


def make_counting_model():
    """Return a model whose validation adds up what each logical rank has."""
    model = BoringModel()
    model.total = 0.0

    def add(batch, batch_idx):
        model.total += float(batch.sum())

    model.validation_step = add
    return model


def make_logging_model():
    """Return a model with a hook of batches that logs a mean over processes."""
    model = BoringModel()
    model.on_train_batch_end = lambda *_: model.log("seen", 1.0, sync_dist=True)
    return model


class Iterating(BoringModel):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter):
        return self.step(next(dataloader_iter)[0])


def make_hooked_model():
    """Return a model with a hook that gets outputs which cannot be sent."""
    model = BoringModel()
    model.validation_step = lambda batch, batch_idx: object()
    model.on_validation_batch_end = lambda outputs, batch, batch_idx, dataloader_idx=0: None
    return model


def keep_pattern(model, batch):
    """Keep what ranks do not send each other, another one on each logical rank."""
    model.last = re.compile(str(batch.sum()))
    return model(batch).sum()


def make_buffered_model():
    """Return a model with a buffer of another shape in each process."""
    model = BoringModel()
    model.register_buffer("seen", torch.zeros(int(os.environ.get("RANK", "0"))))
    return model


def step_in_backward(parameters):
    """Return an optimizer that steps in hooks of the gradients."""
    optimizer = torch.optim.SGD(list(parameters), lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    return optimizer


def call_in_step(call):
    """Return the words of a training that calls something in each step."""

    def step(model, batch):
        call(model)
        return model(batch).sum()

    return {"model": make_model(step)}


IN_STEP = r"is called in the step of logical rank \d"
COLLECTIVES = {
    f"^all_gather {IN_STEP}": lambda model: model.all_gather(torch.ones(1)),
    f"^reduce {IN_STEP}": lambda model: model.trainer.strategy.reduce(torch.ones(1)),
    f"^broadcast {IN_STEP}": lambda model: model.trainer.strategy.broadcast(1),
    f"^barrier {IN_STEP}": lambda model: model.trainer.strategy.barrier(),
    rf"^torch\.distributed\.all_reduce {IN_STEP}": lambda _: all_reduce(torch.ones(1)),
    rf"^torch\.ops\._c10d_functional\.all_to_all_single {IN_STEP}": lambda _: functional_all_to_all(
        torch.ones(2), None, None, torch.distributed.group.WORLD
    ),
    rf"^torch\.ops\._c10d_functional\.all_reduce_ {IN_STEP}": lambda _: all_reduce_op(
        torch.ones(1), "sum", "0"
    ),
    rf"^torch\.distributed\.send {IN_STEP}": lambda _: torch.distributed.send(torch.ones(1), 0),
}


# What an error says, and what the training gets that raises it.
REFUSALS = {
    **{message: lambda call=call: call_in_step(call) for message, call in COLLECTIVES.items()},
    "BoringModel has automatic_optimization=False": lambda: {
        "model": make_model(automatic_optimization=False)
    },
    "'norm' is a SyncBatchNorm": lambda: {"model": make_model(norm=nn.SyncBatchNorm(2))},
    "'norm' is a SyncBatchNorm, .* without sync_batchnorm": lambda: {
        "model": make_model(norm=nn.BatchNorm1d(2)),
        "sync_batchnorm": True,
    },
    "ran the training step twice for one batch": lambda: {
        "model": make_model(optimizer=torch.optim.LBFGS)
    },
    "ZeroRedundancyOptimizer, which divides the work of an optimizer": lambda: {
        "model": make_model(
            optimizer=lambda parameters: ZeroRedundancyOptimizer(
                parameters, torch.optim.SGD, lr=0.1
            )
        )
    },
    "'part' is a DistributedDataParallel, which": lambda: {
        "model": make_parallel_model(lambda: DistributedDataParallel(nn.Linear(2, 2)))
    },
    "'part' is a FSDPModule, which": lambda: {
        "model": make_parallel_model(
            lambda: fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (PROCESSES,)))
        )
    },
    "'part.weight' is a DTensor, which is divided": lambda: {
        "model": make_parallel_model(make_divided_parameter)
    },
    "A step has the argument dataloader_iter": lambda: {"model": Iterating()},
    "returned NoneType without a loss": lambda: {"model": make_model(lambda model, batch: None)},
    r"add callbacks=\[DeterminismCallback\(\)\]": lambda: {"callbacks": []},
    "ddp_comm_hook=.* is an option of DDP": lambda: {"options": {"ddp_comm_hook": len}},
    "logical_ranks=1.5 is not allowed": lambda: {"ranks": 1.5},
    "A Batches loads the data": lambda: {"loader": Batches()},
    "Numbers is an IterableDataset, whose samples have no indices": lambda: {
        "loader": DataLoader(Numbers(), batch_size=2)
    },
    "has batch_size=None": lambda: {"loader": DataLoader(DATA, batch_size=None)},
    r"draws from its own generators \(dataset.noise\)": lambda: {
        "loader": DataLoader(Keeper(), batch_size=2)
    },
    "The sampler OwnSampler splits the samples among 2 processes": lambda: {
        "loader": DataLoader(DATA, sampler=OwnSampler(DATA, 2, 0))
    },
    "have different numbers of batches of ShorterForTheLast": lambda: {
        "loader": DataLoader(DATA, batch_sampler=ShorterForTheLast(range(16), 2, drop_last=False))
    },
    "has the sampler SequentialSampler, which all": lambda: {"use_distributed_sampler": False},
    "The evaluation changes 'total', and not alike": lambda: {"model": make_counting_model()},
    "gets the outputs and batches of all logical ranks, and these cannot be sent": lambda: {
        "model": make_hooked_model()
    },
    "'last', and not alike on all logical ranks, so its value is sent": lambda: {
        "model": make_model(keep_pattern, last=None)
    },
    r"self.log\('seen', ..., sync_dist=True\) is called in on_train_batch_end": lambda: {
        "model": make_logging_model()
    },
    "The backward pass changes the parameter 'layer.weight'": lambda: {
        "model": make_model(optimizer=step_in_backward)
    },
    "MeanMetric is computed over all processes in the step": lambda: {
        "model": make_model(compute_metric, mean=MeanMetric())
    },
}


# Refused only on several processes.
SEVERAL = {
    "only 1 logical ranks": lambda: {"ranks": 1},
    "There are 1 samples, and the last of 2 processes begins": lambda: {"predicted": 1},
    r"broadcast of the model:\n  seen \(0,\) torch.float32: yes on rank 0; no on rank 1": lambda: {
        "model": make_buffered_model()
    },
}


def main():
    """Run all trainings, and one without a fault."""
    folder = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {}
    several = SEVERAL if PROCESSES > 1 else {}
    for message, make in {**REFUSALS, **several, "none": dict}.items():
        try:
            words = {"ranks": PROCESSES if several else 4} | make()
            found[message] = fit(folder, **words).global_step
        except (SettingError, RanksDisagreeError) as error:
            found[message] = str(error)
    rank = int(os.environ["RANK"])
    (folder / f"found-{PROCESSES}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
