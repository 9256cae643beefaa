"""Checkpoints that a run keeps by itself, for commands that return to a step of it.

A later one replaces an earlier one, so that their space is bounded. Of those for a search, the last
three are kept, because a difference is noticed some time after its step.
"""

import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_d9m.engine.ranks.ranks import Ranks

# `d9m locate` compares the digests of states, which may be taken long after the step that differs.
_KEPT = 3
# The share of the time that saving may take. It counts twice: the state after the steps that follow
# a save is digested, too.
_SHARE = 0.02
# A search that begins at step 0 takes no longer. Before, steps are not as long as later ones, as
# memory is allocated and kernels are chosen.
_SECONDS_BEFORE = 0.5


class CheckpointRing:
    """Saves a training from time to time, on all ranks at the same step.

    Args:
        folder: The folder of the checkpoints.
        ranks: The ranks of the training; rank 0 decides.
        read_clock: Returns seconds in which this thread works. Real time would count those in which
            it waits for another run, see ``pace.py``.
    """

    def __init__(
        self, folder: Path, ranks: Ranks, read_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._saved = _SavedFiles(folder, ranks, _KEPT)
        self._ranks = ranks
        self._read_clock = read_clock
        self._first: tuple[int, float] | None = None  # step, and when it was reached
        self._next = 0

    def reach(self, step: int, save: Callable[[Path], object]) -> None:
        """Save after a step, if it is time; every rank calls this after each step.

        Ranks communicate only at a step at which the last call has let them.
        """
        # The clock of each rank differs, so rank 0 decides, and ranks would communicate after each
        # step if they did not agree on the next step at which they look.
        now = self._read_clock()
        if self._first is None:
            self._first, self._next = (step, now), step + 1
        if step < self._next:
            return
        first, start = self._first
        seconds = (now - start) / max(1, step - first)  # of a step
        pause = step - first  # looks at the clock become rare, and communicate as rarely
        if self._ranks.gather_json(now - start >= _SECONDS_BEFORE)[0]:
            try:
                save(self._saved.add(f"step-{step}"))
            except Exception:
                # The program may hold what cannot be saved, and need not save itself.
                if not self._ranks.is_alone:  # the other ranks may wait for this one
                    raise
                self._next = sys.maxsize
                return
            spent = 2 * (self._read_clock() - now)
            pause = math.ceil(spent / _SHARE / max(seconds, 1e-9))
        self._next = step + max(1, self._ranks.gather_json(pause)[0])


class CheckpointPoints:
    """Chooses the points of a fit at which it saves, on all ranks the same: two of each kind."""

    # How long a fit lasts is not known before. So of each kind the points 1, 2, 4, 7, 12, 20, ...
    # are saved, and the last two are kept: the later one may be at the end of the fit.
    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder, self._ranks = folder, ranks
        self._counts = Counter[str]()
        self._next: dict[str, int] = {}
        self._saved: dict[str, _SavedFiles] = {}

    def reach(self, kind: str) -> Path | None:
        """Return where to save at a point of a kind; None if not at this one."""
        self._counts[kind] += 1
        number = self._counts[kind]
        if number < self._next.get(kind, 1):
            return None
        self._next[kind] = number * 8 // 5 + 1
        saved = self._saved.setdefault(kind, _SavedFiles(self._folder, self._ranks, 2))
        return saved.add(f"{kind}-{number}")


class _SavedFiles:
    """The last checkpoints of a folder."""

    def __init__(self, folder: Path, ranks: Ranks, most: int) -> None:
        self._folder, self._ranks, self._most = folder, ranks, most
        self._kept: list[Path] = []

    def add(self, name: str) -> Path:
        """Return the path of the next one; remove those that are too many with it."""
        # Only rank 0 removes: on a file system that ranks share, two would remove the same file.
        self._folder.mkdir(parents=True, exist_ok=True)
        olds = self._kept[: 1 - self._most] if self._ranks.rank == 0 else ()
        # A loop's ranks save a file each, whose name begins with that of rank 0.
        for old in (file for path in olds for file in self._folder.glob(f"{path.name}*")):
            with suppress(FileNotFoundError):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        self._kept = [*self._kept[1 - self._most :], self._folder / f"{name}.ckpt"]
        return self._kept[-1]
