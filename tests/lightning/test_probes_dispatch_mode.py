"""The operations that are probed, and the line of the program that each one's dump names."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainings import make_model

from lightning_d9m.probes.dumps import read_dump
from lightning_d9m.probes.module_hooks import OpMode
from lightning_d9m.probes.settings import ProbeSettings


class Doubled(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sinh()  # in the backward pass


class Double(nn.Module):
    def forward(self, x):
        y = Doubled.apply(x).sigmoid()
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.cosh())  # in a hook
        return y.square()


@pytest.fixture
def dumped(fit, tmp_path, monkeypatch):
    """Return what one step dumped of a module's operations, by their names."""
    monkeypatch.setenv("LIGHTNING_D9M_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("LIGHTNING_D9M_DUMP_NAMES", "layers.5::*")
    model = make_model()
    model.layers.append(Double())
    fit(model=model, probes="op", probe_steps="0:1", trainer_max_epochs=1)
    read = [read_dump(file) for file in sorted((tmp_path / "dump").rglob("*.pt"))]
    assert {content["name"].partition("::")[0] for content in read} == {"layers.5"}
    return {content["op"].split(".")[1]: content for content in read}


@pytest.mark.parametrize(
    ("op", "line", "backward"),
    [
        ("sigmoid", "y = Doubled.apply(x).sigmoid()", False),
        ("sigmoid_backward", "y = Doubled.apply(x).sigmoid()", True),
        ("sinh", "return gradient.sinh()  # in the backward pass", False),
        ("cosh", "y.register_hook(lambda gradient: gradient.cosh())  # in a hook", False),
    ],
)
def test_each_operation_has_the_line_that_called_it(dumped, op, line, backward):
    """In a backward pass that is a line of the program's own, or the forward operation's."""
    assert dumped[op]["source"].endswith(f": {line}")
    assert dumped[op]["backward"] is backward


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("method", ["then", "add_done_callback"])
def test_a_callback_of_a_future_is_probed_in_no_thread(method, is_complete):
    """As that of a communication hook, which runs here or in another thread."""
    seen, called = [], []
    probes = SimpleNamespace(
        listens=True, saves=False, add=lambda kind, name, value: seen.append(name)
    )
    before = dict(vars(torch._C.Future))
    future, value = torch.futures.Future(), torch.ones(2)
    if is_complete:
        future.set_result(value)
    with OpMode(ProbeSettings(), probes).entered():
        getattr(future, method)(lambda done: called.append(done.value().mul(2)))
        if not is_complete:
            future.set_result(value)
        value.neg()
    assert len(called) == 1
    assert seen == ["(model)::aten.neg.default"]
    assert dict(vars(torch._C.Future)) == before
