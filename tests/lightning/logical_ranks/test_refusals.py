"""What logical ranks do not support is refused before training, on any number of processes."""

import os
import queue
import re
import tempfile
import threading
import warnings
from functools import partial

import lightning as L
import logical_refusals
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from logical_refusals import DATA, PROCESSES, change, make_model
from rank_processes import RANK, call_on_ranks
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, ChainDataset, DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric
from trainings import QUIET

from lightning_d9m import (
    DDPDeterministicStrategy,
    DeterminismCallback,
    InexactResumeError,
    RanksDisagreeError,
    SettingError,
    read_ledger,
)
from lightning_d9m.engine.control.environment import threads_pinned

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch about torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

# Bound to the function itself, before anything could replace it.
all_reduce = torch.distributed.all_reduce
functional_all_to_all = functional_collectives.all_to_all_single
all_reduce_op = torch.ops._c10d_functional.all_reduce_.default


def train(*args, **attributes):
    """Return a function that makes the words of a training of such a model."""
    return lambda: {"model": make_model(*args, **attributes)}


def optimize(make):
    return train(configure_optimizers=lambda model: make(model.parameters()))


def set_up(make):
    """Return a function that makes the words of a training whose ``setup`` adds a part."""
    return train(setup=lambda model, stage: setattr(model, "part", make()))


def load(*args, **words):
    return lambda: {"loader": DataLoader(*args, **words)}


def make_mesh():
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
    "accumulate_grad_batches is 2, .* multiply logical_ranks by 2": lambda: {
        "accumulate_grad_batches": 2
    },
    # Before the first epoch, although it begins later.
    "accumulate_grad_batches is 3, .* multiply logical_ranks by 3": lambda: {
        "callbacks": [DeterminismCallback(), GradientAccumulationScheduler({4: 3})]
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
    "An optimizer holds a parameter of shape \\(3,\\) that is not in the LightningModule": optimize(
        lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(3))], lr=0.1)
    ),
    "MeanMetric is computed over all processes in the step": lambda: {
        "model": make_model(compute_metric, mean=MeanMetric())
    },
}


# Refused only on several processes.
SEVERAL = {
    "only 1 logical ranks": lambda: {"ranks": 1},
    "There are 1 samples, and the last of 2 processes begins": lambda: {"predicts": 1},
    r"rank 0: .* of the model with seen \(0,\) .*\n  rank 1: .* seen \(1,\)": make_buffered_model,
}


def find_errors(folder):
    """Return the errors of all trainings, and the steps of one without a fault."""
    found = {}
    several = SEVERAL if PROCESSES > 1 else {}
    for message, make in {**REFUSALS, **several, "none": dict}.items():
        words = {"ranks": PROCESSES if several else 4} | make()
        try:
            if "predicts" in words:
                strategy = DDPDeterministicStrategy(logical_ranks=words["ranks"])
                predict(folder, words["predicts"], strategy)
            else:
                found[message] = logical_refusals.fit(folder, **words).global_step
        except (SettingError, RanksDisagreeError) as error:
            found[message] = str(error)
    return found


def predict(folder, samples, strategy):
    words = {"default_root_dir": folder, "devices": PROCESSES, "strategy": strategy}
    trainer = L.Trainer(callbacks=[DeterminismCallback()], **words, **QUIET)
    return trainer.predict(BoringModel(), DataLoader(RandomDataset(32, samples)))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what one process with four logical ranks found, and each of two with one."""
    folder = tmp_path_factory.mktemp("refusals")
    return [errors for count in (1, 2) for errors in call_on_ranks(find_errors, count, folder)]


@pytest.mark.parametrize("message", [*REFUSALS, *SEVERAL])
def test_a_program_is_refused_on_one_and_on_two_processes(found, message):
    for place, errors in enumerate(found):
        if message in errors or message in REFUSALS:
            assert re.search(message, str(errors[message])), f"{place}: {errors[message]}"
    assert message in found[-1]


def test_a_plain_training_after_all_refusals_is_accepted(found):
    assert [errors["none"] for errors in found] == [2, 4, 4]


@pytest.mark.filterwarnings("ignore:Total length of `list`")
def test_an_empty_list_of_loaders_has_nothing_to_split(fit):
    fit(model=make_model(val_dataloader=lambda _: []))


def test_samplers_of_torch_are_split(fit):
    for sampler in (WeightedRandomSampler(torch.ones(16), 16), DistributedSampler(DATA, 2, 0)):
        words = {"options": {"find_unused_parameters": True}}  # which is not needed
        words["loader"] = DataLoader(DATA, batch_size=2, sampler=sampler)
        assert fit(**words).global_step == 2


def test_a_checkpoint_needs_the_same_logical_ranks_and_threads(fit, tmp_path):
    path = tmp_path / "saved.ckpt"
    fit().save_checkpoint(path)
    with pytest.raises(InexactResumeError, match="saved with logical_ranks=4; now it is 2"):
        fit(ranks=2, resumed=path, max_steps=8)
    threads = torch.get_num_threads() + 1
    with pytest.raises(
        InexactResumeError, match=f"saved with threads={threads - 1}; now it is {threads}"
    ):
        fit(callbacks=[DeterminismCallback(threads=threads)], resumed=path)


def test_the_threads_are_not_those_that_an_earlier_fit_left_in_the_variable(
    fit, tmp_path, monkeypatch
):
    """Lightning's launcher sets the variable, if it is not set, to the cores of each process."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with threads_pinned(torch.get_num_threads()):  # the launcher sets torch's number, too
        threads = [fit().strategy.logical_threads]
        monkeypatch.setenv("OMP_NUM_THREADS", str(int(os.environ["OMP_NUM_THREADS"]) + 2))
        threads.append(fit().strategy.logical_threads)
    runs = [read_ledger(path) for path in sorted(tmp_path.rglob("fit-*"))]
    assert [run.header.settings["threads"] for run in runs] == threads
    assert threads[0] == threads[1]


def test_the_variable_sets_the_number_of_logical_ranks(monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "6")
    strategy = L.Trainer(strategy="ddp_d9m", devices=1, **QUIET).strategy
    assert isinstance(strategy, DDPDeterministicStrategy)
    assert strategy.logical_ranks == 6
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "six")
    with pytest.raises(SettingError, match="LIGHTNING_D9M_LOGICAL_RANKS is 'six'"):
        DDPDeterministicStrategy()
    monkeypatch.delenv("LIGHTNING_D9M_LOGICAL_RANKS")
    assert DDPDeterministicStrategy().logical_ranks is None


def test_the_variable_is_refused_by_a_strategy_that_does_not_read_it(fit, monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "6")
    with pytest.raises(SettingError, match="'6', but the Trainer has the strategy SingleDevice"):
        fit(strategy="auto")


def test_what_a_step_changes_is_named_once_unless_it_is_changed_alike_or_appended(fit):
    """Values that logical ranks change differently, and a queue, a lock and a file."""

    def change(model, batch):
        model.last = model(batch).sum()
        model.outputs["counter"] += 1
        model.outputs["all"].append(1)
        model.queue.put(1)
        model.lock.acquire(blocking=False)
        model.file.write(b"x")
        return model.last

    outputs = {"counter": 0, "all": []}
    kept = {
        "queue": queue.SimpleQueue(),
        "lock": threading.Lock(),
        "last": None,
        "outputs": outputs,
    }
    with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(make_model(change, file=file, norm=nn.BatchNorm1d(2), **kept))
    texts = [str(one.message) for one in seen if "A step changes" in str(one.message)]
    named = {text.split("'")[1]: text for text in texts}
    said = {"file": "of _io", "lock": "lock of _th", "queue": "SimpleQueue of _queue"}
    assert outputs == {"counter": 2, "all": [1] * 8}
    assert named.keys() == {"last", *said}
    assert len(texts) == 4
    assert named["last"].startswith("A step changes 'last' of BoringModel, and not")
    for name, what in said.items():
        assert what in named[name]


def test_weights_that_are_first_changed_after_the_compared_steps_are_refused(fit):
    def change_late(model, batch):
        if model.global_step == 3:
            model.layer.weight.detach().mul_(2)
        return model(batch).sum()

    with pytest.raises(SettingError, match=r"the trained parameter 'layer\.weight' for the"):
        fit(make_model(change_late), max_epochs=2)


def test_fewer_samples_than_logical_ranks_are_predicted_once(fit, tmp_path):
    batches = predict(tmp_path, 3, DDPDeterministicStrategy(logical_ranks=4))
    assert [[part.shape for part in batch] for batch in batches] == [[(1, 2)] * 3]


def test_predictions_that_are_appended_to_a_list_are_refused(fit):
    model = make_model(
        outputs=[], predict_step=lambda model, batch, _: model.outputs.append(model(batch))
    )
    trainer = fit(model)
    with pytest.raises(SettingError, match="predict_step adds to 'outputs'"):
        trainer.predict(model, DataLoader(DATA, batch_size=2))
