"""The number of intra-op CPU threads, which changes results.

torch splits a sum over many elements into one part per thread, and each split rounds differently.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_d9m.errors import SettingError

# With it OpenMP gives an operation fewer threads while the machine is busy, even if the number is
# pinned. OpenMP reads it when it starts, which is when torch is imported.
DYNAMIC = "OMP_DYNAMIC"
# The number that the user has set, which OpenMP also reads when it starts. Later the variable may
# hold another one: Lightning's launchers set it, if it is not set, by the number of processes.
_NUMBER_AT_START = os.environ.get("OMP_NUM_THREADS", "")


def read_threads() -> int | None:
    """Return the ``OMP_NUM_THREADS`` of the user, who sets it before torch is imported; or None.

    torchrun sets it for its processes.
    """
    text = _NUMBER_AT_START.partition(",")[0].strip()  # the rest is of nested parallel regions
    return int(text) if text.isdecimal() and int(text) else None


@contextmanager
def threads_pinned(number: int | None) -> Iterator[None]:
    """Compute with ``number`` intra-op threads, and restore the number that was set.

    With None nothing changes. The number of inter-op threads does not matter: they run independent
    operations side by side.

    Raises:
        SettingError: If OpenMP may vary the number.
    """
    if threads_vary():
        raise SettingError(
            f"The variable {DYNAMIC} is {os.environ[DYNAMIC]!r}, so OpenMP chooses the number of "
            "threads by the load of the machine, and results differ with it. Start the program "
            f"without it, or with {DYNAMIC}=false."
        )
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


def verify_threads(number: int | None) -> None:
    """Raise if the number has changed since it was pinned.

    Raises:
        SettingError: With both numbers.
    """
    actual = torch.get_num_threads()
    if number not in (None, actual):
        raise SettingError(
            f"{actual} CPU threads are in use, and {number} were pinned: something changed the "
            "number during the run, and results differ with it. Look for torch.set_num_threads in "
            "the program, and remove it."
        )


def threads_vary() -> bool:
    """Return whether OpenMP may choose the number of threads for every operation."""
    return os.environ.get(DYNAMIC, "").strip().lower() in ("true", "1")
