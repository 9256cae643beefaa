"""The end of a Gloo process group, which torch leaves to chance.

Gloo's threads let go of a collective's tensors a moment after it is done. If the interpreter ends
in that moment (a script whose last act is an error that all ranks raise together), the thread asks
for an interpreter that is gone, and the process aborts ("terminate called without an active
exception", signal 6), whatever its exit status was to be. Lightning destroys NCCL's group at exit,
and leaves Gloo's.
"""

import atexit
from functools import cache
from threading import Thread

import torch.distributed

# A collective that waits for a rank that has died is not waited for: seconds.
_PATIENCE = 5.0


@cache
def close_group_at_exit() -> None:
    """Destroy this process's Gloo groups before the interpreter ends; asking again does nothing."""
    if torch.distributed.is_available():
        atexit.register(_close_group)


def _close_group() -> None:
    if torch.distributed.is_initialized() and "gloo" in torch.distributed.get_backend():
        closing = Thread(target=torch.distributed.destroy_process_group, daemon=True)
        closing.start()
        closing.join(_PATIENCE)
