"""The README and the documentation are true: their Python runs, their tables are complete."""

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

from lightning_d9m import DeterminismCallback, Settings
from lightning_d9m.control import algorithms, variables

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.usefixtures("unseeded")
@pytest.mark.filterwarnings("ignore:.*`train_dataloader` does not have many workers")
@pytest.mark.parametrize("block", BLOCKS)
def test_python_in_the_documentation_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"train": lambda: None, "__name__": "documentation"}
    exec(compile(block, "documentation", "exec"), names)  # noqa: S102 - our own documentation
    for value in names.values():
        if isinstance(value, DeterminismCallback):
            value._early.restore()
        for callback in getattr(value, "callbacks", ()):
            if isinstance(callback, DeterminismCallback):
                callback._early.restore()


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


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
