"""The connections of a Gloo group, closed by a process that other processes may wait for."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

_TAG = 2**31 - 1  # of a message that nobody sends
_SOON = timedelta(milliseconds=1)


def close_connections(group: Any) -> None:
    """Close the connections of a Gloo group, so that all that waits for this process fails.

    A pending collective of this process fails too, on its threads. Afterwards Gloo uses the memory
    of no message, and an operation of the group is an error at once.

    Gloo has no call for that. The destructor of a group waits for pending collectives, and runs
    only when nothing refers to the group. But a receive that takes too long closes all connections,
    because the memory for its message may not exist any longer.
    """
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, _TAG).wait(_SOON)
