"""The search for ledgers under a folder."""

import pytest

from lightning_d9m.engine.ledger.folder import find_last_pair, search_ledgers
from lightning_d9m.errors import LedgerError


@pytest.fixture
def write(tmp_path, runs):
    def write(folder, day, **header):
        runs.parent = tmp_path / folder
        return runs.write(1, created=f"2026-01-{day:02d}T00:00:00+00:00", **header)

    return write


def test_all_are_found_in_order_of_time(tmp_path, write):
    late, early = write("a/b/c", 9), write("d", 3)
    write(".hidden", 5)
    (tmp_path / "d" / "fit-x").mkdir()
    assert [entry.path for entry in search_ledgers(tmp_path)] == [early, late]
    assert [entry.path for entry in search_ledgers(early)] == [early]


def test_what_cannot_be_read_is_named(tmp_path, write):
    (write("a", 1) / "rank-0.jsonl").write_text("?")
    (found,) = search_ledgers(tmp_path)
    assert found.ledger is None
    assert "is not a ledger" in found.problem
    with pytest.raises(LedgerError, match="none is not a folder, so no"):
        search_ledgers(tmp_path / "none")


def test_the_last_pair_has_the_same_ordinal(tmp_path, write):
    """A run of two fits is compared with the run before, not fit with fit."""
    first, _, last, _ = (write("a", day, fit=day % 2) for day in (1, 2, 3, 4))
    other = write("a", 5, fit=1)
    assert find_last_pair(tmp_path) == (last, other) == (first.with_name("fit-002"), other)


def test_evaluations_are_no_pair(tmp_path, write):
    first = write("a", 1)
    with pytest.raises(LedgerError, match=r"Two ledgers of fits under .* there is only"):
        find_last_pair(tmp_path)
    last = write("b", 2)
    write("c", 3).rename(tmp_path / "c" / "test-000")
    assert find_last_pair(tmp_path) == (first, last)


def test_the_last_of_a_folder_has_the_highest_number(tmp_path, write):
    """The clock of the machine may have gone back between two runs."""
    one, other, last = (write("a", day) for day in (5, 6, 2))
    earlier = write("b", 4)
    assert [entry.path for entry in search_ledgers(tmp_path)] == [earlier, one, other, last]
    assert find_last_pair(tmp_path) == (other, last)


def test_a_link_to_a_ledger_is_not_another_one(tmp_path, write):
    first, last = write("runs", 1), write("runs", 2)
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "fit-000").symlink_to(last)
    assert find_last_pair(tmp_path) == (first, last)
    assert [entry.path for entry in search_ledgers(tmp_path)] == [first, last]
    with pytest.raises(LedgerError, match=r"Two ledgers of fits .* only .*best/fit-000"):
        find_last_pair(tmp_path / "best")
