"""Whether the C library gives freed memory back to the system."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_TRIM_BYTES = 2**28
_MMAP_BYTES = 2**25  # the largest value that glibc takes
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def disable_malloc_trim() -> bool:
    """Let glibc keep up to 256 MiB of freed memory for what is allocated next.

    A backward pass allocates each gradient and frees it when it is packed. By default glibc hands
    such memory back and takes it anew, many times in a step, and the system has to clear each page
    again: a tenth of the time and more, with large parameters. No bit and no peak depends on it.

    Returns:
        Whether it was set: not where the user has chosen by a variable, nor with another C library.
    """
    if any(name in os.environ for name in _VARIABLES) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    return bool(kept)
