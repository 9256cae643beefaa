"""The program of a run: its command and the commit of its source."""

import shlex
import subprocess
import sys

import pytest

from lightning_d9m.ledger import program

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
PRINT = "import json; from lightning_d9m.ledger.program import capture_program as capture\n"
PRINT += "print(json.dumps(capture()))"


@pytest.fixture
def repository(tmp_path):
    """Return a repository with one commit, and its commit."""
    (tmp_path / "train.py").write_text(PRINT)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*GIT, *words], cwd=tmp_path, check=True)
    words = ["git", "rev-parse", "HEAD"]
    return tmp_path, subprocess.check_output(words, cwd=tmp_path, text=True).strip()


def capture(*words, folder):
    """Return what a program in a process of its own captures."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return eval(done.stdout, {"true": True, "false": False})  # noqa: S307 - our own JSON


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["HERE/train.py", "--name", "a b"], ""),
        (["-m", "train"], ""),
        (["HERE/train.py"], "train.py"),
        (["HERE/new.py"], "new.py"),  # not tracked
    ],
)
def test_the_command_and_the_commit(repository, tmp_path_factory, words, changed):
    folder, commit = repository
    if changed:
        (folder / changed).write_text(f"{PRINT}\n\n")
    words = [word.replace("HERE", str(folder)) for word in words]
    elsewhere = folder if "-m" in words else tmp_path_factory.mktemp("elsewhere")
    assert capture(*words, folder=elsewhere) == {
        "command": shlex.join(["python", *words]),
        "git.commit": commit,
        "git.dirty": bool(changed),
    }


@pytest.mark.parametrize("git", ["no repository", "bad one", "no commit", "no git", "slow git"])
def test_what_is_not_there_is_absent(tmp_path, monkeypatch, git):
    monkeypatch.chdir(tmp_path)
    program._read_git.cache_clear()
    if git == "no repository":
        monkeypatch.setattr(program, "_run_git", None)  # git is not asked
    else:
        (tmp_path / ".git").mkdir()
    if git == "no commit":
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    if git == "no git":
        monkeypatch.setattr(program, "_GIT", ("no-such-git",))
    if git == "slow git":
        monkeypatch.setattr(program, "_GIT", ("sh", "-c", "sleep 60"))
        monkeypatch.setattr(program, "_SECONDS", 0.01)
    assert list(program.capture_program()) == ["command"]
    program._read_git.cache_clear()
