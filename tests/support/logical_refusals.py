"""Programs that logical ranks do not support; see lightning/logical_ranks/test_refusals.py.

Usage, for each of several ranks: logical_refusals.py FOLDER, which writes the error of each.
"""

import json
import logging
import os
import re
import sys
import warnings
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, ChainDataset, DataLoader
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
RANK = int(os.environ.get("RANK", "0"))
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
    if predicted is not None:
        trainer.found = trainer.predict(BoringModel(), DataLoader(RandomDataset(32, predicted)))
        return trainer
    loader = DataLoader(DATA, batch_size=2) if loader is None else loader
    trainer.fit(model or BoringModel(), loader, ckpt_path=resumed)
    return trainer


def change(owner, **attributes):
    """Set attributes, functions as methods; return the object."""
    for name, value in attributes.items():
        is_method = isinstance(value, FunctionType)
        setattr(owner, name, MethodType(value, owner) if is_method else value)
    return owner


def make_model(step=None, **attributes):
    """Return a model with another step, which gets the model and a batch, or attributes."""
    if step is not None:
        attributes["training_step"] = lambda model, batch, batch_idx: step(model, batch)
    return change(BoringModel(), **attributes)


def train(*args, **attributes):
    """Return a function that makes the words of a training of such a model."""
    return lambda: {"model": make_model(*args, **attributes)}


def optimize(make):
    """Return a function that makes the words of a training with an optimizer."""
    return train(configure_optimizers=lambda model: make(model.parameters()))


def set_up(make):
    """Return a function that makes the words of a training whose ``setup`` adds a part."""
    return train(setup=lambda model, stage: setattr(model, "part", make()))


def load(*args, **words):
    """Return a function that makes the words of a training with a loader."""
    return lambda: {"loader": DataLoader(*args, **words)}


def make_mesh():
    """Return the processes, when their group is known."""
    return init_device_mesh("cpu", (PROCESSES,))


def make_divided_parameter():
    """Return a module whose parameter is divided among the processes."""
    part = nn.Module()
    part.weight = nn.Parameter(distribute_tensor(torch.ones(4), make_mesh(), [Shard(0)]))
    return part


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


def count_batch(model, batch, batch_idx):
    """Add up what each logical rank has."""
    model.total += float(batch.sum())


def keep_pattern(model, batch):
    """Keep what ranks do not send each other, another one on each logical rank."""
    model.last = re.compile(str(batch.sum()))
    return model(batch).sum()


def make_buffered_model():
    """Return a model with a buffer of another shape in each process."""
    model = BoringModel()
    model.register_buffer("seen", torch.zeros(RANK))
    return {"model": model}


def step_in_backward(parameters):
    """Return an optimizer that steps in hooks of the gradients."""
    optimizer = torch.optim.SGD(list(parameters), lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    return optimizer


COLLECTIVES = {
    "^all_gather": lambda model: model.all_gather(torch.ones(1)),
    "^reduce": lambda model: model.trainer.strategy.reduce(torch.ones(1)),
    "^broadcast": lambda model: model.trainer.strategy.broadcast(1),
    "^barrier": lambda model: model.trainer.strategy.barrier(),
    r"^torch\.distributed\.all_reduce": lambda _: all_reduce(torch.ones(1)),
    r"^torch\.ops\._c10d_functional\.all_to_all_single": lambda _: functional_all_to_all(
        torch.ones(2), None, None, torch.distributed.group.WORLD
    ),
    r"^torch\.ops\._c10d_functional\.all_reduce_": lambda _: all_reduce_op(
        torch.ones(1), "sum", "0"
    ),
    r"^torch\.distributed\.send": lambda _: torch.distributed.send(torch.ones(1), 0),
}


# What an error says, and what makes the words of the training that raises it.
REFUSALS = {
    **{
        rf"{name} is called in the step of logical rank \d": train(
            lambda model, _, c=call: c(model)
        )
        for name, call in COLLECTIVES.items()
    },
    "BoringModel has automatic_optimization=False": train(automatic_optimization=False),
    "'norm' is a SyncBatchNorm": lambda: {"model": make_model(norm=nn.SyncBatchNorm(2))},
    "'norm' is a SyncBatchNorm, .* without sync_batchnorm": lambda: {
        "model": make_model(norm=nn.BatchNorm1d(2)),
        "sync_batchnorm": True,
    },
    "ran the training step twice for one batch": optimize(torch.optim.LBFGS),
    "ZeroRedundancyOptimizer, which divides the work of an optimizer": optimize(
        partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, lr=0.1)
    ),
    "'part' is a DistributedDataParallel, which": set_up(
        lambda: DistributedDataParallel(nn.Linear(2, 2))
    ),
    "'part' is a FSDPModule, which": set_up(lambda: fully_shard(nn.Linear(2, 2), mesh=make_mesh())),
    "'part.weight' is a DTensor, which is divided": set_up(make_divided_parameter),
    "A step has the argument dataloader_iter": train(
        training_step=lambda model, dataloader_iter: model.step(next(dataloader_iter)[0])
    ),
    "returned NoneType without a loss": train(lambda model, batch: None),
    r"add callbacks=\[DeterminismCallback\(\)\]": lambda: {"callbacks": []},
    "ddp_comm_hook=.* is an option of DDP": lambda: {"options": {"ddp_comm_hook": len}},
    "logical_ranks=1.5 is not allowed": lambda: {"ranks": 1.5},
    "A range loads the data": lambda: {"loader": range(4)},
    "ChainDataset is an IterableDataset, whose samples": load(ChainDataset([]), batch_size=2),
    "has batch_size=None": load(DATA, batch_size=None),
    r"draws from its own generators \(dataset.noise\)": load(
        change(RandomDataset(32, 8), noise=torch.Generator()), batch_size=2
    ),
    "The sampler OwnSampler splits the samples among 2 processes": load(
        DATA, sampler=OwnSampler(DATA, 2, 0)
    ),
    "have different numbers of batches of ShorterForTheLast": load(
        DATA, batch_sampler=ShorterForTheLast(range(16), 2, drop_last=False)
    ),
    "has the sampler SequentialSampler, which all": lambda: {"use_distributed_sampler": False},
    "The evaluation changes 'total', and not alike": train(total=0.0, validation_step=count_batch),
    "gets the outputs and batches of all logical ranks, and these cannot be sent": train(
        validation_step=lambda model, batch, batch_idx: object(),
        on_validation_batch_end=lambda model, outputs, batch, batch_idx, dataloader_idx=0: None,
    ),
    "'last', and not alike on all logical ranks, so its value is sent": train(
        keep_pattern, last=None
    ),
    r"self.log\('seen', ..., sync_dist=True\) is called in on_train_batch_end": train(
        on_train_batch_end=lambda model, *_: model.log("seen", 1.0, sync_dist=True)
    ),
    "The backward pass changes the parameter 'layer.weight'": optimize(step_in_backward),
    "MeanMetric is computed over all processes in the step": lambda: {
        "model": make_model(compute_metric, mean=MeanMetric())
    },
}


# Refused only on several processes.
SEVERAL = {
    "only 1 logical ranks": lambda: {"ranks": 1},
    "There are 1 samples, and the last of 2 processes begins": lambda: {"predicted": 1},
    r"rank 0: .* of the model with seen \(0,\) .*\n  rank 1: .* seen \(1,\)": make_buffered_model,
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
    (folder / f"found-{PROCESSES}-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
