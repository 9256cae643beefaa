"""The status of ranks after a failed collective: killed, stopped, hung, or ended by an error."""

import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed

from lightning_d9m.errors import D9mError, RankLostError
from lightning_d9m.ranks.groups import close_default_group
from lightning_d9m.ranks.ranks import Ranks

# Words of the errors that Gloo and NCCL raise; torch has no type for them.
_FAILURE = re.compile(r"gloo|nccl|(closed|reset) by peer|pair closure|timed out", re.IGNORECASE)
_runs = count()  # separates the runs of a process in the store, and is equal on every rank
_POLL_SECONDS = 0.05
# What is known of a rank that reports nothing, by the state of its process.
_SILENT = {
    "ended": "was killed or exited.",
    "stopped": "is stopped.",
    "running": "runs, but did not respond within {:g} s: it hangs.",
    "unknown": "did not respond within {:g} s: it was killed, or it hangs.",
}


def identify_process() -> tuple[int, int]:
    """Return a hash of the host's name and the process ID, for `RankLiveness`."""
    return zlib.crc32(socket.gethostname().encode()), os.getpid()


class RankLiveness:
    """The status of every rank, in a store that still works after a collective has failed.

    Args:
        store: A ``torch.distributed.Store`` that all ranks share and that rank 0 or the launcher
            hosts.
        rank: This rank.
        processes: What `identify_process` returned on each rank, in rank order.
        prefix: Separates the keys of several runs in one store; the same on every rank.
        limit_seconds: A rank that reports no status for so long counts as lost.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        processes: Sequence[Sequence[int]],
        *,
        prefix: str = "",
        limit_seconds: float = 3.0,
    ) -> None:
        self._store = store
        self._rank = rank
        self._processes = processes
        self._prefix = f"d9m.liveness.{prefix}"
        self._limit = limit_seconds

    def report_error(self, error: BaseException) -> None:
        """Publish that this rank ends with an error of its own. Never raises."""
        self._run(lambda: self._publish(summarize_error(error)))

    def find_lost(self) -> dict[int, str]:
        """Describe the lost ranks, for a rank whose collective failed. Never raises.

        Waits at most the limit for the other ranks to fail, too.

        Returns:
            A sentence for each lost rank, in rank order; empty if every rank responds.
        """
        statuses: dict[int, str] = {}
        is_reachable = self._run(lambda: self._collect(statuses))
        lost = {}
        for rank in range(len(self._processes)):
            if rank == self._rank:
                continue
            if rank in statuses:
                if statuses[rank]:
                    lost[rank] = f"Rank {rank} ended with {statuses[rank]}."
                continue
            state = self._read_state(rank)
            # Without the store of rank 0, only the processes of this host are known.
            if is_reachable or rank == 0 or state in {"ended", "stopped"}:
                name = f"Rank {rank} (process {self._processes[rank][1]})"
                lost[rank] = f"{name} {_SILENT[state].format(self._limit)}"
        return lost

    def _run(self, function: Callable[[], None]) -> bool:
        """Call the store in a thread, as a store whose host is stopped blocks indefinitely."""
        succeeded = []

        def attempt() -> None:
            try:
                function()
            except (RuntimeError, OSError):  # the store's host has ended
                return
            succeeded.append(True)

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(self._limit + 1)
        return bool(succeeded)

    def _publish(self, status: str) -> None:
        self._store.set(f"{self._prefix}.{self._rank}", status)

    def _collect(self, statuses: dict[int, str]) -> None:
        """Add the status of each rank as it comes; an empty one is a failed collective."""
        self._publish("")
        until = time.monotonic() + self._limit
        missing = set(range(len(self._processes))) - {self._rank}
        while missing and time.monotonic() < until:
            for rank in sorted(missing):
                if self._store.check([f"{self._prefix}.{rank}"]):
                    statuses[rank] = self._store.get(f"{self._prefix}.{rank}").decode()
                    missing.discard(rank)
                elif self._read_state(rank) == "ended":
                    missing.discard(rank)
            time.sleep(_POLL_SECONDS if missing else 0)

    def _read_state(self, rank: int) -> str:
        """Return ``"ended"``, ``"stopped"``, ``"running"``, or ``"unknown"`` on another host."""
        host, process_id = self._processes[rank]
        if host != self._processes[self._rank][0]:
            return "unknown"
        try:
            # The state follows the name, which is in parentheses and may contain some.
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except ProcessLookupError:
            return "ended"
        except FileNotFoundError:
            return "ended" if Path("/proc/self/stat").exists() else "unknown"
        return {"Z": "ended", "X": "ended", "T": "stopped", "t": "stopped"}.get(state, "running")


def summarize_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def connect_liveness(ranks: Ranks) -> RankLiveness | None:
    """Connect the ranks by the store of torch's default group; every rank must call this.

    Returns:
        None without a process group of torch's.
    """
    distributed = torch.distributed
    if ranks.is_alone or not distributed.is_available() or not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
    processes = ranks.gather_json(identify_process())
    return RankLiveness(store, ranks.rank, processes, prefix=str(next(_runs)))


def add_lost_ranks(error: BaseException, liveness: RankLiveness | None) -> None:
    """Append the lost ranks to the error of a failed collective; publish any other error."""
    if liveness is None or isinstance(error, RankLostError):
        return
    if not _is_failure(error):
        liveness.report_error(error)
        return
    if lost := _find_lost(liveness):
        error.args = ("\n".join([str(error), *lost.values()]),)


@contextmanager
def lost_ranks_named(activity: str, rank: int, liveness: RankLiveness | None) -> Iterator[None]:
    """Raise a ``RankLostError`` that names the lost ranks if a collective inside fails."""
    try:
        yield
    except RuntimeError as error:
        if not _is_failure(error):
            raise
        lost = {} if liveness is None else _find_lost(liveness)
        cause = " ".join(lost.values()) or (
            "Another rank has ended: look at the output of the other ranks for the first error."
        )
        raise RankLostError(
            f"Rank {rank} waited for {activity}, but the collective failed. {cause} The "
            f"collective reported: {summarize_error(error)}",
            rank=rank,
            activity=activity,
            lost=tuple(lost),
        ) from error


def _is_failure(error: BaseException) -> bool:
    """Return whether a collective has raised this error."""
    is_native = isinstance(error, RuntimeError) and not isinstance(error, D9mError)
    return is_native and bool(_FAILURE.search(str(error)))


def _find_lost(liveness: RankLiveness) -> dict[int, str]:
    close_default_group()  # a rank that waits for this one would seem to hang
    return liveness.find_lost()
