"""``d9m bisect`` on real git repositories and wheels of a temporary folder, without a network."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ledger_program import PROGRAM
from uv import find_uv_bin

from lightning_d9m.tools.history import bisection
from lightning_d9m.tools.history.bisection import install_packages, read_packages

TRAIN = f"""{PROGRAM}
from values import VALUES

train(VALUES)
Path("left-behind").write_text("a file that git does not know")
"""
SAME, OTHER = "VALUES = [1, 2, 3]", "VALUES = [1, 9, 8]"  # of its module
BROKEN = "raise SystemExit(3)"


def git(folder, *words):
    who = {"GIT_AUTHOR_NAME": "Ann", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "Ann"}
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        env=os.environ | who | {"GIT_COMMITTER_EMAIL": "a@b"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def make_repository(folder, contents, below="."):
    """Commit each content of ``values.py``; return the names of the commits."""
    (folder / below).mkdir(parents=True)
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("data\n")
    (folder / below / "train.py").write_text(TRAIN)
    names = []
    for number, content in enumerate(contents):
        (folder / below / "values.py").write_text(f"{content}\n# {number}\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", f"Change {number}")
        names.append(git(folder, "rev-parse", "HEAD").strip())
    return names


@pytest.fixture
def bisect(tmp_path, monkeypatch, d9m):
    """Return a function that bisects ``tmp_path/project``; it gives (status, facts, errors)."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def run(*words, inside="project"):
        monkeypatch.chdir(tmp_path / inside)
        output = tmp_path / f"output-{len(list(tmp_path.iterdir()))}"
        command = ["--", sys.executable, "train.py"]
        status, out, err = d9m("bisect", "--json", "-o", output, *words, *command)
        return status, json.loads(out or "{}"), err

    return run


def test_the_guilty_one_of_twenty_commits_is_named_though_three_do_not_run(tmp_path, bisect):
    contents = [SAME] * 13 + [OTHER] * 7
    for number in (4, 11, 16):
        contents[number] = BROKEN
    names = make_repository(tmp_path / "project", contents)
    (tmp_path / "project/values.py").write_text("not committed")
    before = git(tmp_path / "project", "status", "--porcelain", "--branch")
    status, facts, _ = bisect(f"{names[0]}..{names[-1]}")
    assert status == 1
    assert [commit["sha"] for commit in facts["candidates"]] == [names[13]]
    assert "+VALUES = [1, 9, 8]" in facts["patch"]
    first = facts["comparison"]["ranks"][0]["divergence"]
    assert (first["moment"], first["epoch"], first["name"]) == ("epoch", 1, "w")
    assert facts["commits"] == 19
    # Twice the good one, once the bad one, and a bisection of 18.
    assert len(facts["trials"]) <= 3 + 5 + 3
    # The user's folder is as it was, and no worktree is left.
    assert git(tmp_path / "project", "status", "--porcelain", "--branch") == before
    assert (tmp_path / "project/values.py").read_text() == "not committed"
    assert len(git(tmp_path / "project", "worktree", "list").splitlines()) == 1
    # A golden ledger finds a good commit, and the guilty one; other bits have no good commit.
    golden = Path(facts["comparison"]["expected"])
    other = Path(facts["comparison"]["actual"])
    status, facts, _ = bisect("--golden", str(golden), names[15])
    assert status == 1
    assert [commit["sha"] for commit in facts["candidates"]] == [names[13]]
    status, _, errors = bisect("--golden", str(other), names[2])
    assert status == 2
    assert "No ancestor" in errors


def test_commits_that_do_not_run_hide_the_guilty_one_and_are_all_named(tmp_path, bisect):
    names = make_repository(tmp_path / "project", [SAME, SAME, BROKEN, BROKEN, OTHER])
    status, facts, _ = bisect(f"{names[0]}..{names[-1]}")
    assert status == 1
    assert {commit["sha"] for commit in facts["candidates"]} == set(names[2:])
    assert facts["patch"] == ""
    assert any("exit status 3" in trial["reason"] for trial in facts["trials"])


def test_a_training_ends_after_the_epoch_that_was_asked_for(tmp_path, bisect):
    slow = "import time\nfrom itertools import count\n\ndef values():\n    for n in count():\n"
    slow += "        yield n {}\n        time.sleep(0.3)\n\nVALUES = values()"
    contents = [slow.format("* 1"), slow.format("+ 0"), slow.format("* 2"), slow.format("* 2")]
    names = make_repository(tmp_path / "project", contents)
    status, facts, _ = bisect("--until", "2", f"{names[0]}..{names[-1]}")
    assert status == 1
    assert [commit["sha"] for commit in facts["candidates"]] == [names[2]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["HEAD"], "Give a good and a bad one, GOOD..BAD"),
        (["--golden", ".", "HEAD~1..HEAD"], "in place of the good one"),
        (["nothing..HEAD"], "does not name a commit"),
        (["HEAD..HEAD~1"], "is not an earlier ancestor"),
        (["--link", "data", "HEAD~1..HEAD"], "--link is 'data', and "),
    ],
)
def test_wrong_commits_are_one_clear_error(tmp_path, bisect, words, message):
    make_repository(tmp_path / "project", [SAME, OTHER])
    status, _, errors = bisect(*words)
    assert status == 2
    assert message in errors


def test_a_missing_repository_or_git_is_one_clear_error(tmp_path, bisect, monkeypatch):
    (tmp_path / "project").mkdir()
    status, _, errors = bisect("HEAD~1..HEAD")
    assert status == 2
    assert "is not in the working tree of a git repository" in errors
    assert "The git command `git rev-parse --show-toplevel` failed: fatal" in errors
    monkeypatch.setenv("PATH", str(tmp_path))
    errors = bisect("HEAD~1..HEAD")[2]
    assert "git cannot be started: No such file or directory. Install git." in errors


def test_linked_data_is_found_from_a_folder_below_the_top_and_the_commit_is_printed(
    tmp_path, monkeypatch, d9m
):
    read = "from pathlib import Path\nVALUES = [int(Path('../data/n').read_text()) * {}]"
    folder = tmp_path / "project"
    make_repository(folder, map(read.format, (1, 1, 5)), below="sub")
    (folder / "data").mkdir()
    (folder / "data/n").write_text("7")
    monkeypatch.chdir(folder / "sub")
    words = ["--link", "data", "-o", tmp_path / "output", "HEAD~2..HEAD"]
    status, text, _ = d9m("bisect", *words, "--", sys.executable, "train.py")
    assert status == 1
    assert "first commit that differs: " in text
    assert "Change 2 (Ann, " in text
    assert "* 5" in text
    assert "Rank 0, epoch 0" in text
    assert "trained: 4 times for 2 commits" in text
    assert (folder / "data/n").read_text() == "7"


RACING = "import os\nVALUES = [*os.urandom(3)]"


@pytest.mark.parametrize(
    ("contents", "status", "message"),
    [
        ([SAME, SAME], 2, r"The training of the bad commit \w+ is equal to the good one\. Give a"),
        ([BROKEN, SAME], 3, r"The good commit \w+ must train, and it does not: .* exit status 3"),
        ([SAME, BROKEN], 3, r"The bad commit \w+ must train, and it does not: .* exit status 3"),
        ([RACING, SAME], 2, r"the good commit \w+ differ, so no commit can be blamed\. .*locate"),
    ],
)
def test_what_cannot_be_bisected_is_an_error(tmp_path, bisect, contents, status, message):
    make_repository(tmp_path / "project", contents)
    found, _, errors = bisect("HEAD~1..HEAD")
    assert found == status
    assert re.search(message, " ".join(errors.split()))


def test_a_commit_without_the_working_folder_does_not_train(tmp_path, bisect):
    make_repository(tmp_path / "project", [SAME])
    (tmp_path / "project/sub").mkdir()
    git(tmp_path / "project", "mv", "train.py", "values.py", "sub")
    git(tmp_path / "project", "commit", "--quiet", "-m", "Move")
    status, _, errors = bisect("HEAD~1..HEAD", inside="project/sub")
    assert status == 3
    assert "must train, and it does not: The commit does not have the folder" in errors
    # An error leaves no worktree.
    assert len(git(tmp_path / "project", "worktree", "list").splitlines()) == 1


WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder, name, version, code=""):
    metadata = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{metadata}/WHEEL": WHEEL,
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{metadata}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in {**files, f"{metadata}/RECORD": record}.items():
            archive.writestr(file, text)


@pytest.fixture
def installer(request, tmp_path_factory, monkeypatch):
    """Choose uv, or pip as where uv is not installed."""
    program = None if getattr(request, "param", "uv") == "pip" else find_uv_bin()
    monkeypatch.setattr(bisection.shutil, "which", lambda _: program)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv")))


@pytest.fixture
def bisect_packages(tmp_path, monkeypatch, d9m, installer):
    """Return a function that searches between two lists; it gives (status, facts, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    # The trainings take lightning_d9m and what it imports from here.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "wheels").mkdir()

    def run(old, new, *words):
        for name, lines in (("old.txt", old), ("new.txt", new)):
            source = ["--no-index", f"--find-links {tmp_path / 'wheels'}", "# a comment"]
            (tmp_path / name).write_text("\n".join([*source, *lines, ""]))
        output = tmp_path / f"output-{len(list(tmp_path.iterdir()))}"
        lists = ("--packages", "old.txt", "new.txt")
        status, out, err = d9m(
            "bisect", "--json", "-o", output, *words, *lists, "--", "python", "train.py"
        )
        return status, json.loads(out or "{}"), err

    return run


def test_the_package_that_changes_bits_is_named(tmp_path, bisect_packages):
    wheels = tmp_path / "wheels"
    for name in ("alpha", "gamma"):
        for version in (1, 2):
            write_wheel(wheels, name, version)
    write_wheel(wheels, "added", 1)
    write_wheel(wheels, "values", 1, SAME)
    write_wheel(wheels, "values", 2, OTHER)
    write_wheel(wheels, "zeta", 1, SAME)
    old = ["alpha==1", "gamma==1", "values==1", "zeta==1"]
    status, facts, _ = bisect_packages(old, ["added==1", "alpha==2", "gamma==2", "Values==2"])
    assert status == 1
    assert [found["subject"] for found in facts["candidates"]] == ["values==1 -> Values==2"]
    assert facts["commits"] == 5
    assert facts["comparison"]["verdict"] == "different"
    # Twice the old list, once the new one, and at most three of the four between them.
    assert len(facts["trials"]) <= 6
    # The user's folder has only what the command wrote.
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert names == {"left", "new.txt", "old.txt", "output", "train.py", "wheels"}
    status, _, errors = bisect_packages(["values==1"], ["values==4"])
    assert status == 3
    assert "The bad package list new.txt must train, and it does not: The packages cannot" in errors


def test_wrong_lists_and_words_are_one_clear_error(tmp_path, bisect_packages, d9m):
    for old, words, message in (
        ("values==1", (), "hold the same packages, so none of them"),
        ("values>=1", (), "old.txt holds 'values>=1', not a package with its version"),
        ("values==2", ("--link", "data"), "Commits, --link and --golden are given with --packages"),
    ):
        status, _, errors = bisect_packages([old], ["values==1"], *words)
        assert status == 2
        assert message in errors
    status, _, errors = d9m("bisect", "--packages", "none", "new.txt", "--", "python", "a.py")
    assert status == 2
    assert "The list of packages none cannot be read: [Errno 2] No such file" in errors


def test_a_list_is_read_as_pip_reads_it(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(
        "# made by pip\n--index-url https://host/simple\nTorch_Vision==0.1 \\\n"
        "    --hash=sha256:00\nfast[all]===2+cpu  # why\nlocal @ file:///a/b.whl\n-e ./here\n\n"
    )
    found, sources = read_packages(path)
    assert found == {
        "torch-vision": "Torch_Vision==0.1      --hash=sha256:00",
        "fast": "fast[all]===2+cpu",
        "local": "local @ file:///a/b.whl",
        "-/here": "-e ./here",
    }
    assert sources == ["--index-url https://host/simple"]


@pytest.mark.parametrize("installer", ["uv", "pip"], indirect=True)
def test_what_a_list_does_not_hold_is_removed(tmp_path, installer):
    for name in ("alpha", "beta"):
        write_wheel(tmp_path, name, 1)
    lists = [["alpha==1", "beta==1"], ["beta==1"]]
    found = []
    for lines in lists:
        source = ["--no-index", f"--find-links {tmp_path}"]
        (tmp_path / "list.txt").write_text("\n".join([*source, *lines, ""]))
        install_packages(tmp_path / "environment", tmp_path / "list.txt")
        code = "from importlib import metadata as m; print(*(d.name for d in m.distributions()))"
        python = tmp_path / "environment/bin/python"
        printed = subprocess.check_output([python, "-I", "-c", code], text=True)
        found.append(sorted(printed.split()))
    assert found == [["alpha", "beta"], ["beta"]]
