"""The corpus: what is marked ``# expect: RULE RULE`` is found, and nothing of ``# fine``."""

import re
from pathlib import Path

import pytest

from lightning_d9m.lint.files import SourceFile
from lightning_d9m.lint.rules import RULES
from lightning_d9m.lint.scanner import scan_file

FILES = sorted(Path(__file__).with_name("corpus").glob("*.py"))


def read_marks(path):
    """Return the expected (line, rule) pairs of a file, and the lines that must give nothing."""
    expected, fine = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.search(r"# expect: (.+)$", line):
            expected += [(number, rule) for rule in found[1].split()]
        elif line.endswith("# fine"):
            fine.append(number)
    return expected, fine


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_the_corpus_gives_what_its_marks_say(path):
    expected, fine = read_marks(path)
    found = {
        (f.line, f.rule)
        for f in scan_file(SourceFile(str(path)), "2.13", frozenset(RULES)).findings
    }
    assert found == set(expected)
    assert not {line for line, _ in found} & set(fine)


def test_the_corpus_is_large_enough():
    """At least 60 findings and 60 look-alikes; every rule of a program's source is in it."""
    marks = [read_marks(path) for path in FILES]
    expected = [rule for pairs, _ in marks for _, rule in pairs]
    assert len(expected) >= 60
    assert sum(len(fine) for _, fine in marks) >= 60
    assert set(RULES) - set(expected) == {"D9M001", "D9M002", "D9M003"}
