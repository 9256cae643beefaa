"""The files that CONTRIBUTING and the folders name exist; a path has as many as it says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "lightning_d9m").glob("*/**/__init__.py"))
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
_WAY = re.compile(
    r"^```text\n([^\n]+): (\d+) files \(goal \d+\)\n\n(.*?)^```", re.DOTALL | re.MULTILINE
)
_FILE = re.compile(r"^(?:→ )?([a-z0-9_/]+\.py)\b", re.MULTILINE)
WAYS = {name: (int(count), _FILE.findall(text)) for name, count, text in _WAY.findall(PAGE)}


def list_missing(names):
    """Return the names that are neither files of the package nor of the repository."""
    return [
        name
        for name in names
        if not ((ROOT / "lightning_d9m" / name).is_file() or (ROOT / name).is_file())
    ]


def test_all_ways_are_read():
    assert len(WAYS) == 5
    assert all(text.count(".py") == len(_FILE.findall(text)) for _, _, text in _WAY.findall(PAGE))


@pytest.mark.parametrize("name", WAYS)
def test_a_way_names_files_that_exist_and_counts_them(name):
    count, files = WAYS[name]
    assert list_missing(files) == []
    assert len(set(files)) == len(files) == count


def test_the_files_that_the_text_names_exist():
    named = re.findall(r"`([a-z0-9_/]+\.py)`", PAGE)
    assert len(named) > 10
    assert list_missing(named) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_says_which_file_to_read_first(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    first = re.split(r"\bRead\s", text, maxsplit=1)[-1]
    named = re.findall(r"``([a-z0-9_/]+\.py)``", first)
    assert named
    assert [name for name in named if not (folder / name).is_file()] == []
