"""Every path is scanned once or gives one clear line; notebooks are read cell by cell."""

import json
import subprocess
from pathlib import Path

import pytest

from lightning_d9m.errors import SettingError
from lightning_d9m.tools.lint.source import list_files

BAD = "import random\nrandom.seed()\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_text(BAD)
    return tmp_path


@pytest.fixture
def run(d9m):
    """Return a function that scans; it gives status and (name of the file, rule, reason)s."""

    def scan(*words):
        status, out, _ = d9m("scan", "--format", "json", *words)
        findings = json.loads(out)["findings"]
        return status, [(Path(f["file"]).name, f["rule"], f["reason"]) for f in findings]

    return scan


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("broken.py", b"def f(:\n    pass\n", "It does not parse"),
        ("coding.py", b"# -*- coding: nonsense -*-\nx = 1\n", "encoding"),
        ("latin.py", b"x = '\xe9'\n", "encoding cannot be read"),
        ("null.py", b"x = 1\0\n", "null bytes"),
        ("deep.py", b"x = " + b"(" * 5000 + b")" * 5000 + b"\n", "parse"),
        ("sum.py", b"import torch\nx = torch.seed()" + b" + 1" * 100_000 + b"\n", "parse"),
        ("huge.py", b"#" * 5_000_001, "5,000,001 bytes"),
        ("not.ipynb", b"{}", "not a valid notebook"),
        ("text.ipynb", b"hello", "not a valid notebook"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_the_rest_is_scanned(folder, run, name, data, reason):
    (folder / name).write_bytes(data)
    status, findings = run(folder)
    assert status == 1
    assert ("bad.py", "D9M204") in [found[:2] for found in findings]
    [problem] = [found for found in findings if found[0] == name]
    assert problem[1] == "D9M001"
    assert reason in problem[2]


def test_links_that_lead_nowhere_are_said_and_circles_end(folder, run):
    (folder / "self.py").symlink_to(folder / "self.py")
    (folder / "gone.py").symlink_to(folder / "absent.py")
    (folder / "inner").mkdir()
    (folder / "inner" / "up").symlink_to(folder)
    _, findings = run(folder)
    assert [name for name, rule, _ in findings if rule == "D9M001"] == ["gone.py", "self.py"]


def test_folders_of_others_are_left_out_unless_named(folder, run):
    for name in (".git", ".venv", "site-packages", "mine"):
        (folder / name).mkdir()
        (folder / name / "bad.py").write_text(BAD)
    (folder / "mine" / "pyvenv.cfg").touch()
    assert len(run(folder)[1]) == 1
    assert len(run(folder / "site-packages")[1]) == 1
    assert run(folder, "--exclude", "bad.*")[0] == 0


def test_paths_that_do_not_exist_are_misuse(folder, d9m):
    with pytest.raises(SettingError, match="does not exist"):
        list(list_files([folder / "absent"]))
    status, _, err = d9m("scan", folder, "--select", "D9M999")
    assert status == 2
    assert "does not match a rule" in err


def test_files_that_git_ignores_are_left_out_unless_they_are_named(folder, run, monkeypatch):
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / "build").mkdir()
    for name in ("build/made.py", "local.py", "inner.py"):
        (folder / name).write_text(BAD)
    (folder / "package").mkdir()
    (folder / "package" / "inner.py").write_text(BAD)
    (folder / "package" / ".gitignore").write_text("inner.py\n")
    (folder / ".gitignore").write_text("build/\nlocal.py\n")
    assert {file for file, *_ in run(folder)[1]} == {"bad.py", "inner.py"}
    assert len(run(folder)[1]) == 2
    assert run(folder / "local.py")[0] == 1
    assert run(folder / "build")[0] == 1
    for hook in ({}, {"GIT_DIR": ".git"}):  # git sets it for the programs of a hook
        for name, text in hook.items():
            monkeypatch.setenv(name, text)
        assert {file for file, *_ in run(folder / "package")[1]} == set()


def test_nothing_found_is_status_0_and_something_1(folder, d9m):
    words = [(folder / "good.py",), (folder,), (folder, "--ignore", "D9M2")]
    assert [d9m("scan", *own)[0] for own in words] == [0, 1, 0]
    status, out, _ = d9m("scan", folder, "--select", "D9M301,D9M4")
    assert (status, "0 found in 2 files" in out) == (0, True)


def notebook(*cells):
    listed = [
        {"cell_type": "code", "source": cell.splitlines(keepends=True), "metadata": {}}
        for cell in cells
    ]
    text = {"cell_type": "markdown", "source": ["torch.seed()"], "metadata": {}}
    return json.dumps({"cells": [text, *listed], "nbformat": 4}, indent=1).encode()


@pytest.mark.parametrize(
    ("cells", "places"),
    [
        (["import torch.nn.functional as F", "x = 1\ny = F.grid_sample(x, x)"], [(3, 2, 5, 101)]),
        (
            [
                "%matplotlib inline\n!ls\nimport torch\ntorch?\nfiles = !ls\nx = %env A",
                "%%time\ntorch.seed()",
                "%%bash\nfor x in set(; do",
                "if True:\n    %time torch.seed()\n    !ls",
            ],
            [(3, 2, 1, 204), (5, 2, 5, 204)],
        ),
        (["def f(:", "import torch\ntorch.seed()"], [(2, 1, 1, 1), (3, 2, 1, 204)]),
    ],
    ids=["names flow from cell to cell", "magics are left out", "a cell that does not parse"],
)
def test_cells_are_one_module(scan, cells, places):
    found = scan(notebook(*cells), name="a.ipynb", whole=True)
    assert [(one.cell, one.line, one.column, int(one.rule[3:])) for one in found] == places
    assert found[0].location.endswith("a.ipynb:cell {}:{}:{}".format(*places[0]))
