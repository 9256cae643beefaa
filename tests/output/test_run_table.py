"""The table of ``d9m repeat`` fits a terminal and cuts no loss."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.output.columns import format_markdown_table, format_table
from lightning_d9m.output.run_table import RunRow, list_columns

DIGEST = "0123456789abcdef0123456789abcdef"
LOSS = 0.038124501705169678


def show(rows, width=80, *, verbose=False):
    return format_table(list_columns(rows, verbose=verbose), rows, width)


def rows(*losses, seed=42, fits=1):
    """Return one row for each loss and fit."""
    return [
        RunRow(run=i + 1, fit=fit + 1, seed=seed, weights=DIGEST, loss=loss, verdict="equal")
        for i, loss in enumerate(losses)
        for fit in range(fits)
    ]


@given(
    st.floats(width=32, allow_nan=True).map(float.hex), st.integers(0, 2**32 - 1), st.integers(1, 2)
)
def test_fits_80_columns_and_shows_the_exact_loss(loss, seed, fits):
    table = show(rows(loss, loss, seed=seed, fits=fits))
    value = float.fromhex(loss)
    assert repr(value) in table
    assert str(seed) in table
    assert DIGEST[:16] in table
    assert max(map(len, table.splitlines())) <= 80
    verbose = show(rows(loss, loss, seed=seed, fits=fits), verbose=True)
    assert value.hex() in verbose
    assert DIGEST in verbose


def test_digests_that_would_look_equal_are_shown_whole():
    first, other = rows(LOSS.hex(), LOSS.hex())
    other = replace(other, weights=DIGEST[:-1] + "0")
    columns = list_columns([first, other])
    for form in (format_table, format_markdown_table):
        table = form(columns, [first, other])
        assert DIGEST in table
        assert DIGEST[:-1] + "0" in table


def test_a_run_without_loss_or_weights_says_none():
    row = RunRow(run=1, fit=1, seed=0, weights="", loss=None, verdict="differs")
    assert show([row]).splitlines()[1].split() == ["1", "0", "none", "none", "differs"]


def test_several_fits_are_numbered():
    assert show(rows(LOSS.hex(), fits=2)).splitlines()[2].split()[0] == "1.2"


def test_json_holds_both_notations():
    as_json = rows(LOSS.hex())[0].as_json()
    assert as_json["loss"] == LOSS
    assert as_json["loss_hex"] == LOSS.hex()
    assert rows("nan")[0].as_json()["loss"] is None
    assert rows("nan")[0].as_json()["loss_hex"] == "nan"


def test_all_digests_are_cut_to_one_length_and_losses_never():
    long, short = (-1.25e-300).hex(), (1.0).hex()
    for width in (200, 80, 40):
        lines = show(rows(long, short), width).splitlines()[1:]
        assert [line.split()[2] for line in lines] == [DIGEST[:16]] * 2
        assert [line.split()[3] for line in lines] == ["-1.25e-300", "1.0"]
