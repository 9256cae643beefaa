"""glibc's malloc, which returns the memory of gradients to the system by default."""

import ctypes
import os

# The settings of mallopt, their values, and the user's variables.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 2**28
_MMAP_BYTES = 2**25  # the largest value that glibc accepts
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def disable_malloc_trim() -> bool:
    """Let glibc keep up to 256 MiB of freed memory for later allocations.

    Neither the results nor the peak of memory depend on this. The thresholds stay for the rest of
    the process, because glibc cannot return to its dynamic ones.

    Returns:
        Whether the thresholds were set: not if the user has set one by a variable, nor with another
        C library.
    """
    # A backward pass allocates each gradient and frees it once it is packed. By default glibc
    # returns such memory to the system and requests it again in each step, and the system clears
    # every page. With the parameters of a ResNet-50 and two ranks on two cores (torch 2.13, glibc
    # 2.36, `benchmarks/ranks/horovod_fusion.py --modes static static-trimming`, two rounds) a step
    # then has 29,000 page faults instead of at most 130, and takes 16 % and 38 % more CPU time.
    if any(name in os.environ for name in _MALLOC_VARIABLES) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    # Other C libraries, such as musl, have no such function.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either call ends the dynamic thresholds, so the limit for mmap must be set as well: a gradient
    # above it would be mapped and unmapped in each step.
    trim = mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    return bool(trim and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
