"""Destruction of Gloo process groups before the interpreter exits.

Gloo's threads release the tensors of a collective shortly after it has completed. If the
interpreter exits before that (for example after an error that all ranks raise together), the thread
uses a finalized interpreter and the process aborts ("terminate called without an active exception",
signal 6), regardless of its exit status. Lightning destroys NCCL's group at exit, but not Gloo's.
"""

import atexit
from functools import cache
from threading import Thread

import torch.distributed

# Seconds to wait; a collective may wait for a rank that has died.
_TIMEOUT = 5.0


@cache
def close_group_at_exit() -> None:
    """Destroy this process's Gloo groups before the interpreter exits; later calls do nothing."""
    if torch.distributed.is_available():
        atexit.register(_close_group)


def _close_group() -> None:
    if torch.distributed.is_initialized() and "gloo" in torch.distributed.get_backend():
        closing = Thread(target=torch.distributed.destroy_process_group, daemon=True)
        closing.start()
        closing.join(_TIMEOUT)
