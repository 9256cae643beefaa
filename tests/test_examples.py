"""The examples, and the nondeterminism that one of them has without the callback."""

import importlib.util
from pathlib import Path

import lightning
import pytest
import torch

from lightning_d9m import digest
from lightning_d9m.control import session
from lightning_d9m.lint.files import SourceFile
from lightning_d9m.lint.scanner import scan_file, scanning_prepared

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


def test_the_noise_of_the_noisy_digits_differs_and_the_scan_names_the_line():
    path = EXAMPLES / "noisy_digits.py"
    spec = importlib.util.spec_from_file_location("noisy_digits", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    draws = []
    for _ in range(2):
        lightning.seed_everything(42)
        draws.append(digest(module.NoisyDigits()[0][0]))
    assert draws[0] != draws[1]
    with scanning_prepared():
        scan = scan_file(SourceFile(str(path)), "2.13.0", frozenset({"D9M201"}))
    (line,) = (
        n for n, text in enumerate(path.read_text().splitlines(), 1) if "default_rng" in text
    )
    assert [finding.line for finding in scan.findings] == [line]
