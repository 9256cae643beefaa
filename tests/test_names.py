"""Each source has tests: of its name, its doctests, those that import it, or those of its room.

``python tests/test_names.py SOURCE...`` prints those of sources, the first kind that there is.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "lightning_d9m"
SOURCES = [path for path in PACKAGE.rglob("*.py") if path.name[:2] != "__"]
FILES = {path: path.read_text() for path in TESTS.rglob("test_*.py")}


def find_tests(source):
    """Return the test files of a source."""
    *rooms, _ = source.relative_to(PACKAGE).parts
    module = ".".join(("lightning_d9m", *rooms, source.stem))
    parent, _, name = module.rpartition(".")
    imports = (f"from {module} import", f"import {module}\n", f"from {parent} import {name}\n")
    return (
        [path for path in FILES if path.name == f"test_{source.name}"]
        or [source] * (source.exists() and ">>> " in source.read_text())
        or [path for path, text in FILES.items() if any(line in text for line in imports)]
        or [path for path in FILES if rooms and path.parent.name == rooms[-1]]
    )


def test_every_source_has_tests():
    assert [path for path in SOURCES if not find_tests(path)] == []
    assert not find_tests(PACKAGE / "engine" / "room" / "nothing.py")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        found = find_tests(Path(argument).absolute())
        sys.stdout.writelines(f"{path.relative_to(TESTS.parent)}\n" for path in found)
