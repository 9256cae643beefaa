"""Text fits a terminal, JSON holds the facts, and SARIF is what its schema says."""

import json
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from lightning_d9m.tools.lint.rules import RULES

SCHEMA = Path(__file__).with_name("sarif-schema-2.1.0.json")
SOURCE = """\
import torch
from torch import nn
ä = "ä"; layer = nn.AvgPool3d(2)
g = torch.nn.functional.grid_sample(layer, layer)
conv = nn.Conv2d(1, 1, 1)
torch.seed()
"""


@pytest.fixture
def read(tmp_path, monkeypatch, d9m):
    """Return a function that scans in a folder with a program; it gives what is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("my program.py").write_text(SOURCE, encoding="utf-8")
    return lambda *words: d9m("scan", *words)[1]


def test_ops_that_one_setting_mends_do_not_bury_the_rest(read):
    path = Path("train.py")
    lines = ["import os, torch", *["x.index_add_(0, index, values)"] * 9, "files = os.listdir()"]
    path.write_text("\n".join([*lines, "print(files[0])"]))
    text = read(path)
    assert text.index("D9M302") < text.index("D9M103")
    assert "and 7 more: `d9m scan --select D9M103` lists them" in text
    alone = read(path, "--select", "D9M103")
    assert alone.count("| x.index_add_") == 9


@pytest.mark.parametrize(
    "line",
    [
        "layer = nn.AvgPool3d(2)",
        "    layer = nn.AvgPool3d(2)  # indented",
        'ä = "ä"; 日本 = "日本"; layer = nn.AvgPool3d(2)',
        "f(" + "a, " * 60 + "nn.AvgPool3d(2))",
        "f(nn.AvgPool3d(" + "2, " * 60 + "))",
    ],
)
def test_carets_lie_below_the_code_within_80_columns(line, read):
    block = "if True:\n" if line.startswith(" ") else ""
    Path("a.py").write_text(f"from torch import nn\n{block}{line}\n", encoding="utf-8")
    out = read("a.py", "--select", "D9M101").splitlines()
    at = next(i for i, row in enumerate(out) if row.lstrip().startswith("| ") and "^" in row)
    assert max(map(cell_len, out)) <= 80
    first = cell_len(out[at][: out[at].index("^")])
    row = out[at - 1]
    marked = "".join(c for i, c in enumerate(row) if first <= cell_len(row[:i]))
    assert marked.startswith("nn.AvgPool3d(2")
    whole = marked[: out[at].count("^")]
    assert whole == "nn.AvgPool3d(2)" or (whole == marked and len(line) > 100)


def test_sarif_is_what_its_schema_says(read, tmp_path):
    """However a place is written: with blanks, absolute, in a notebook; and with nothing found.

    Results point to the rules that they name, and columns count characters, not bytes.
    """
    from jsonschema import Draft4Validator, FormatChecker  # takes two seconds

    schema = json.loads(SCHEMA.read_text())  # OASIS's own, of SARIF 2.1.0
    validator = Draft4Validator(schema, format_checker=FormatChecker())
    cell = {"cell_type": "code", "metadata": {}, "source": ["import torch\n", "torch.seed()"]}
    Path("book.ipynb").write_text(json.dumps({"cells": [cell]}))
    Path("broken.py").write_text("def")
    Path("clean.py").write_text("")
    names = ("my program.py", tmp_path / "book.ipynb", "broken.py")
    log = json.loads(read(*names, "--format", "sarif"))
    for one in (log, json.loads(read("clean.py", "--format", "sarif"))):
        assert [error.message for error in validator.iter_errors(one)] == []
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    assert len(run["results"]) == 6
    assert all(rules[one["ruleIndex"]]["id"] == one["ruleId"] for one in run["results"])
    places = [one["locations"][0]["physicalLocation"] for one in run["results"]]
    (place,) = [one for one in places if one.get("region", {}).get("startColumn") == 18]
    assert place["artifactLocation"]["uri"] == "my%20program.py"


def test_what_varies_only_without_the_flag_is_left_out_when_it_is_on(read):
    """Said on the command line, or seen in any of the files."""
    assert "D9M103" in read("my program.py")
    assert "D9M103" not in read("my program.py", "--deterministic")
    on = "import lightning as L\nL.Trainer(deterministic=True)\n"
    Path("train.py").write_text(on)
    assert "D9M103" not in read(".")


def test_a_flag_of_a_test_says_nothing_about_the_program(read):
    Path("test_train.py").write_text("import lightning as L\nL.Trainer(deterministic=True)\n")
    assert "D9M103" in read(".")


def test_the_rules_are_listed(d9m):
    status, out, _ = d9m("scan", "--rules")
    assert (status, len(out.splitlines())) == (0, len(RULES))


def test_settings_of_a_project_and_what_a_fix_mends(read, d9m, monkeypatch):
    assert "1 of them has one right answer: --fix writes it" in " ".join(read().split())
    project = Path("pyproject.toml")
    only = 'select = ["D9M204"]'
    for text in (f"[tool]\nx.y = 1\nd9m.scan.{only}", f'[ tool."d9m" ]\nscan = {{ {only} }}'):
        project.write_text(text)
        assert [f["rule"] for f in json.loads(read("--json"))["findings"]] == ["D9M204"]
    project.write_text(f"[tool.d9m.scan]\n{only}\n")
    assert [f["rule"] for f in json.loads(read("--json"))["findings"]] == ["D9M204"]
    assert "D9M101" in read("--select", "D9M101")  # the command line has precedence
    project.write_text("# [tool.d9m.scan]\n")
    assert "D9M101" in read("--json")
    for text, message in (
        ('[tool.d9m.scan]\nselct = ["D9M204"]\n', "selct = ['D9M204'] in [tool.d9m.scan]"),
        ("[tool.d9m]\nscan = 3\n", "cannot be read: "),
        ("[tool.d9m.scan]\nselect = [\n", "cannot be read: "),
    ):
        project.write_text(text)
        status, _, error = d9m("scan")
        assert (status, message in " ".join(error.split())) == (2, True)
    monkeypatch.setitem(sys.modules, "tomllib", None)
    assert "needs Python 3.11 or later" in " ".join(d9m("scan")[2].split())
    project.write_text('[project]\ndependencies = ["lightning-d9m"]\n')
    assert "D9M101" in read("--json")
