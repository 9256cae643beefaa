"""`d9m scan --fix` writes what has one right answer; the program then gives the same each time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forking_python import shared_python

from lightning_d9m.lint.fixes import fix_text
from lightning_d9m.lint.rules import RULES

GALLERY = Path(__file__).parents[1] / "support" / "gallery_training.py"
HEAD = "import glob, os, random, torch\nimport numpy as np\nfrom pathlib import Path\n"
FIXED = {
    "rng = np.random.default_rng()": "rng = np.random.default_rng(0)",
    "rng = np.random.RandomState(seed=None)": "rng = np.random.RandomState(0)",
    "random.seed()": "random.seed(0)",
    "torch.seed()": "torch.manual_seed(0)",
    "torch.cuda.seed_all()": "torch.cuda.manual_seed_all(0)",
    "g = torch.Generator()\ng.seed()": "g = torch.Generator()\ng.manual_seed(0)",
    "files = [n for n in os.listdir('ä')]": "files = [n for n in sorted(os.listdir('ä'))]",
    "files = list(Path('.').glob(\n    '*.py'\n))": (
        "files = list(sorted(Path('.').glob(\n    '*.py'\n)))"
    ),
    "files = [e.name for e in os.scandir('.')]": (
        "files = [e.name for e in sorted(os.scandir('.'), key=lambda entry: entry.name)]"
    ),
    "names = list({'b', 'a'})": "names = list(sorted({'b', 'a'}))",
    "names = {'b', 'a'}\nfor name in names: print(np.random.rand(), name)": (
        "names = {'b', 'a'}\nfor name in sorted(names): print(np.random.rand(), name)"
    ),
    "all = [*{f'{np.random.default_rng()}', 'a'}]": (
        "all = [*sorted({f'{np.random.default_rng(0)}', 'a'})]"
    ),
    "def init(n):\n    np.random.seed(3)\ntorch.utils.data.DataLoader([], worker_init_fn=init)": (
        "def init(n):\n    np.random.seed(torch.initial_seed() % 2**32)\n"
        "torch.utils.data.DataLoader([], worker_init_fn=init)"
    ),
}
LEFT = (
    "seed = torch.seed()",
    "rng = np.random.SeedSequence(None, spawn_key=(1,))",
    "torch.manual_seed(os.getpid())",
    "names = list({'b', 1})",
    "names = list(set(os.environ))",
    "with os.scandir('.') as found:\n    names = [one.name for one in found]",
    "for folder, inner, files in os.walk('.'): print(list(files), np.random.rand())",
    "names = list({'b', 'a'})  # d9m: ignore[D9M301] they are counted",
)


def fix(text):
    return fix_text(f"{HEAD}{text}\n", "a.py", frozenset(RULES)).after.removeprefix(HEAD)


@pytest.mark.parametrize("text", FIXED)
def test_one_right_answer(text):
    assert fix(text) == f"{FIXED[text]}\n"
    assert fix(FIXED[text]) == f"{FIXED[text]}\n"


@pytest.mark.parametrize("text", LEFT)
def test_no_right_answer(text):
    assert fix(text) == f"{text}\n"


PROGRAM = """\
import json
import os
import random
import numpy as np

labels = {f"label-{number}" for number in range(20)}
numbers = {label: number for number, label in enumerate(labels)}
places = np.cumsum([len(name) for name in os.listdir(".")])
print(sorted(numbers.items()), places[-1])
print(np.random.default_rng().random(), random.Random().random())
"""


def test_a_fixed_program_prints_the_same_in_each_run(tmp_path, monkeypatch, d9m):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "program.py"
    path.write_bytes(PROGRAM.replace("\n", "\r\n").encode())

    def outputs():
        run = (sys.executable, path)
        seeds = [os.environ | {"PYTHONHASHSEED": str(seed)} for seed in (1, 2)]
        return {subprocess.check_output(run, env=environment) for environment in seeds}

    assert len(outputs()) == 2
    status, shown, _ = d9m("scan", "--diff")
    assert status == 1
    assert "+numbers = {label: number for number, label in enumerate(sorted(labels))}\n" in shown
    assert len(outputs()) == 2
    status, shown, err = d9m("scan", "--fix")
    assert status == 0
    assert "fixed: 4 findings in 1 file" in err
    assert shown.startswith("0 found in 1 file")
    assert path.read_bytes().count(b"\r\n") == PROGRAM.count("\n")
    assert len(outputs()) == 1
    assert d9m("scan", "--diff")[0] == 0


def test_a_file_that_cannot_be_written_is_said(tmp_path, monkeypatch, d9m):
    (tmp_path / "a.py").write_text(f"{HEAD}random.seed()\n")
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError("full")))
    status, _, err = d9m("scan", tmp_path, "--fix")
    assert status == 2
    assert "cannot be fixed: full. Make it writable" in err


# Each cause of the gallery whose line has one right answer.
CAUSES = ("default_rng", "listdir", "set", "initial", "generator", "exchange")


@pytest.mark.parametrize("cause", CAUSES)
def test_repeat_says_equal_after_the_fix(cause, tmp_path, monkeypatch, d9m):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(GALLERY.read_text(encoding="utf-8"), encoding="utf-8")
    command = [shared_python(), "train.py", cause]
    if cause == "set":  # its order is drawn when Python starts; repeat alone would fix it
        shell = f"PYTHONHASHSEED=$RANDOM exec {sys.executable} train.py set"
        command = ["bash", "-c", shell]

    def repeat():
        status, out, _ = d9m("repeat", "--json", "-n", "2", "--", *command)
        return status, json.loads(out)["verdict"]

    d9m("scan", "--fix", "train.py")
    assert repeat() == (0, "equal")
