"""``d9m ls``: the ledgers under a folder, each with its verdict against the one before."""

import json

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


def test_a_table_at_80_columns(folder, ls):
    lines = ls().splitlines()
    assert max(map(len, lines)) <= 80
    cells = [line.split() for line in lines]
    # The seed of the last one has ten digits, so that there is no room for commits.
    assert " ".join(cells[0]) == "ledger date program seed epochs weights verdict"
    assert cells[2] == ["runs/"]
    assert cells[3] == ["fit-000", "01-01", "12:30", "train.py", "42", "3", WEIGHTS]
    assert cells[4] == f"fit-001 01-02 12:30 train.py 42 3 {WEIGHTS} equal".split()
    assert cells[5] == ["fit-002", "01-03", "12:30", "42", "3", "f" * 16, "differs"]
    assert cells[7] == ["runs/other/"]
    assert cells[8][3:5] == ["4294967295", "2"]
    assert cells[8][-1] == "other"


@pytest.mark.parametrize(
    ("columns", "left_out"), [(100, []), (84, ["commit"]), (77, ["commit", "seed"])]
)
def test_a_long_name_takes_the_place_of_less_important_columns(
    tmp_path, runs, monkeypatch, ls, columns, left_out
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    for _ in range(2):
        runs.write(3, program=PROGRAM | {"command": "python train_classifier.py"})
    first, *_, last = ls().splitlines()
    titles = ["ledger", "date", "program", "seed", "epochs", "weights", "commit", "verdict"]
    assert first.split() == [title for title in titles if title not in left_out]
    assert f"  {WEIGHTS}  " in last
    assert len(last) <= columns


def test_json_has_everything(folder, ls):
    found = json.loads(ls("--json", "runs"))
    assert [row["verdict"] for row in found] == [None, "equal", "different", "not comparable"]
    assert [row["before"] for row in found] == [None, *(f"runs/fit-00{n}" for n in range(3))]
    assert (found[0]["command"], found[0]["program"]) == (PROGRAM["command"], "train.py")
    assert (found[0]["git_commit"], found[0]["git_dirty"]) == ("1a2b" * 10, True)
    assert (found[2]["git_commit"], found[2]["git_dirty"], found[2]["program"]) == (None, None, "")
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
    assert [row["status"] for row in rows] == ["finished", "no end", "", "finished"]
    assert (rows[1]["epochs"], rows[1]["verdict"]) == (1, "incomplete")
    assert "does not fit its check" in rows[2]["problem"]
    assert rows[3]["verdict"] == "not comparable"
    text = ls()
    assert "1 no end" in text
    assert "invalid" in text
    assert "not fit its check" in text


def test_nothing_is_an_error(tmp_path, d9m):
    status, _, err = d9m("ls", tmp_path)
    assert status == 2
    assert "There is no ledger under" in err


@pytest.mark.parametrize("words", [(), (".",)])
def test_two_ledgers_are_the_last_two_by_default(folder, d9m, words):
    (folder / "runs" / "other" / "fit-000" / "rank-0.jsonl").unlink()
    found = json.loads(d9m("compare", *words, "--json")[1])
    assert (found["expected"], found["actual"]) == ("runs/fit-001", "runs/fit-002")
