"""Each source has tests, which are found by its name.

``python tests/test_names.py SOURCE...`` prints those of sources, by the first of these rules that
finds any: a test file of its name in a folder of one of its rooms, its doctests, test files that
import it, those that give the command of its name, and those of the sources that import it.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "lightning_d9m"
IMPORT = re.compile(r"\b(?:from|import) lightning_d9m\.?([\w.]*)(?: import (\([^)]*|[^(\n]*))?")
LOADED = re.compile(r"((?:\w+|})\.\w+)[:\"]")  # a module by its name, in a string


def list_names(text):
    """Return the modules that a text imports or loads, as far as it spells their names."""
    found = set(LOADED.findall(text))
    for module, names in IMPORT.findall(text):
        found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return found


SOURCES = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.name[:2] != "__"}
FILES = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
NAMES = {path: list_names(text) for path, text in (SOURCES | FILES).items()}


def find_imports(source, paths):
    """Return those of some files that import a source, or load it by its name."""
    *rooms, name = source.relative_to(PACKAGE).with_suffix("").parts
    names = {".".join((*rooms, name)), f"{'.'.join(rooms[-1:])}.{name}", f"}}.{name}"}
    return [path for path in paths if NAMES[path] & names]


def find_tests(source, seen=()):
    """Return the test files of a source."""
    rooms = source.relative_to(PACKAGE).parts[:-1]
    named = [path for path in FILES if path.name == f"test_{source.name}"]
    command = f'"{source.stem}"' if rooms[-1:] == ("cli",) else None
    users = [user for user in find_imports(source, SOURCES) if user not in seen and user != source]
    return (
        [path for path in named if path.parent.name in (*rooms, *["tests"] * (not rooms))]
        or [source] * (">>> " in SOURCES.get(source, ""))
        or find_imports(source, FILES)
        or [path for path, text in FILES.items() if command and command in text]
        or sorted({path for user in users for path in find_tests(user, (*seen, source))})
    )


def test_every_source_has_tests():
    assert [path for path in SOURCES if not find_tests(path)] == []


@pytest.mark.parametrize("source", ["engine/room/nothing.py", "engine/ledger/seeding.py"])
def test_a_source_without_tests_is_found(source):
    """Also one that has the name of a source of another room."""
    assert find_tests(PACKAGE / source) == []


def test_the_name_of_a_class_means_one_thing():
    places = defaultdict(list)
    for path, text in SOURCES.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                places[node.name].append(path)
    assert len(places) > 100
    assert {name: paths for name, paths in places.items() if paths[1:]} == {}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        found = find_tests(Path(argument).absolute())
        sys.stdout.writelines(f"{path.relative_to(TESTS.parent)}\n" for path in found)
