"""The examples, and the nondeterminism that one of them has without the callback."""

import importlib.util
from pathlib import Path

import pytest
import torch

from lightning_d9m import digest
from lightning_d9m.control import session

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def graph(tmp_path, monkeypatch):
    """The module of examples/graph.py, run where it may leave files."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("graph_example", EXAMPLES / "graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def two_threads():
    """Compute with two threads, which is what makes the operation nondeterministic."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def weights(graph, monkeypatch, *, plain):
    """Train in what counts as a run of its own, and return the digests of the weights."""
    monkeypatch.setattr(session, "_fits", 0)
    model = graph.train(epochs=2, plain=plain, **({} if plain else {"ledger_dir": "ledgers"}))
    return tuple(digest(parameter) for parameter in model.parameters())


@pytest.mark.alone
@pytest.mark.usefixtures("two_threads", "unseeded")
def test_runs_differ_without_the_callback_and_agree_with_it(graph, monkeypatch):
    """No fault is injected: threads race on the CPU, and the callback ends it.

    Twenty steps with thousands of racing additions each: a plain run has never been seen to repeat
    another, and of six, two would have to differ.
    """
    plain = {weights(graph, monkeypatch, plain=True) for _ in range(6)}
    exact = {weights(graph, monkeypatch, plain=False) for _ in range(6)}
    assert len(plain) > 1
    assert len(exact) == 1
