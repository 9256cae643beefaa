"""The notebooks run as they stand, say what their pages show, and become pages.

A cell that fails ends the run; the cells assert what the text claims.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from scripts import load_script

from lightning_d9m.tools.cli.main import build_parser

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))

notebook_pages = load_script("docs/notebook_pages.py")


@pytest.fixture(scope="module")
def run_notebooks():
    """The script; it imports jsonschema, which takes it two seconds."""
    return load_script("docs/run_notebooks.py")


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch, forking_python):
    """Let the kernel and its ``python`` start at once, and find ``d9m``."""
    folders = (str(Path(program).parent) for program in (forking_python, sys.executable))
    monkeypatch.setenv("PATH", os.pathsep.join((*folders, os.environ["PATH"])))
    monkeypatch.setattr(sys, "executable", forking_python)  # Jupyter starts it
    # With CI set, pytest does not shorten the lines of its summary.
    ours = ("LIGHTNING_D9M", "PL_GLOBAL_SEED")
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", *ours):
        monkeypatch.delenv(name, raising=False)


def outputs(notebook):
    """Return each cell's outputs without what differs by run or by processor.

    These are digests, times, other numbers, and which weights a change of rounding reaches first.

    What a command writes to standard error comes before or after the rest.
    """
    return [
        sorted(mask(output) for output in cell["outputs"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def mask(output):
    text = re.sub(r"\S*/pytest-\d+/", "", " ".join("".join(output["text"]).split()))
    # Which values a small difference reaches first depends on the CPU's vector instructions.
    text = re.sub(r"(E \w+: \d+ of \d+ differ )+", "# differ ", text)
    text = re.sub(r"(first weights:)( [\w.]+,)* [\w.]+", r"\1 #", text)
    text = re.sub(r" \(\d+:\d\d:\d\d\)", "", text)  # which pytest adds after a minute
    text = re.sub(r"\b[0-9a-f]{16}\b|\b[0-9a-f]{32}\b", "#", text)
    return re.sub(r"-?\d[\d,.]*(e[+-]\d+)?", "#", text)


@pytest.mark.parametrize(
    "path",
    # Two threads race in one.
    [pytest.param(p, marks=[pytest.mark.alone] * (p.stem == "find-an-op")) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
@pytest.mark.filterwarnings("ignore")  # of the kernel's client, which is not ours
def test_a_notebook_runs_and_shows_what_its_file_shows(path, tmp_path, run_notebooks):
    notebook = run_notebooks.run_notebook(path, tmp_path)
    run_notebooks.clean(notebook, (tmp_path, ROOT, Path(sys.base_prefix)))
    assert outputs(notebook) == outputs(json.loads(path.read_text()))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_shows_all_cells_whose_commands_we_have(path):
    """`mkdocs build --strict` checks its links."""
    cells = json.loads(path.read_text())["cells"]
    page = notebook_pages.render_cells(cells, path.name)
    assert page.startswith("# ")
    for cell in cells[1:]:
        source = "".join(cell["source"])
        assert source.strip("\n").replace(".ipynb)", ".md)") in page
        for words in map(str.split, re.findall(r"^!?d9m (.+)", source, re.MULTILINE)):
            build_parser(words[0]).parse_args(words)
    for output in (one for cell in cells for one in cell.get("outputs", ())):
        assert "".join(output["text"]).strip() in page
