"""Importing the package and asking the command line loads neither torch nor Lightning."""

import re
import sys
from pathlib import Path

import pytest
from scripts import execute

import lightning_d9m

HEAVY = {
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy"),
    *("horovod", "triton", "rich", "jinja2"),
}
COMMANDS = ("repeat", "compare", "ls", "report", "doctor", "ops", "audit", "install-horovod")
LIGHT = [
    "import lightning_d9m; lightning_d9m.DriftError; lightning_d9m.Settings(seed=1)",
    "from lightning_d9m.tools.cli.main import build_parser; build_parser().format_help()",
    *(f"build_parser({command!r})" for command in COMMANDS),
    "import lightning_d9m.engine.ledger.folder, lightning_d9m.tools.comparison.ledgers",
]


def loaded_by(statement: str, folder: Path | None = None) -> set[str]:
    """Return the heavy packages that a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*({HEAVY!r} & set(sys.modules)))"
    return set(execute(sys.executable, "-c", code, folder=folder).stdout.split())


def test_package_command_line_and_ledgers_stay_light():
    assert loaded_by("\n".join(LIGHT)) == set()


DIGEST = f"""
import sys, torch
from lightning_d9m import digest
digest(torch.ones(3))
assert {HEAVY!r} & set(sys.modules) == {{"torch", "numpy"}}
"""


def test_a_digest_and_the_recipe_without_lightning_load_none(tmp_path):
    """The recipe runs as it stands on the page, in an interpreter of its own."""
    text = (Path(__file__).parents[1] / "docs/loops.md").read_text()
    recipe = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    loaded = loaded_by(DIGEST + recipe[1], tmp_path)
    assert "torch" in loaded
    assert not {name for name in loaded if "lightning" in name}


TRAINING = """
import sys
from pathlib import Path
from lightning_d9m import DeterminismCallback
DeterminismCallback()
modules = [m for name, m in sys.modules.items() if name.startswith("lightning_d9m")]
files = [module.__file__ for module in modules]
own = [file for file in files if file and "autoload" not in file]  # which the fixture has loaded
print(sum(len(Path(file).read_text().splitlines()) for file in own))
"""


def test_a_training_loads_only_what_it_uses(forking_python):
    """A reader of a training need not know the other 27,000 lines."""
    assert int(execute(forking_python, "-c", TRAINING).stdout) <= 16_300


def test_every_public_name_loads():
    stub = Path(lightning_d9m.__file__).with_suffix(".pyi").read_text()
    names = re.findall(r"(\w+) as \1,?$", stub, re.MULTILINE)
    assert sorted({*lightning_d9m.__all__, "__version__"}) == sorted(names)
    for name in set(names) - {"probe", "__version__"}:
        assert getattr(lightning_d9m, name).__name__ == name


def test_what_examples_and_docs_import_is_public():
    """They import the package itself, and the modules that are public by their names."""
    root = Path(__file__).parents[1]
    patterns = ("README.md", "docs/*.md", "docs/notebooks/*.ipynb", "examples/*.py")
    pages = [page for pattern in patterns for page in root.glob(pattern)]
    found = {
        module
        for page in pages
        for module in re.findall(r"(?:from|import) (lightning_d9m[\w.]*)", page.read_text())
    }
    assert found <= {"lightning_d9m", "lightning_d9m.probe"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="lightning_d9m attribute Determinism"):
        _ = lightning_d9m.Determinism
