"""``d9m ls``: the ledgers under a folder, each with its verdict against the one before."""

import json
import re

import pytest

WEIGHTS = "92b5bf6594ae602d"  # 16 digits
PROGRAM = {"command": "python src/train.py --lr 0.1", "git.commit": "1a2b" * 10, "git.dirty": True}


@pytest.fixture
def folder(tmp_path, runs, monkeypatch):
    """Return a folder with four ledgers: the third differs, the fourth has another seed."""

    def edit(_, records):
        records[-2]["totals"]["weights"] = "f" * 32
        records[-2]["groups"]["weights"]["layers.0.weight"] = "f" * 32

    runs.parent = tmp_path / "runs"
    days = (f"2026-01-0{day}T12:30:00+00:00" for day in range(1, 5))
    runs.write(3, program=PROGRAM, created=next(days))
    runs.write(3, program=PROGRAM | {"git.dirty": False}, created=next(days))
    runs.write(3, edit=edit, created=next(days))
    runs.parent = tmp_path / "runs" / "other"
    runs.write(2, seed=4294967295, created=next(days))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def ls(d9m):
    return lambda *words: d9m("ls", *words)[1]


def test_a_table_has_a_line_for_each_ledger(folder, ls):
    lines = ls().splitlines()
    cells = [line.split() for line in lines]
    assert " ".join(cells[0]) == "ledger date seed weights final loss verdict end"
    assert cells[1][:5] == ["runs/fit-000", "01-01", "12:30", "42", WEIGHTS]
    assert cells[2] == [*["runs/fit-001", "01-02", "12:30", "42"], WEIGHTS, cells[1][5], "equal"]
    assert [line[4] for line in cells[2:]] == [WEIGHTS, "f" * 16, cells[4][4]]
    assert [line[-1] for line in cells[2:]] == ["equal", "different", "comparable"]
    assert cells[4][0] == "runs/other/fit-000"


def test_json_has_everything(folder, ls):
    found = json.loads(ls("--json", "runs"))
    assert [row["verdict"] for row in found] == ["", "equal", "different", "not comparable"]
    assert [row["before"] for row in found] == [None, *(f"runs/fit-00{n}" for n in range(3))]
    assert (found[0]["command"], found[0]["commit"]) == (PROGRAM["command"], "1a2b" * 10)
    assert (found[2]["commit"], found[2]["command"]) == (None, "")
    assert {len(row["weights"]) for row in found} == {32}
    # The first of the last ones is compared with an earlier one.
    assert json.loads(ls("--json", "--last", "2", "runs")) == found[2:]


def test_an_unfinished_run_and_one_that_is_damaged(folder, ls):
    path = folder / "runs" / "fit-001" / "rank-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))
    edited = folder / "runs" / "fit-002" / "rank-0.jsonl"
    edited.write_bytes(edited.read_bytes().replace(b"f" * 32, b"0" * 32))
    rows = json.loads(ls("--json"))
    assert [row["end"] for row in rows] == ["finished", "none", "", "finished"]
    assert [row["verdict"] for row in rows[1:]] == ["incomplete", "invalid", "not comparable"]
    assert "does not fit its check" in rows[2]["problem"]
    text = ls()
    assert re.search(r"incomplete +none$", text, re.MULTILINE)
    assert "\nruns/fit-002/rank-0.jsonl, line " in text
    assert "not fit its check" in text


def test_nothing_is_an_error(tmp_path, d9m):
    status, _, err = d9m("ls", tmp_path)
    assert status == 2
    assert " has no ledger. Name the folder" in " ".join(err.split())


@pytest.mark.parametrize("words", [(), (".",)])
def test_two_ledgers_are_the_last_two_by_default(folder, d9m, words):
    (folder / "runs" / "other" / "fit-000" / "rank-0.jsonl").unlink()
    found = json.loads(d9m("compare", *words, "--json")[1])
    assert (found["expected"], found["actual"]) == ("runs/fit-001", "runs/fit-002")
