"""Twelve kinds of planted causes, each alone in a small program: `d9m scan` finds each of them."""

import runpy

import pytest
import torch

from lightning_d9m.lint.files import SourceFile
from lightning_d9m.lint.rules import RULES
from lightning_d9m.lint.scanner import scan_file

START = """
import os, secrets, threading, time
from pathlib import Path
import numpy as np
import torch
torch.manual_seed(1)
"""
PLANTED = {
    "order of a set": ("names = [name for name in {'a', 'b', str(time)}]", "D9M301"),
    "order of a listing": ("files = [name for name in os.listdir('data')]", "D9M302"),
    "randomness of the system": ("noise = secrets.randbelow(4)", "D9M206"),
    "generator without a seed": ("draw = np.random.default_rng().random()", "D9M201"),
    "seed from the clock": ("torch.manual_seed(int(time.time()))", "D9M203"),
    "order of modification times": (
        (
            "files = sorted(Path('data').glob('*'), key=os.path.getmtime)\n"
            "data = [torch.load(file) for file in files]"
        ),
        "D9M306",
    ),
    "generator seeded by the system": ("own = torch.Generator()\nown.seed()", "D9M204"),
    "learning rate by the clock": (
        (
            "def adapt(optimizer, start):\n"
            "    for group in optimizer.param_groups:\n"
            "        group['lr'] = 0.1 / (time.time() - start)"
        ),
        "D9M212",
    ),
    "memory that was not written": (
        "def pad(x):\n    out = torch.empty(9)\n    out[1:] = x\n    return out * 2",
        "D9M107",
    ),
    "thread that writes to parameters": (
        (
            "def start(model):\n"
            "    def decay():\n"
            "        for weight in model.parameters():\n"
            "            weight.data.mul_(0.9)\n"
            "    threading.Thread(target=decay).start()"
        ),
        "D9M307",
    ),
    "index_put that accumulates": (
        "def add(x, index, values):\n    x.index_put_((index,), values, accumulate=True)",
        "D9M103",
    ),
    "gradient of a repeated index": (
        (
            "class Table(torch.nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.rows = torch.nn.Parameter(torch.zeros(4))\n"
            "    def forward(self):\n"
            "        return self.rows[torch.tensor([0, 0, 1])]"
        ),
        "D9M103",
    ),
}


def scan(path, text):
    path.write_text(text)
    return {
        (finding.line, finding.rule)
        for finding in scan_file(SourceFile(str(path)), "2.13", frozenset(RULES)).findings
    }


@pytest.mark.parametrize(("text", "rule"), PLANTED.values(), ids=PLANTED)
def test_a_planted_cause(tmp_path, text, rule):
    found = scan(tmp_path / "planted.py", f"{START}{text}\n")
    assert {name for _, name in found} == {rule}


# Programs whose threads meet on a place, as they add many values to few of them.
DIVERGES = {
    "index_put": (
        "def train(index, values):\n"
        "    sums = torch.zeros(16)\n"
        "    sums.index_put_((index,), values, accumulate=True)\n"
        "    return sums\n"
    ),
    "gradient": (
        "rows = torch.nn.Parameter(torch.zeros(16))\n"
        "def train(index, values):\n"
        "    places = torch.arange(16).repeat(25_000)\n"
        "    (rows[places] * values).sum().backward()\n"
        "    found, rows.grad = rows.grad, None\n"
        "    return found\n"
    ),
}


@pytest.mark.alone
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("text", DIVERGES.values(), ids=DIVERGES)
def test_what_is_found_does_diverge(tmp_path, text):
    """Unless deterministic algorithms are on, as the rule says."""
    assert {name for _, name in scan(tmp_path / "planted.py", f"{START}{text}")} == {"D9M103"}
    program = runpy.run_path(tmp_path / "planted.py")
    index, values = torch.arange(16).repeat(25_000), torch.randn(400_000)

    def differ(runs):
        """Return whether one of so many runs differs from the first."""
        first = program["train"](index, values)
        return any(not torch.equal(first, program["train"](index, values)) for _ in range(runs))

    assert differ(1000)
    torch.use_deterministic_algorithms(True)
    try:
        assert not differ(5)
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_found_without_a_cause(tmp_path):
    assert scan(tmp_path / "innocent.py", START) == set()
