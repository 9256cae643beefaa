"""Opening files that may be ledgers."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from lightning_d9m.errors import LedgerError, file_errors


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; refuse a pipe or a device, which might never end."""
    with file_errors(LedgerError, f"{path} cannot be read"):
        # Without O_NONBLOCK, opening a named pipe waits for its writer.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise LedgerError(
            f"{path} is not a ledger: it is not a regular file. Name a folder fit-NNN or a file "
            "rank-N.jsonl."
        )
    return os.fdopen(number, "rb", buffering=2**20)
