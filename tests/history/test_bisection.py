"""``d9m bisect`` on real git repositories, made in a temporary folder."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from bisected_training import BROKEN, OTHER, SAME, TRAIN
from ledger_runs import make_facts, make_weights, write_rank

from lightning_d9m.errors import CommandError
from lightning_d9m.hashing.digest import digest
from lightning_d9m.hashing.training_state import sketch_tensors
from lightning_d9m.history.bisection import Bisection
from lightning_d9m.history.repository import Commit
from lightning_d9m.launch.run import Run
from lightning_d9m.ledger.folder import create_ledger_folder, read_ledger
from lightning_d9m.output.bisection_text import format_bisection


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


def make_repository(folder, contents):
    """Commit each content of ``values.py``; return the names of the commits."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "train.py").write_text(TRAIN)
    names = []
    for number, content in enumerate(contents):
        (folder / "values.py").write_text(f"{content}\n# {number}\n")
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
    assert facts["candidates"][0]["subject"] == "Change 13"
    assert facts["candidates"][0]["author"] == "Ann"
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


def test_a_folder_without_a_repository_is_one_clear_error(tmp_path, bisect):
    (tmp_path / "project").mkdir()
    status, _, errors = bisect("HEAD~1..HEAD")
    assert status == 2
    assert "is not in the working tree of a git repository" in errors
    assert "The git command `git rev-parse --show-toplevel` failed: fatal" in errors


def test_a_missing_git_is_named(tmp_path, bisect, monkeypatch):
    make_repository(tmp_path / "project", [SAME, OTHER])
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, errors = bisect("HEAD~1..HEAD")
    assert status == 2
    assert "git cannot be started: No such file or directory. Install git." in errors


def test_linked_data_is_found_from_a_folder_below_the_top_and_the_commit_is_printed(
    tmp_path, monkeypatch, d9m
):
    read = "from pathlib import Path\nVALUES = [int(Path('../data/n').read_text()) * {}]"
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("data\n")
    for number in (1, 1, 5):
        (folder / "sub").mkdir(exist_ok=True)
        (folder / "sub/train.py").write_text(TRAIN)
        (folder / "sub/values.py").write_text(read.format(number) + f"\n# {os.urandom(4).hex()}\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", f"Change {number}")
    (folder / "data").mkdir()
    (folder / "data/n").write_text("7")
    monkeypatch.chdir(folder / "sub")
    words = ["--link", "data", "-o", tmp_path / "output", "HEAD~2..HEAD"]
    status, text, _ = d9m("bisect", *words, "--", sys.executable, "train.py")
    assert status == 1
    assert "first commit that differs: " in text
    assert "Change 5 (Ann, " in text
    assert "* 5" in text
    assert "Rank 0, epoch 0" in text
    assert "trained: 4 times for 2 commits" in text
    assert (folder / "data/n").read_text() == "7"


class OneCommit:
    """A repository whose last commit is in question, and the trainings of its two commits."""

    noun = side = "commit"
    equal_advice = "Look."
    show = staticmethod(lambda _: "")

    def __init__(self, folder, *weights):
        self.output, self.fits, self.left = folder, {}, list(weights)

    def find_commit(self, sha):
        return Commit(sha, "Change", "Ann", "2026-01-01")

    def list_commits(self, last, *words):
        return [last.sha]

    @contextmanager
    def open_checkout(self, links):
        yield lambda _: (Path(), {})

    def run(self, name, *_, **__):
        weights = self.left.pop(0)
        if weights is None:
            return Run({}, failure=CommandError("It failed."))
        tensors = {"w": torch.tensor(weights)}
        digests = {"w": digest(tensors["w"])}
        record = make_weights("epoch", 0, digests, step=1, sketches=sketch_tensors(tensors))
        folder = create_ledger_folder(self.output / name)
        found = {"fit-000": read_ledger(write_rank(folder, [make_facts(), record]))}
        self.fits = self.fits or found
        return Run(found)

    def search(self):
        found = Bisection(self, self)
        found.search(*map(self.find_commit, ("good", "bad")))
        return found


ONE, OTHER_WEIGHTS = [1.0, 1.0], [1.0, 2.0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((ONE, ONE, ONE), "The training of the bad commit bad is equal to the good one. Give a"),
        ((None,), "The good commit good must train, and it does not: It failed."),
        ((ONE, ONE, None), "The bad commit bad must train, and it does not: It failed."),
        ((ONE, OTHER_WEIGHTS), "the good commit good differ, so no commit can be blamed. .*locate"),
    ],
)
def test_what_cannot_be_bisected_is_an_error(tmp_path, weights, message):
    with pytest.raises(CommandError, match=message):
        OneCommit(tmp_path, *weights).search()


@pytest.mark.parametrize(
    ("change", "said"),
    [(3e-7, "as little as rounding does."), (1e-3, "more than rounding does in a step.")],
)
def test_the_size_of_the_difference_is_judged(tmp_path, change, said):
    found = OneCommit(tmp_path, ONE, ONE, [1.0, 1.0 + change]).search()
    assert said in " ".join(format_bisection(found))
    distance = ((torch.tensor(1 + change) - 1) / 2**0.5).item()
    assert found.guilty.distance == pytest.approx(distance, rel=0.05)


def test_a_commit_without_the_working_folder_does_not_train(tmp_path, bisect):
    make_repository(tmp_path / "project", [SAME])
    folder = tmp_path / "project/sub"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "values.py").write_text(OTHER)
    git(tmp_path / "project", "add", ".")
    git(tmp_path / "project", "commit", "--quiet", "-m", "Move")
    status, _, errors = bisect("HEAD~1..HEAD", inside="project/sub")
    assert status == 2
    assert "must train, and it does not: The commit does not have the folder" in errors
    # An error leaves no worktree.
    assert len(git(tmp_path / "project", "worktree", "list").splitlines()) == 1
