"""Whether a process has ended, without a wait for time to pass."""

import os
import select


def has_ended(pid, seconds=60):
    """Return whether a process ends in time; one that is not yet reaped has ended, too."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)
