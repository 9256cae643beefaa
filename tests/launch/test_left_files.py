"""Files that one run leaves and a later one uses are named, however they are written."""

import tempfile
from pathlib import Path

import pytest

from lightning_d9m.tools.launch import left_files
from lightning_d9m.tools.launch.left_files import FileWatch


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a working folder, with folders for the home and for temporary files beside it."""
    for name in ("work", "home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.mark.parametrize("command", [["python", "train.py"], ["python", "-c", "a = 0\n" * 2000]])
def test_files_that_two_runs_write_are_named(folder, command):
    watch = FileWatch(command, folder / "runs")
    for run in ("1", "2"):
        Path("new").write_text(run)
        Path("new").replace("state")
        Path("notes").write_text(run)
        watch.note_run()
    said = watch.describe(first_alone=False)
    assert said == "Files written in one run and read or written in a later one: notes, state."


def test_files_that_each_run_names_otherwise_are_named(folder):
    """Unless only the numbers differ, as in a logger's folders; or a run has none."""
    watch = FileWatch(["python", "train.py"], folder / "runs")
    words = ("one", "two", "three")
    for number, word in enumerate(words):
        Path(f"log-{number}").write_text("kept")
        Path(f"average-{word}.pkl").write_text("kept")
        watch.note_run()
        if number:
            said = watch.describe_written(lambda name: False)
            kept = ", ".join(sorted(f"average-{own}.pkl" for own in words[: number + 1]))
            assert said == (
                f"all runs wrote files that no ledger covers: {kept} (under another name in each "
                "run, not compared)."
            )
    assert not watch.describe_written(lambda name: name.startswith("average"))
    watch.note_run()
    assert not watch.describe_written(lambda name: False)


def test_files_of_one_run_count_if_it_is_alone(folder):
    (folder / "work" / "data").write_text("kept")
    watch = FileWatch(["python", "train.py"], folder / "work" / "runs")
    for number in (1, 2):
        for name in (f"work/log-{number}/metrics", "work/runs/own", "work/.git/index"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(str(number))
        if number == 1:
            (folder / "home" / ".state").write_text("1")
            (folder / "work" / "cache").write_text("1")
        watch.note_run()
    assert watch.describe(first_alone=False) == ""
    said = watch.describe(first_alone=True)
    home = folder / "home" / ".state"
    assert said == f"Files written in run 1: cache, {home}, log-1/metrics."


def test_a_file_that_a_later_run_reads_is_named(folder, monkeypatch):
    seen = iter([{}, {"cache": (1, 5)}, {"cache": (1, 5)}, {"cache": (1, 6)}])
    monkeypatch.setattr(FileWatch, "_list_files", lambda _: next(seen))
    watch = FileWatch(["true"], folder)
    monkeypatch.setattr(watch, "_own", [Path("cache")])
    for expected in ("", "", "read or written in a later one: cache."):
        watch.note_run()
        assert watch.describe(first_alone=False).endswith(expected)


def test_files_that_all_runs_write_are_compared_by_their_bytes(folder, monkeypatch):
    monkeypatch.setattr(left_files, "_MOST_BYTES", 9)
    watch = FileWatch(["python", "train.py"], folder / "work" / "runs")
    for run in ("1", "2", "3"):
        for name, text in {"w.pkl": run, "w.npy": "w", "w.pt": run, "large": 9 * "w"}.items():
            Path(name).write_text(text)
        Path(f"log-{run}").write_text(run)
        (folder / "home" / "cache").write_text(run)
        watch.note_run()
    assert watch.describe_written(lambda name: name == "w.pt") == (
        "all runs wrote files that no ledger covers: w.pkl (different bytes); large (not "
        "compared); w.npy (equal bytes)."
    )
    assert watch.describe_written(lambda _: True) == ""
    watch.note_run()
    assert watch.describe_written(lambda _: False) == ""
    assert not watch._read
