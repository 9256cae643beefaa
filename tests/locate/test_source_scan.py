"""Lines of a program that may explain a cause."""

import pytest

from lightning_d9m.locate.search import find_cause_lines, find_program

SETS = "import helper\norder = {name: i for i, name in enumerate({'a', 'b'})}\n"
DRAWS = "import numpy as np\nnoise = np.random.default_rng()\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SETS)
    (tmp_path / "helper.py").write_text(DRAWS)
    (tmp_path / "stray.py").write_text(SETS)
    return tmp_path


def places(*arguments, **words):
    return [(f.file, f.line, f.rule) for f in find_cause_lines(["python", *arguments], **words)]


def test_the_program_and_what_it_imports(project):
    found = places("train.py", "--fast", cause="data")
    assert sorted(found) == [("helper.py", 2, "D9M201"), ("train.py", 2, "D9M301")]


def test_what_explains_the_cause_goes_first_and_what_is_certain_follows(project):
    certain = [("helper.py", 2, "D9M201"), ("train.py", 2, "D9M301")]
    assert places("train.py", cause="random numbers") == certain
    assert places("train.py", cause="all-reduce") == places("train.py", cause="") == certain
    (project / "helper.py").write_text("import torch\ntorch.seed()\n")
    drawn = [("helper.py", 2, "D9M204"), ("train.py", 2, "D9M301")]
    assert places("train.py", cause="random numbers") == drawn


@pytest.mark.parametrize("command", [["./train"], ["python", "absent.py"], ["python", "-m"]])
def test_no_program(project, command):
    assert find_program(command) is None
    assert find_cause_lines(command, "data") == []


@pytest.mark.parametrize("text", ["order = sorted({'a', 'b'})\n", "import helper\nfor"])
def test_a_clean_program_and_one_that_cannot_be_parsed(project, text):
    (project / "train.py").write_text(text)
    assert places("train.py", cause="data") == []
