"""Ledgers of parallel fits find their counterparts by content, not by number."""

import pytest

from lightning_d9m.launch.run import pair_fits
from lightning_d9m.ledger.folder import list_fits, read_ledger


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
    "by seed where they begin differently": (
        [(1, 0, 7), (2, 0, 8)],
        [(2, 0, 9), (1, 0, 6)],
        {"fit-000": "fit-001", "fit-001": "fit-000"},
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
