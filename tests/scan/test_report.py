"""Text fits a terminal, JSON holds the facts, and SARIF has what its schema requires."""

import json

import pytest

from lightning_d9m.adapters.cli import main
from lightning_d9m.scan.rules import RULES

SOURCE = """\
import torch
from torch import nn
ä = "ä"; layer = nn.AvgPool3d(2)
g = torch.nn.functional.grid_sample(layer, layer)
conv = nn.Conv2d(1, 1, 1)
torch.seed()
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my program.py").write_text(SOURCE, encoding="utf-8")
    return "my program.py"


def read(capsys, *words):
    assert main(["scan", *words]) == 1
    return capsys.readouterr().out


def test_text_fits_80_columns(program, capsys):
    out = read(capsys, program)
    assert max(map(len, out.splitlines())) <= 80
    assert "my program.py:3:18: D9M101 warning, certain\n" in out
    assert "Fix: Turn patch_ops on" in out


def test_json_holds_each_fact(program, capsys):
    record = json.loads(read(capsys, program, "--format", "json"))
    assert record["files"] == 1
    first = record["findings"][0]
    assert (first["line"], first["column"], first["op"]) == (3, 18, "avg_pool3d_backward")
    assert first["code"] == "nn.AvgPool3d(2)"
    assert {"rule", "severity", "certainty", "reason", "fix"} <= set(first)


def test_sarif_has_what_the_schema_requires(program, capsys):
    """SARIF 2.1.0: the required properties, values of enumerations, and indices that agree."""
    log = json.loads(read(capsys, program, "--format", "sarif"))
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    [run] = log["runs"]
    assert run["columnKind"] in {"utf16CodeUnits", "unicodeCodePoints"}
    driver = run["tool"]["driver"]
    assert driver["name"]
    assert [rule["id"] for rule in driver["rules"]] == list(RULES)
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["defaultConfiguration"]["level"] in {"none", "note", "warning", "error"}
    assert len(run["results"]) == 4
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in {"none", "note", "warning", "error"}
        assert result["message"]["text"]
        [location] = result["locations"]
        place = location["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "my%20program.py"
        region = place["region"]
        assert 1 <= region["startLine"] <= region["endLine"]
        assert region["startColumn"] >= 1
        assert region["endColumn"] >= 1


def test_a_file_takes_the_findings(program, capsys, tmp_path):
    assert read(capsys, program, "--format", "sarif", "--output", "out.sarif") == ""
    assert json.loads((tmp_path / "out.sarif").read_text())["runs"]


def test_what_varies_only_without_the_flag_is_left_out_when_it_is_on(program, capsys, tmp_path):
    """Said on the command line, or seen in any of the files."""
    assert "D9M103" in read(capsys, program)
    assert "D9M103" not in read(capsys, program, "--deterministic")
    on = "import lightning as L\nL.Trainer(deterministic=True)\n"
    (tmp_path / "train.py").write_text(on)
    assert "D9M103" not in read(capsys, ".")


def test_the_rules_are_listed(capsys):
    assert main(["scan", "--rules"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(RULES)
