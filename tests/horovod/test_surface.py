"""Lightning's whole surface on two ranks, from one launch."""

from itertools import chain
from pathlib import Path
from textwrap import wrap

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from rank_processes import call_on_ranks
from torch import nn, optim
from trainings import fit, make_loader, make_model

from lightning_d9m import HorovodDeterministicStrategy, read_ledger
from lightning_d9m.engine.hashing.digest import digest
from lightning_d9m.engine.ledger.format.records import Batch
from lightning_d9m.errors import D9mError

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
KINDS = ("local_gradient", "gradient")


def compute_loss(model, batch, _=0):
    return nn.functional.cross_entropy(model.layers(batch[0]), batch[1])


class Hooks:
    """Hooks of a model that gathers metrics, and calls collectives between steps."""

    def on_fit_start(self):
        self.accuracy = torchmetrics.MeanMetric()
        self.seen = torchmetrics.CatMetric()

    def on_train_start(self):
        import horovod.torch as hvd

        rank, strategy = self.global_rank, self.trainer.strategy
        sampler = self.trainer.train_dataloader.sampler
        self.sampler = [type(sampler).__name__, sampler.rank, sampler.num_replicas]
        sent = {"from": rank, "path": Path("sent")}
        self.collectives = {
            "all_gather": self.all_gather(torch.full((3,), float(rank))).tolist(),
            "broadcast": strategy.broadcast(sent) == sent | {"from": 0},
            "broadcast_1": strategy.broadcast(("from", rank), src=1),
            "reduce": strategy.reduce(torch.tensor([1 + rank]), reduce_op="sum").tolist(),
            "decision": strategy.reduce_boolean_decision(rank == 0),
            "horovod": hvd.allreduce(torch.ones(1), op=hvd.Sum).item(),
        }
        strategy.barrier("ours")

    def validation_step(self, batch, index):
        self.accuracy(compute_loss(self, batch))
        # A different number of values on each rank: torchmetrics gathers uneven states.
        self.seen.update(torch.full((self.global_rank + 1,), float(self.global_rank)))
        self.log("mean", self.accuracy)
        self.log("rank_mean", float(self.global_rank), sync_dist=True)
        self.log("rank_max", float(self.global_rank), sync_dist=True, reduce_fx="max")

    def on_validation_epoch_end(self):
        self.values = self.seen.compute().tolist()
        self.seen.reset()

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.05)


def run_loops(folder):
    """Fit with validation, metrics and callbacks, and predict; return what each rank has."""
    hooks = {name: hook for name, hook in vars(Hooks).items() if name[0] != "_"}
    model = make_model(**hooks)
    saved = ModelCheckpoint(Path(folder, "checkpoints"), monitor="mean", save_last=True)
    trainer = fit(
        model,
        make_loader(),
        make_loader(size=48, shuffle=False),
        strategy="horovod_d9m",
        seed=None,
        callbacks=[saved, EarlyStopping("mean", patience=5)],
        enable_checkpointing=True,
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(model, make_loader(size=32, shuffle=False))
    places = [trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.is_global_zero]
    return [*places, *model.sampler], {
        "metrics": metrics | {"train_loss": 0},  # a rank's own
        "predicted": sum(len(part) for part in predicted),
        "values": model.values,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "best": saved.best_model_path,
        "saved": max(path.name for path in Path(folder, "checkpoints").iterdir()),
        "collectives": model.collectives,
    }


def probe(folder):
    """Compare probes of gradients before and after the exchange; return the differences."""
    kept = {kind: [] for kind in KINDS}

    def training_step(model, batch, _):
        loss = compute_loss(model, batch)
        names, weights = zip(*model.named_parameters(), strict=True)
        local = torch.autograd.grad(loss, weights, retain_graph=True)
        means = [model.all_gather(gradient).sum(0) / 2 for gradient in local]
        for found, values in zip(kept.values(), (local, means), strict=True):
            found.append(dict(zip(names, map(digest, values), strict=True)))
        return loss

    model = make_model(training_step=training_step)
    model.layers[3].p = 0.0
    strategy = HorovodDeterministicStrategy(bucket_bytes=256)
    words = {"strategy": strategy, "folder": Path(folder, "probes"), "settings": {"probes": KINDS}}
    rank = fit(model, make_loader(), **words).global_rank
    batches = [
        list(zip(chain(*batch.layouts), wrap(batch.digests.hex(), 32), strict=True))
        for batch in read_ledger(Path(folder, "probes", "fit-000")).records(rank)
        if isinstance(batch, Batch)
    ]
    wrong = [
        (number, kind, name)
        for number, entries in enumerate(batches)
        for (kind, name, _), found in entries
        if found != kept[kind][number][name]
    ]
    return {"batches": len(batches), "places": len(batches[0]), "wrong": wrong}


def run_backward(model, batch, _):
    compute_loss(model, batch).backward()


def reduce_in_step(model, batch, _):
    import horovod.torch as hvd

    hvd.allreduce(torch.ones(1))
    return compute_loss(model, batch)


def train_foreign(model):
    """Train a parameter that the module does not have."""
    return optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


# Mistakes that would stay silent: logical ranks, overrides of the model, words of the error.
MISTAKES = {
    "stray": (
        None,
        {"training_step": run_backward, "automatic_optimization": False},
        "self.manual_backward(loss)",
    ),
    "foreign": (None, {"configure_optimizers": train_foreign}, "configure_model"),
    "collective": (
        4,
        {"training_step": reduce_in_step},
        "horovod.torch.allreduce is called in the step of logical rank",
    ),
    "too many": (1, {}, "There are 2 processes, but only 1 logical ranks"),
}


def train(folder):
    """Run all; return what this rank has found."""
    import horovod.torch as hvd

    ranks, found = run_loops(folder)
    found["probes"], refusals = probe(folder), {}
    for name, (logical_ranks, overrides, _) in MISTAKES.items():
        strategy = HorovodDeterministicStrategy(logical_ranks=logical_ranks)
        try:
            fit(make_model(**overrides), make_loader(), strategy=strategy, folder=f"{folder}/runs")
        except D9mError as error:
            refusals[name] = str(error)
    # After the errors; and a collective can be called again.
    last = fit(make_model(), make_loader(), strategy="horovod_d9m", seed=None)
    hvd.allreduce(torch.ones(1))
    # Rank 1 exits; a script in which only rank 0 saves at the end must end, too.
    if last.global_rank == 0:
        last.save_checkpoint(Path(folder, "late.ckpt"))
    return {"ranks": ranks, "found": found, "refusals": refusals}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("surface")


@pytest.fixture(scope="module")
def ranks(folder):
    return call_on_ranks(train, 2, folder, horovod=True)


@pytest.fixture(scope="module")
def found(ranks):
    """Return what both ranks have found, which is equal."""
    assert ranks[0]["found"] == ranks[1]["found"]
    return ranks[0]["found"]


def test_lightning_knows_the_ranks_and_the_sampler_gives_each_its_part(ranks):
    assert [rank["ranks"] for rank in ranks] == [
        [0, 2, 0, True, "DistributedSampler", 0, 2],
        [1, 2, 1, False, "DistributedSampler", 1, 2],
    ]


def test_values_are_reduced_and_each_rank_predicts_its_part(found):
    """Torchmetrics gathers uneven states in rank order; the learning rate is not scaled."""
    assert (found["metrics"]["rank_mean"], found["metrics"]["rank_max"]) == (0.5, 1.0)
    assert found["values"] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert (found["predicted"], found["lr"]) == (16, 0.05)


def test_checkpoints_are_known_to_all_and_one_that_rank_0_saves_at_the_end_is_written(
    folder, found
):
    assert found["saved"] == "last.ckpt"
    assert found["best"].endswith(".ckpt")
    assert (folder / "late.ckpt").exists()


def test_collectives(found):
    """Plain objects are sent without pickle."""
    assert found["collectives"] == {
        "all_gather": [[0.0] * 3, [1.0] * 3],
        "broadcast": True,
        "broadcast_1": ["from", 1],
        "reduce": [3],
        "decision": False,
        "horovod": 2.0,
    }


def test_probes_have_gradients_of_before_and_after_the_exchange(found):
    """The last gradient of a bucket is packed, and scaled, as soon as it arrives."""
    assert found["probes"] == {"batches": 3, "places": 12, "wrong": []}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_silent_mistakes_are_refused(ranks, mistake):
    assert all(MISTAKES[mistake][2] in rank["refusals"][mistake] for rank in ranks)
