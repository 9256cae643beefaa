"""Ledgers of parallel fits find their counterparts by content, not by number."""

import pytest

from lightning_d9m.launch.run import pair_fits, read_fits


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
        return read_fits(runs.parent, ["true"])

    return write


def paired(one, other):
    """Return the names of pairs: of a fit, and of its counterpart's folder."""
    found = pair_fits(one, other)
    return {name: found[name].path.name for name in one if name in found}


def test_fits_of_one_process_are_paired_by_number(write):
    one, other = write((1, 0, 7), (1, 1, 8)), write((1, 0, 8), (1, 1, 7))
    assert paired(one, other) == {"fit-000": "fit-000", "fit-001": "fit-001"}


def test_parallel_fits_are_paired_by_seed(write):
    one, other = write((1, 0, 7), (2, 0, 7)), write((2, 0, 7), (1, 0, 7))
    assert paired(one, other) == {"fit-000": "fit-001", "fit-001": "fit-000"}


def test_fits_that_begin_alike_are_paired_by_their_ends(write):
    one = write((1, 0, 5), (1, 0, 6), (1, 0, 7))
    other = write((1, 0, 7), (1, 0, 9), (1, 0, 5))
    assert paired(one, other) == {"fit-000": "fit-002", "fit-001": "fit-001", "fit-002": "fit-000"}


def test_unequal_beginnings_are_paired_by_seed(write):
    one, other = write((1, 0, 7), (2, 0, 8)), write((2, 0, 9), (1, 0, 6))
    assert paired(one, other) == {"fit-000": "fit-001", "fit-001": "fit-000"}


def test_a_fit_without_a_counterpart_gets_a_free_name(write):
    one, other = write((1, 0, 7)), write((2, 0, 7), (1, 0, 7))
    assert paired(one, other) == {"fit-000": "fit-001"}
    found = pair_fits(one, other)
    assert {name: ledger.path.name for name, ledger in found.items()} == {
        "fit-000": "fit-001",
        "fit-001": "fit-000",
    }


def test_an_absent_fit_shifts_no_other(write):
    one, other = write((1, 0, 7), (2, 0, 7), (3, 0, 7)), write((1, 0, 7), (3, 0, 7))
    assert paired(one, other) == {"fit-000": "fit-000", "fit-002": "fit-001"}
