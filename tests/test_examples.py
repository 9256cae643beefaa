"""The examples, and the nondeterminism that one of them has without the callback."""

import re
from pathlib import Path

import lightning
import pytest
import torch
from scripts import execute, load_script

from lightning_d9m import compare, digest
from lightning_d9m.engine.control import session
from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.lint.scanner import scan_file

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def graph(tmp_path, monkeypatch):
    """The module of examples/graph.py, run where it may leave files."""
    monkeypatch.chdir(tmp_path)
    return load_script(EXAMPLES / "graph.py")


def weights(graph, monkeypatch, *, plain):
    """Train in what counts as a run of its own, and return the digests of the weights."""
    monkeypatch.setattr(session, "_of_process", session.FitCount())
    model = graph.train(epochs=2, plain=plain, **({} if plain else {"ledger_dir": "ledgers"}))
    return tuple(digest(parameter) for parameter in model.parameters())


@pytest.mark.alone
@pytest.mark.usefixtures("two_threads", "unseeded")
def test_runs_differ_without_the_callback_and_agree_with_it(graph, monkeypatch):
    """No fault is injected: threads race on the CPU, and the callback ends it.

    Twenty steps with thousands of racing additions each: a plain run has never been seen to repeat
    another, and of six, two would have to differ. Twice as many exact runs as that took agree.
    """
    plain = [weights(graph, monkeypatch, plain=True)]
    while len(set(plain)) == 1 and len(plain) < 6:
        plain.append(weights(graph, monkeypatch, plain=True))
    exact = {weights(graph, monkeypatch, plain=False) for _ in range(2 * len(plain))}
    assert len(set(plain)) > 1
    assert len(exact) == 1


def test_the_noise_of_the_noisy_digits_differs_and_the_scan_names_the_line():
    path = EXAMPLES / "noisy_digits.py"
    module = load_script(path)
    draws = []
    for _ in range(2):
        lightning.seed_everything(42)
        draws.append(digest(module.NoisyDigits()[0][0]))
    assert draws[0] != draws[1]
    scan = scan_file(str(path), frozenset({"D9M201"}))
    (line,) = (
        n for n, text in enumerate(path.read_text().splitlines(), 1) if "default_rng" in text
    )
    assert [finding.line for finding in scan.findings] == [line]


def test_a_plain_loop_repeats_and_resumes(tmp_path):
    example = load_script(EXAMPLES / "plain_torch.py")
    first, second, resumed = (tmp_path / name for name in ("first", "second", "resumed"))
    for folder in (first, second, resumed):
        folder.mkdir()
    runs = [example.train(folder, epochs=2) for folder in (first, second)]
    example.train(resumed, epochs=1)
    runs.append(example.train(resumed, epochs=2, resume=True))
    for other in runs[1:]:
        assert compare(runs[0].ledger, other.ledger).verdict == "equal"
    weights = torch.load(resumed / "checkpoint-0.pt", weights_only=True)["state_dict"]
    assert len(weights) == 4
    assert main(["verify", str(resumed / "checkpoint-0.pt"), str(runs[2].ledger)]) == 0


def test_logical_ranks_give_the_same_bits_on_one_and_on_three_processes(
    tmp_path, monkeypatch, forking_python
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = str(EXAMPLES / "logical_ranks.py")
    arguments = ["repeat", "--processes", "1,3", "--", forking_python, script]
    assert main(arguments) == 0


def test_two_runs_of_the_segmentation_agree_bit_for_bit(tmp_path, monkeypatch, forking_python):
    """One epoch on few scenes: every op of it runs forward and backward."""
    monkeypatch.chdir(tmp_path)
    few = ["--epochs", "1", "--scenes", "32", "--accelerator", "cpu"]
    command = [forking_python, str(EXAMPLES / "segmentation.py"), *few]
    assert main(["repeat", "-n", "2", "--", *command]) == 0


def test_a_plain_loop_has_the_portable_digest_of_the_page(tmp_path, forking_python):
    settings = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}
    settings |= {"LIGHTNING_D9M": "1", "LIGHTNING_D9M_PORTABLE": "1"}
    command = [forking_python, "-W", "ignore", EXAMPLES / "plain_torch.py", "--folder", tmp_path]
    done = execute(*command, folder=tmp_path, **settings)
    page = (EXAMPLES / "README.md").read_text()
    (digest_of_page,) = re.findall(
        r"^\| `plain_torch.py`.* \| ([0-9a-f]{16}) \|$", page, re.MULTILINE
    )
    assert f"weights: {digest_of_page}" in done.stdout


def test_the_page_lists_every_example():
    page = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"^\| \[(\S+)\]", page, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
