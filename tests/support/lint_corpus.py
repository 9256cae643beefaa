"""Read the marks of the corpus: ``# expect: RULE RULE`` and ``# fine``, one line each."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "lint" / "corpus"
_EXPECTED = re.compile(r"# expect: (.+)$")


def read_marks(path):
    """Return the expected (line, rule) pairs of a file, and the lines that must give nothing."""
    expected, fine = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := _EXPECTED.search(line):
            expected += [(number, rule) for rule in found[1].split()]
        elif line.endswith("# fine"):
            fine.append(number)
    return expected, fine
