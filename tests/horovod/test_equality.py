"""With two ranks the strategy gives, bit for bit, the results of torch's DDP.

With logical ranks it gives those of one process.
"""

import os
import random
import time

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy
from rank_processes import call_on_ranks
from torch import nn, optim
from trainings import fit, make_loader, make_model

from lightning_d9m import DDPDeterministicStrategy, HorovodDeterministicStrategy, compare
from lightning_d9m.engine.hashing.digest import digest_value

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
CHANCE = random.SystemRandom()


def delay(gradient):
    """Delay gradients by unseeded times, so that the order in which ranks are ready varies."""
    if CHANCE.random() < 0.1:
        time.sleep(CHANCE.random() * 0.003)
    return gradient


def delay_gradients(model):
    for parameter in model.parameters():
        parameter.register_hook(delay)


def add_branches(model):
    model.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    delay_gradients(model)


def train_a_branch(model, batch, batch_idx):
    """Each rank leaves another layer out in some batches, and both leave one out always."""
    images = model.branches[(batch_idx + model.global_rank) % 2](batch[0])
    return nn.functional.cross_entropy(model.layers(images), batch[1])


def add_second(model):
    model.second = nn.Linear(10, 10)
    delay_gradients(model)


def train_in_turn(model, batch, batch_idx):
    """Two optimizers alternate; toggle_optimizer freezes the other one's parameters."""
    for optimizer in model.optimizers():
        model.toggle_optimizer(optimizer)
        loss = nn.functional.cross_entropy(model.second(model.layers(batch[0])), batch[1])
        optimizer.zero_grad()
        model.manual_backward(loss)
        optimizer.step()
        model.untoggle_optimizer(optimizer)


PLAIN = {"configure_model": delay_gradients}
BRANCHES = {"configure_model": add_branches, "training_step": train_a_branch}
MANUAL = {
    "configure_model": add_second,
    "training_step": train_in_turn,
    "automatic_optimization": False,
    "configure_optimizers": lambda model: (
        optim.SGD(model.layers.parameters(), lr=0.02),
        optim.Adam(model.second.parameters(), lr=0.02),
    ),
}
# What each overrides in the model, and the arguments of the Trainer.
SCENARIOS = {
    "plain": (PLAIN, {}),
    "accumulation": (PLAIN, {"accumulate_grad_batches": 3}),
    "clip_norm": (PLAIN, {"gradient_clip_val": 0.5}),
    "clip_value": (PLAIN, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16": (PLAIN, {"precision": "bf16-mixed"}),
    "branches": (BRANCHES, {}),
    "manual": (MANUAL, {}),
}


def train(name, folder, *scenarios):
    """Train with a strategy; return the digest and the number of steps of each scenario."""
    found, environment = {}, dict(os.environ)
    kind = {"horovod": HorovodDeterministicStrategy, "logical": DDPDeterministicStrategy}.get(name)
    for scenario in scenarios:
        logical = scenario == "logical"
        overrides, words = (PLAIN, {}) if logical else SCENARIOS[scenario]
        L.seed_everything(3, verbose=False)
        os.environ.update(environment)  # Lightning's environment removes WORLD_SIZE at the end
        # torch's own needs to know that parameters may be unused.
        strategy = kind and kind(logical_ranks=4 if logical else None)
        trainer = fit(
            make_model(**overrides),
            make_loader(size=128),
            seed=5 if logical else None,
            folder=folder,
            max_epochs=2,
            strategy=strategy or DDPStrategy(find_unused_parameters=True),
            devices=1 if strategy else 2,
            **words,
        )
        digest = digest_value(trainer.lightning_module.state_dict())
        found[scenario] = {"digest": digest, "steps": trainer.global_step}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("horovod")


@pytest.fixture(scope="module")
def ours(folder):
    names = [*SCENARIOS, "logical"]
    return call_on_ranks(train, 2, "horovod", folder / "horovod", *names, horovod=True)


@pytest.fixture(scope="module")
def expected(folder):
    found = call_on_ranks(train, 2, "ddp", folder / "ddp", *SCENARIOS)[0]
    return found | call_on_ranks(train, 1, "logical", folder / "one", "logical")[0]


@pytest.mark.parametrize("scenario", [*SCENARIOS, "logical"])
def test_every_rank_ends_with_the_expected_weights_and_buffers(ours, expected, scenario):
    """Also with jitter in the gradients; DDP itself leaves the last buffers different."""
    assert ours[0][scenario] == ours[1][scenario] == expected[scenario]


def test_the_ledger_with_logical_ranks_is_that_of_one_process(ours, expected, folder):
    assert ours[0]["logical"]["steps"] == expected["logical"]["steps"] == 4
    assert compare(folder / "one" / "fit-000", folder / "horovod" / "fit-000").equal


def test_scenarios_differ(ours):
    """Clipping, accumulation and precision each change the weights."""
    assert len({ours[0][scenario]["digest"] for scenario in SCENARIOS}) == len(SCENARIOS)
    # In two epochs of four batches, a step takes three batches, or the rest of an epoch.
    assert ours[0]["accumulation"]["steps"] == 4


@pytest.mark.cuda_build
def test_two_ranks_of_a_cuda_build_train_on_cpus(tmp_path):
    ranks = call_on_ranks(train, 2, "horovod", tmp_path, "plain", horovod=True)
    assert ranks[0] == ranks[1]
    assert ranks[0]["plain"]["steps"] > 0
