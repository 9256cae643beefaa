"""A ledger's folder, which one rank creates and all ranks write to."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_d9m.errors import LedgerError
from lightning_d9m.ranks.ranks import Ranks


def share_new_folder(ranks: Ranks, create: Callable[[], Path] | None, advice: str = "") -> Path:
    """Create a folder on rank 0, and return its path on all ranks.

    ``create`` is None on a rank that does not create it. The advice, for the error's message,
    says what to do if it cannot be created.

    Raises:
        LedgerError: On all ranks, if the folder cannot be created.
    """
    folder, problem = "", ""
    if create is not None:
        try:
            folder = str(create())
        except LedgerError as error:
            problem = f"{error} {advice}".rstrip()
    # As text: unpickling what another process sends runs its code.
    folder, problem = json.loads(ranks.broadcast_text(json.dumps([folder, problem])))
    if problem:
        raise LedgerError(problem)
    # Nodes need not share a file system: each keeps the ledgers of its own ranks. If this fails,
    # creating the file in it fails too, with a message that says why.
    with suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)
