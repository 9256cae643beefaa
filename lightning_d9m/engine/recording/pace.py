"""The pace of two runs of one command that train at once.

The one that is ahead waits after a step of the first fit of its process, so that neither trains
long past a difference there.

Nothing here imports torch.
"""

import time
from pathlib import Path

# A run may be ahead by a twentieth and so many bytes, which are some steps of a small model: as
# many waits as steps would take long.
_AHEAD, _AHEAD_BYTES = 1.05, 2**14
# The other run may have ended, or wait for a lock that this one holds.
_STALLED_SECONDS = 30.0
# Other ranks wait for rank 0 in a collective meanwhile, and NCCL's ends after 10 minutes.
_MOST_SECONDS = 180.0
# A look takes about 0.1 ms, and training steps may be as short.
_LOOK_SECONDS, _POLL_SECONDS = 0.25, 0.02


class Pace:
    """Lets a run wait for one that is behind.

    Args:
        own: The folder of the run's ledgers.
        other: That of the other run.
    """

    def __init__(self, own: Path, other: Path) -> None:
        self._own, self._other = own, other
        self._next = 0.0  # when it looks again
        self._stalled = -1  # the size of the other run's ledgers when it wrote nothing for long

    def keep(self) -> None:
        """Wait until the other run has come as far, or writes nothing for some time."""
        now = since = begun = time.monotonic()
        if now < self._next:
            return
        size = size_ledgers(self._other)
        # One without a ledger may start when this one has ended, or have failed.
        while size not in (0, self._stalled) and self._is_ahead(size):
            if now - begun > _MOST_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
            before, size, now = size, size_ledgers(self._other), time.monotonic()
            since = since if size == before else now
            if now - since > _STALLED_SECONDS:
                self._stalled = size
        self._next = now + _LOOK_SECONDS

    def _is_ahead(self, size: int) -> bool:
        return size_ledgers(self._own) > _AHEAD * size + _AHEAD_BYTES


def size_ledgers(folder: Path) -> int:
    """Return the bytes of the ledgers in a folder.

    Those of equal runs are about equal, so they tell how far a run is without a look into records.
    """
    return sum(path.stat().st_size for path in folder.glob("fit-*/rank-0.jsonl"))
