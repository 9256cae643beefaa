"""The number of intra-op CPU threads: results differ between numbers of threads.

A sum over many elements is cut into one part for each thread, and each cut is another rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads_pinned(number: int | None) -> Iterator[None]:
    """Compute with ``number`` intra-op threads, and restore the number that was set.

    None changes nothing. The number of inter-op threads runs independent operations side by side
    and changes no result.
    """
    if number is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
