"""The seed of Python's string hashes, which cannot change once Python runs."""

import os
import sys


def describe_hash_seed_problem() -> str | None:
    """Return a sentence if the order of sets of strings changes from run to run, else None.

    Python reads ``PYTHONHASHSEED`` only when it starts, so the value at the start counts.
    """
    if not sys.flags.hash_randomization:
        return None  # PYTHONHASHSEED=0
    # Python accepts a number, "random" or nothing. `sys.flags` reports randomization even with a
    # number. With -E or -I Python does not read the variable.
    if _startup_hash_seed().isdigit() and not sys.flags.ignore_environment:
        return None
    return (
        "PYTHONHASHSEED was not fixed when Python started, so sets of strings may be iterated in "
        "a different order in each run. Start the program with PYTHONHASHSEED=0 (and without "
        "Python's -E and -I, which ignore it); `d9m repeat` does."
    )


def _startup_hash_seed() -> str:
    """Return the variable's value at the start of this process, as far as the system knows it."""
    try:
        with open("/proc/self/environ", "rb") as stream:  # noqa: PTH123 - procfs
            entries = stream.read().split(b"\0")
    except OSError:
        return os.environ.get("PYTHONHASHSEED", "")
    for entry in entries:
        if entry.startswith(b"PYTHONHASHSEED="):
            return entry.partition(b"=")[2].decode(errors="replace")
    return ""
