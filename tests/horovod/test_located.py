"""``d9m locate`` in a training with Horovod's own fusion: the allreduce is the cause.

The strategy is that of projects ported from Lightning 1.9. It uses no buckets. Which gradients
Horovod fuses depends on time; here every second run fuses none.
"""

from contextlib import ExitStack

import pytest
from lightning.pytorch.strategies import DDPStrategy
from located_runs import locate
from rank_processes import call_on_ranks
from torch import nn, optim
from trainings import fit, make_loader, make_model

from lightning_d9m import HorovodDeterministicStrategy

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]


class PortedStrategy(HorovodDeterministicStrategy):
    """Reduces gradients as Lightning 1.9 did: by Horovod's optimizer, with its fusion."""

    hvd, fuses = None, True

    def setup_environment(self):
        self.cluster_environment.update(self.hvd)
        DDPStrategy.setup_environment(self)

    def setup(self, trainer):
        DDPStrategy.setup(self, trainer)
        named = list(self.lightning_module.named_parameters())
        if self.fuses:
            make = self.hvd.DistributedOptimizer
            self.optimizers = [make(optimizer, named) for optimizer in self.optimizers]
            self._synchronized = ExitStack()
            for optimizer in self.optimizers:
                self._synchronized.enter_context(optimizer.skip_synchronize())

    backward = DDPStrategy.backward
    optimizer_step = DDPStrategy.optimizer_step

    def post_backward(self, closure_loss):
        if self.fuses:
            for optimizer in self.optimizers:
                optimizer.synchronize()
        else:
            for name, parameter in self.lightning_module.named_parameters():
                self.hvd.allreduce_(parameter.grad, name=name)


def train(number):
    strategy = PortedStrategy()
    strategy.fuses = number % 2 == 1
    model = make_model(
        training_step=lambda model, batch, _: nn.functional.mse_loss(
            model.layers(batch[0]), batch[0].roll(1, 1)
        ),
        configure_optimizers=lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    # Small parameters, for which fusion is designed.
    model.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    fit(model, make_loader(size=48), strategy=strategy)


def locate_on(folder):
    """Locate what differs between the trainings of all ranks."""
    import horovod.torch as hvd

    hvd.init()
    PortedStrategy.hvd = hvd
    return locate(train, f"{folder}/runs", rank=hvd.rank(), ranks=hvd.size())


def test_horovods_own_fusion_is_located_in_the_allreduce(tmp_path):
    """Each rank's local gradients are equal, and those after the allreduce differ on all ranks."""
    found, *_ = call_on_ranks(locate_on, 3, tmp_path, horovod=True)
    assert (found["cause"], found["ranks"]) == ("all-reduce", [0, 1, 2]), found
    assert found["kind"] == "gradient"
    assert found["name"].startswith("layers.")
