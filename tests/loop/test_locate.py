"""``d9m locate`` on recorded loops with planted divergences; the runs are of this process."""

import json
import os
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_d9m import Recorder, deterministic
from lightning_d9m.cli.main import main
from lightning_d9m.locate import search


class Noise(nn.Module):
    """Adds numbers of a generator that no seed controls."""

    def forward(self, values):
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "big"))
        return values + torch.randn(values.shape, generator=generator)


@torch.library.custom_op("d9m_loop_test::race", mutates_args=())
def race(values: torch.Tensor) -> torch.Tensor:
    """Return sums whose last bits differ from call to call, as those of racing threads do."""
    return values * (1 + int.from_bytes(os.urandom(2), "big") * 2.0**-23)


race.register_autograd(lambda ctx, gradient: gradient)


class Race(nn.Module):
    """Calls an operation that is not deterministic."""

    def forward(self, values):
        return race(values)


class UnseededOrder(Sampler):
    """The order of the samples differs from run to run."""

    def __iter__(self):
        return iter(sorted(range(16), key=lambda _: os.urandom(4)))

    def __len__(self):
        return 16


def train(folder, cause):
    layer = {"noise": Noise, "race": Race}.get(cause, nn.Identity)()
    with deterministic(seed=1):
        model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        data = TensorDataset(torch.randn(16, 4))
        order = {"sampler": UnseededOrder()} if cause == "order" else {"shuffle": True}
        loader = DataLoader(data, batch_size=4, **order)
        with Recorder(folder, model, optimizer) as run:
            for epoch in range(2):
                for (batch,) in run.batches(loader):
                    loss = model(batch).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.step(loss=loss)
                run.epoch(epoch)


@pytest.fixture
def locate(tmp_path, monkeypatch, capsys):
    """Return a function that locates a cause; it gives the status and what was found."""
    monkeypatch.chdir(tmp_path)

    def run_here(command, folder, *, variables, **_):
        with monkeypatch.context() as environment:
            environment.setenv("LIGHTNING_D9M_LEDGER_DIR", str(folder))
            for name, text in variables.items():
                environment.setenv(name, text)
            train(folder, command[-1])

    def run(cause):
        monkeypatch.setattr(search, "run_once", run_here)
        status = main(["locate", "--json", "--", sys.executable, __file__, cause])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("planted", "cause", "kind", "name"),
    [
        ("noise", "random numbers", "op", "1::aten.randn.generator"),
        ("race", "op", "op", "1::d9m_loop_test.race.default"),
        ("order", "data", "batch", "batch:0"),
    ],
)
def test_the_cause_is_named(locate, planted, cause, kind, name):
    status, found = locate(planted)
    assert status == 1
    assert (found["cause"], found["kind"], found["name"]) == (cause, kind, name)
    assert (found["epoch"], found["step"]) == (0, 0)
    if planted == "order":
        assert found["samples"]["same"]


def test_equal_loops_have_no_cause(locate):
    assert locate("none")[0] == 0
