"""The tables of the documentation are complete; tests/pages runs its code."""

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

from lightning_d9m import DeterminismCallback, Settings
from lightning_d9m.control import algorithms, variables

ROOT = Path(__file__).parents[1]


def test_the_settings_page_names_every_setting():
    page = (ROOT / "docs/settings.md").read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert {field.name for field in fields(Settings)} <= named
    assert set(signature(DeterminismCallback).parameters) <= named


def test_the_settings_page_names_every_variable_and_its_value():
    page = (ROOT / "docs/settings.md").read_text()
    for name, value in (
        (variables.CUBLAS, variables.CUBLAS_ALLOWED[0]),
        (variables.NCCL, variables.NCCL_DEFAULT),
        *variables._SWITCHES.items(),
    ):
        assert re.search(rf"^\| `{name}` \| `{re.escape(value)}`", page, re.MULTILINE), name


def test_the_settings_page_has_a_line_for_every_flag():
    page = (ROOT / "docs/settings.md").read_text()
    lines = {
        "torch.deterministic_algorithms": "torch.use_deterministic_algorithms",
        "torch.deterministic_warn_only": "warn_only",
        "torch.fill_uninitialized_memory": "fill_uninitialized_memory",
        "cudnn.deterministic": "torch.backends.cudnn.deterministic",
        "cudnn.benchmark": "torch.backends.cudnn.benchmark",
        "sdpa.cudnn": "cuDNN attention",
        "mkldnn.deterministic": "torch.backends.mkldnn.deterministic",
    }
    flags = algorithms.wanted_flags(fill_uninitialized_memory=True)
    assert set(lines) == set(flags) - {"inductor.deterministic"}
    assert all(text in page for text in lines.values())
