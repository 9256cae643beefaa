"""Runs of the user's command: their folders, and which fits of two runs belong together."""

import sys
from pathlib import Path

import pytest
from ledger_program import PROGRAM

from lightning_d9m.engine.ledger.folder import list_fits, read_ledger
from lightning_d9m.errors import CommandError, LedgerError, SettingError
from lightning_d9m.tools.launch.runs import Runs, make_output, pair_fits


@pytest.fixture
def write(tmp_path, runs):
    """Return a function that writes one run from (seed, ordinal, value) of its fits."""
    count = iter(range(9))

    def write(*fits):
        runs.parent = tmp_path / str(next(count))
        for seed, ordinal, value in fits:

            def edit(_, records, value=value):
                for record in records[3:-1]:
                    record["totals"]["weights"] = f"{value:032x}"

            runs.write(1, edit=edit, seed=seed, fit=ordinal)
        return {path.name: read_ledger(path) for path in list_fits(runs.parent)}

    return write


# The fits of two runs, as (seed, ordinal, value), and which fit of the second has which name.
PAIRS = {
    "by number in one process": (
        [(1, 0, 7), (1, 1, 8)],
        [(1, 0, 8), (1, 1, 7)],
        {"fit-000": "fit-000", "fit-001": "fit-001"},
    ),
    "by seed in parallel ones": (
        [(1, 0, 7), (2, 0, 7)],
        [(2, 0, 7), (1, 0, 7)],
        {"fit-000": "fit-001", "fit-001": "fit-000"},
    ),
    "by the end where they begin alike": (
        [(1, 0, 5), (1, 0, 6), (1, 0, 7)],
        [(1, 0, 7), (1, 0, 9), (1, 0, 5)],
        {"fit-000": "fit-002", "fit-001": "fit-001", "fit-002": "fit-000"},
    ),
    "without a counterpart by a free name": (
        [(1, 0, 7)],
        [(2, 0, 7), (1, 0, 7)],
        {"fit-000": "fit-001", "fit-001": "fit-000"},
    ),
    "an absent fit shifts no other": (
        [(1, 0, 7), (2, 0, 7), (3, 0, 7)],
        [(1, 0, 7), (3, 0, 7)],
        {"fit-000": "fit-000", "fit-002": "fit-001"},
    ),
}


@pytest.mark.parametrize(("one", "other", "expected"), PAIRS.values(), ids=PAIRS)
def test_fits_are_paired(write, one, other, expected):
    found = pair_fits(write(*one), write(*other))
    assert {name: ledger.path.name for name, ledger in found.items()} == expected


def test_git_ignores_runs_in_the_folder_that_we_choose(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_output(tmp_path / "mine" / "runs")
    assert not list(tmp_path.rglob(".gitignore"))
    make_output(None)
    ignored = tmp_path / "d9m-runs" / ".gitignore"
    assert ignored.read_text() == "*\n"
    ignored.unlink()  # by a user who keeps runs in git
    make_output(None)
    assert not ignored.exists()


def test_a_wrong_variable_is_an_error_before_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_D9M_SEED", "abc")
    with pytest.raises(SettingError, match="LIGHTNING_D9M_SEED"):
        make_output(None)
    assert not list(tmp_path.iterdir())


def test_a_link_that_leads_nowhere_is_one_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d9m-runs").symlink_to("gone")
    with pytest.raises(LedgerError, match=r"The folder d9m-runs cannot be made"):
        make_output(None)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that runs a program, which begins with ``PROGRAM``."""
    monkeypatch.chdir(tmp_path)
    runs = Runs([sys.executable, "train.py"], make_output(tmp_path / "runs"), 60.0)

    def run(program, number=1, **options):
        Path("train.py").write_text(PROGRAM + program)
        return runs.run(f"run-{number:03d}", "a run", **options)

    return run


def test_a_fit_whose_header_a_killed_run_did_not_write_is_left_out(start):
    begun = Path("runs/run-001/fit-001/rank-0.jsonl")
    program = "train()\npath = rank_path(create_ledger_folder(ledgers), 0)\npath.write_text('{')\n"
    assert [*start(f"{program}time.sleep(60)", killed_when=begun.exists).fits] == ["fit-000"]
    with pytest.raises(LedgerError, match="fit-001"):
        start(program, 2)
    with pytest.raises(CommandError, match=r"\| broken"):
        start(f"{program}sys.exit('broken')", 3)


def test_the_failure_of_a_run_precedes_that_of_its_ledgers(start):
    start("train(), train()")  # they are paired by what they contain
    edits = "path = train()\npath.write_text(path.read_text().replace('weights', 'w'))\n"
    with pytest.raises(LedgerError):
        start(f"train()\n{edits}", 2)
    with pytest.raises(CommandError, match=r"\| broken"):
        start(f"train()\n{edits}sys.exit('broken')", 3)
