"""The command of a program, and the commit of its source."""

import json
import shlex
import subprocess
import sys

import pytest

from lightning_d9m.engine.ledger import command

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
PRINT = "import json; from lightning_d9m.engine.ledger.command import capture_program as capture\n"
PRINT += "print(json.dumps(capture()))"


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["HERE/train.py", "--name", "a b"], ""),
        (["-m", "train"], ""),
        (["HERE/train.py"], "train.py"),
        (["HERE/new.py"], "new.py"),  # not tracked
    ],
)
def test_the_command_and_the_commit_of_a_program(tmp_path, words, changed):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.py").write_text(PRINT)
    for git in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*GIT, *git], cwd=folder, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()
    if changed:
        (folder / changed).write_text(f"{PRINT}\n\n")
    words = [word.replace("HERE", str(folder)) for word in words]
    where = folder if "-m" in words else tmp_path
    found = subprocess.check_output([sys.executable, *words], cwd=where, text=True)
    assert json.loads(found) == {
        "command": shlex.join(["python", *words]),
        "git.commit": commit,
        "git.dirty": bool(changed),
    }


@pytest.mark.parametrize("git", ["no repository", "bad one", "no commit", "no git", "slow git"])
def test_what_is_not_there_is_absent(tmp_path, monkeypatch, git):
    monkeypatch.chdir(tmp_path)
    command._read_git.cache_clear()
    if git == "no repository":
        monkeypatch.setattr(command, "_run_git", None)  # git is not asked
    else:
        (tmp_path / ".git").mkdir()
    if git == "no commit":
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    if git == "no git":
        monkeypatch.setattr(command, "_GIT", ("no-such-git",))
    if git == "slow git":
        monkeypatch.setattr(command, "_GIT", ("sh", "-c", "sleep 60"))
        monkeypatch.setattr(command, "_GIT_SECONDS", 0.01)
    assert list(command.capture_program()) == ["command"]
    command._read_git.cache_clear()
