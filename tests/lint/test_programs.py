"""A program that trains is found unless it, or a scanned file that it imports, seeds torch."""

import ast
import json

import pytest

from lightning_d9m.cli.main import main
from lightning_d9m.lint.programs import runs, seeds
from lightning_d9m.lint.tree import Tree

MAIN = """\
from {imported} import prepare

prepare()
for batch in range(3):
    optimizer.zero_grad()
    loss.backward()  # torch
"""


@pytest.fixture
def found(tmp_path, monkeypatch, capsys):
    """Return a function from files to the names of those in which training is found."""

    def scan(**files):
        monkeypatch.chdir(tmp_path)
        for name, text in files.items():
            path = tmp_path / f"{name.replace('_in_', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        main(["scan", ".", "--select", "D9M210", "--format", "json"])
        return [finding["file"] for finding in json.loads(capsys.readouterr().out)["findings"]]

    return scan


def test_what_nobody_seeds_is_found(found):
    files = {"main": MAIN.format(imported="setup"), "setup": "def prepare(): pass\n"}
    assert found(**files) == ["main.py"]


def test_what_an_imported_file_seeds_is_not(found):
    """Through a file that imports another, in a circle, in a package."""
    files = {"main": MAIN.format(imported="package"), "other": MAIN.format(imported="nothing")}
    files["package_in___init__"] = "from .setup import prepare\n"
    files["package_in_setup"] = "import torch\nimport main\ndef prepare(): torch.manual_seed(0)\n"
    assert found(**files) == ["other.py"]


def test_a_file_that_does_not_parse_seeds_nothing(found):
    assert found(main=MAIN.format(imported="setup"), setup="torch.manual_seed(0\n") == ["main.py"]


def test_a_notebook_is_a_program(tmp_path, capsys):
    code = ["import torch\n", "opt.zero_grad()\n", "loss.backward()"]
    cell = {"cell_type": "code", "source": code}
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert main(["scan", str(tmp_path), "--select", "D9M210"]) == 1
    assert "train.ipynb:cell 1:3:1: warning, depends" in capsys.readouterr().out
    cell["source"] = ["import lightning_d9m\n", *code]
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert main(["scan", str(tmp_path), "--select", "D9M210"]) == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("import torch as t\nt.manual_seed(0)", True),
        ("L.seed_everything(0)", True),
        ("transformers.set_seed(0)", True),
        ("from lib import fixSeeds\nfixSeeds()", True),
        ("def seed(n): ...\nseed(3)", True),
        ("generator.manual_seed(3)", True),
        ("torch.set_rng_state(state)", True),
        ("import lightning_d9m.lightning", True),
        ("from lightning.pytorch.cli import LightningCLI", True),
        ("import random\nrandom.seed(0)", False),
        ("from numpy.random import seed\nseed(0)", False),
        ("env.seed(0)", False),
        ("torch.initial_seed()", False),
        ("derive_seed(3)", False),
        ("np.random.SeedSequence(3)", False),
        ("# torch.manual_seed(0)\nseed = 3", False),
    ],
)
def test_what_seeds_torch(text, answer):
    assert seeds(Tree(ast.parse(text))) is answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("if __name__ == '__main__':\n    main()", True),
        ("def main(): ...\nmain()", True),
        ("def main(): ...\nx.main", False),
        ("import os\nos.environ.get('x')", False),
        ("if sys.version_info > (3,): ...", False),
    ],
)
def test_what_is_a_program(text, answer):
    assert runs(ast.parse(text)) is answer
