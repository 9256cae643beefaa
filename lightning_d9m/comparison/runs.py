"""Compare two runs, named by their ledgers or by the ledgers' paths."""

import os

from lightning_d9m.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.ledger.folder import Ledger, read_ledger


def compare(
    expected: "Ledger | str | os.PathLike[str]", actual: "Ledger | str | os.PathLike[str]"
) -> Comparison:
    """Compare the ledgers of two runs, as ``d9m compare`` does.

    Args:
        expected: The earlier run: a ledger, or the path of one; see ``read_ledger``.
        actual: The later run, likewise.

    Returns:
        The comparison. ``verdict`` is ``"equal"`` only if every record of both runs agrees;
        ``divergences`` holds the first difference of each rank that has one, the earliest first.

    Raises:
        LedgerError: If a ledger cannot be read, or a record is malformed or was edited.
    """
    one, other = (
        run if isinstance(run, Ledger) else read_ledger(run) for run in (expected, actual)
    )
    return compare_ledgers(one, other)
