"""``d9m bisect`` on real git repositories of a temporary folder."""

import json
import os
import re
import sys

import pytest
from ledger_program import PROGRAM
from rank_processes import has_ended
from scripts import execute

TRAIN = f"""{PROGRAM}
from values import VALUES

train(VALUES)
Path("left-behind").write_text("a file that git does not know")
"""
SAME, OTHER = "VALUES = [1, 2, 3]", "VALUES = [1, 9, 8]"  # of its module
BROKEN = "raise SystemExit(3)"
FAILING = "VALUES = (number if number < 2 else 1 // 0 for number in (1, 2))"


def git(folder, *words):
    roles = ("AUTHOR", "COMMITTER")
    who = {f"GIT_{role}_{part}": "Ann" for role in roles for part in ("NAME", "EMAIL")}
    return execute("git", "-C", folder, *words, **who).stdout


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
        contents[number] = BROKEN if number == 4 else FAILING
    names = make_repository(tmp_path / "project", contents)
    (tmp_path / "project/values.py").write_text("not committed")
    before = git(tmp_path / "project", "status", "--porcelain", "--branch")
    status, facts, _ = bisect(f"{names[0]}..{names[-1]}")
    assert status == 1
    assert [commit["sha"] for commit in facts["candidates"]] == [names[13]]
    first = facts["comparison"]["ranks"][0]["divergence"]
    assert (first["moment"], first["epoch"], first["name"]) == ("epoch", 1, "w")
    assert facts["commits"] == 19
    # Twice the good one, once the bad one, and a bisection of 18.
    assert len(facts["trials"]) <= 3 + 5 + 3
    # The user's folder is as it was, and no worktree is left.
    assert git(tmp_path / "project", "status", "--porcelain", "--branch") == before
    assert (tmp_path / "project/values.py").read_text() == "not committed"
    assert len(git(tmp_path / "project", "worktree", "list").splitlines()) == 1


def test_another_stack_does_not_end_a_training(tmp_path, bisect):
    """A commit may change packages, and its bits decide."""
    name = "LIGHTNING_D9M_ON_STACK_DIFFERENCE"
    seen = f'import os\nVALUES = [2 * (os.environ.get("{name}") == "ignore")]'
    make_repository(tmp_path / "project", ["VALUES = [0]", seen])
    assert bisect("HEAD~1..HEAD")[0] == 1


def test_commits_that_do_not_run_hide_the_guilty_one_and_are_all_named(tmp_path, bisect):
    names = make_repository(tmp_path / "project", [SAME, SAME, BROKEN, BROKEN, OTHER])
    status, facts, _ = bisect(f"{names[0]}..{names[-1]}")
    assert status == 1
    assert {commit["sha"] for commit in facts["candidates"]} == set(names[2:])
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
    assert re.search(r"^  git show \w{10}$", text, re.MULTILINE)
    assert "Rank 0, epoch 0" in text
    assert "trained: 4 times for 2 commits" in text
    assert (folder / "data/n").read_text() == "7"


def test_a_signal_leaves_what_the_trainings_have_shown(tmp_path, monkeypatch, d9m):
    ending = "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()"
    names = make_repository(tmp_path / "project", [SAME, ending, OTHER])
    monkeypatch.chdir(tmp_path / "project")
    status, out, _ = d9m("bisect", "HEAD~2..HEAD", "--", sys.executable, "train.py")
    assert status == 143
    assert out.startswith("incomplete: the search was ended before it found the commit.")
    good, bad = names[0][:10], names[2][:10]
    assert f"  {good} equal\n  {good} equal\n  {bad} different\n" in out
    assert "trained: 3 times for 2 commits" in out


def test_a_signal_ends_a_hook_of_git_and_leaves_no_worktree(tmp_path, bisect):
    make_repository(tmp_path / "project", [SAME, OTHER])
    hook = tmp_path / "project/.git/hooks/post-checkout"
    pid = tmp_path / "pid"
    hook.write_text(f"#!/bin/sh\necho $$ > '{pid}'\nkill {os.getpid()}\nexec sleep 60\n")
    hook.chmod(0o755)
    assert bisect("HEAD~1..HEAD")[0] == 143
    assert has_ended(int(pid.read_text()), seconds=0)
    assert len(git(tmp_path / "project", "worktree", "list").splitlines()) == 1


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
