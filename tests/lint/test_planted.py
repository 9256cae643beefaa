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


def scan(path, text):
    path.write_text(text)
    return {
        (finding.line, finding.rule)
        for finding in scan_file(SourceFile(str(path)), "2.13", frozenset(RULES)).findings
    }


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
