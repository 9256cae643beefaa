"""The table of ``d9m repeat`` fits a terminal and cuts no loss."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_runs import make_weights, write_rank

from lightning_d9m.engine.ledger.folder import create_ledger_folder, read_ledger
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.tools.launch.runs import RunResult
from lightning_d9m.tools.output.columns import format_table
from lightning_d9m.tools.output.repeat_text import (
    RepeatReport,
    describe_power,
    list_run_columns,
    make_run_row,
)

DIGEST = "0123456789abcdef0123456789abcdef"
ROW = {"run": 1, "fit": 1, "seed": 0, "weights": DIGEST, "verdict": "equal", "processes": None}


def show(rows, *, verbose=False):
    return format_table(list_run_columns(rows, verbose=verbose), rows)


@given(st.floats(width=32, allow_nan=True), st.integers(0, 2**32 - 1), st.integers(1, 2))
def test_fits_80_columns_and_shows_the_exact_loss(loss, seed, fits):
    row = ROW | {"seed": seed, "loss": loss, "loss_hex": loss.hex()}
    rows = [row | {"run": run, "fit": fit} for run in (1, 2) for fit in range(fits)]
    table = show(rows)
    assert repr(loss) in table
    assert str(seed) in table
    assert DIGEST[:16] in table
    assert max(map(len, table.splitlines())) <= 80
    verbose = show(rows, verbose=True)
    assert loss.hex() in verbose
    assert DIGEST in verbose


def test_a_loss_that_json_lacks_is_there_in_bits(tmp_path):
    weights = make_weights("final", 0, {"w": DIGEST}, loss=math.nan.hex(), totals={})
    path = write_rank(create_ledger_folder(tmp_path), [weights])
    row = make_run_row(1, 1, read_ledger(path), "reference", label="straight")
    assert (row["loss"], row["loss_hex"], row["label"]) == (None, "nan", "straight")
    assert " nan " in show([row])
    row = ROW | {"weights": "", "loss_hex": None, "verdict": "differs"}
    assert show([row]).splitlines()[1].split() == ["1", "0", "none", "none", "differs"]


def test_saved_files_are_not_numbered_as_a_fit(tmp_path):
    weights = make_weights("final", 0, {"w": DIGEST}, totals={"weights": DIGEST})
    kinds = ("fit", "saved", "fit", "final")
    folders = [create_ledger_folder(tmp_path, kind) for kind in kinds]
    fits = {own.name: read_ledger(write_rank(own, [weights])) for own in folders}
    report = RepeatReport({1: RunResult(fits), 2: RunResult(fits)}, tmp_path, ["true"])
    assert [row["fit"] for row in report.rows[:4]] == [1, "saved", 2, "final"]


def test_saved_values_without_a_digest_are_named(tmp_path, capsys):
    groups = {"saved": {"w": DIGEST}, "unread": {"ema": DIGEST}}
    saved = Digests(
        moment="saved w.pt", epoch=0, step=0, totals=dict.fromkeys(groups, DIGEST), groups=groups
    )
    folder = create_ledger_folder(tmp_path, "saved")
    run = RunResult({folder.name: read_ledger(write_rank(folder, [saved]))})
    RepeatReport({1: run, 2: run}, tmp_path, ["true"]).print_out("text")
    assert "note: saved without a digest, so not compared: w.pt: ema." in capsys.readouterr().out


@pytest.mark.parametrize("runs", range(2, 40))
def test_the_stated_rate_would_have_shown_with_95_percent(runs):
    """Runs with the rarer result may agree with each other."""
    said = re.match(r"A difference in more than (\d+)%", describe_power(runs, "-n"))
    assert bool(said) == (runs > 5)
    rate = int(said[1]) if said else 50
    assert (rate**runs + (100 - rate) ** runs <= 5 * 100**runs // 100) == bool(said)


@pytest.mark.parametrize("end", ["finished", ""])
def test_ledgers_that_nothing_ended_are_incomplete(tmp_path, end):
    weights = make_weights("epoch", 0, {"w": DIGEST}, totals={"weights": DIGEST})
    folder = create_ledger_folder(tmp_path)
    fits = {folder.name: read_ledger(write_rank(folder, [weights], end=end))}
    report = RepeatReport({1: RunResult(fits), 2: RunResult(fits)}, tmp_path, ["true"])
    told = report.state_verdict()
    if end:
        assert told == "equal: the fits of 2 runs agree bit for bit in 2 records each."
    else:
        assert told.startswith(
            "incomplete: the fits of 2 runs agree bit for bit in 1 record each, as"
        )
        assert "ended before it finished its ledger, as by a signal or os._exit. Let the" in told
