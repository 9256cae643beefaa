"""Process groups of ``torch.distributed``: what they gather, their end, and ranks that are lost.

Lost ranks were killed, are stopped, hang, or ended by an error. A store tells, which still works
after a collective has failed.
"""

import atexit
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import psutil
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import _disable_current_modes

from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.errors import D9mError, RankLostError

_TAG = 2**31 - 1  # of a message that nobody sends
_SOON = timedelta(milliseconds=1)
# Seconds to wait; a collective may wait for a rank that has died.
_TIMEOUT = 5.0
# Weak, because a group closes its connections only when nothing refers to it any more.
_closed: WeakSet[Any] = WeakSet()
_controls: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by default group
_numbers = count(1)  # separates runs and groups in one store; equal on every rank
# Words of the errors that Gloo and NCCL raise; torch has no type for them.
_FAILURE = re.compile(r"gloo|nccl|(closed|reset) by peer|pair closure|timed out", re.IGNORECASE)
_POLL_SECONDS = 0.05
# What is known of a rank that reports nothing, by the state of its process.
_SILENT = {
    "ended": "was killed or exited.",
    "stopped": "is stopped.",
    "running": "runs, but did not respond within {:g} s: it hangs.",
    "unknown": "did not respond within {:g} s: it was killed, or it hangs.",
}
_STATES = {
    psutil.STATUS_ZOMBIE: "ended",
    psutil.STATUS_DEAD: "ended",
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
}


def ranks_of_group(group: Any = None) -> Ranks:
    """Return the ranks of a group; None is the default group, or a single rank without one."""
    if group is None and distributed.is_available() and distributed.is_initialized():
        group = distributed.group.WORLD
    if group is None or group.size() == 1:
        return Ranks(0)
    return Ranks(group.rank(), lambda data: _exchange(group, data))


def _exchange(group: Any, data: bytes) -> list[bytes]:
    # Lightning validates in inference mode, whose tensors may not be written to elsewhere. A mode
    # that probes operations would see bytes that no two runs have in common.
    with torch.inference_mode(mode=False), _disable_current_modes():
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_find_device(group))
        rows = [torch.empty_like(sent) for _ in range(group.size())]
        group.allgather([rows], [sent]).wait()
        return [row.cpu().numpy().tobytes() for row in rows]


def _find_device(group: Any) -> torch.device:
    """Return the device of the tensors that a group can gather: NCCL has none on the host."""
    kinds = {"cpu", "cuda"}
    # A group of torch.distributed wraps one backend for each kind of device ("cpu:gloo,cuda:nccl").
    # A backend alone, such as the one that sums gradients, has a name.
    if hasattr(group, "_device_types"):
        kinds = {device.type for device in group._device_types}  # noqa: SLF001 - not public
    elif "nccl" in group.name().lower():
        kinds = {"cuda"}
    # The host if possible: a copy to a device would wait for all work that is queued there.
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors of any dtype with those of the first rank, one message per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    for group in by_device.values():
        # As bytes, because Gloo and NCCL each lack some dtypes, and in one message, because each
        # message costs a round trip. Tensors of inference mode cannot be viewed.
        normal = [tensor.clone() if tensor.is_inference() else tensor for tensor in group]
        normal = [tensor.resolve_conj().contiguous().reshape(-1) for tensor in normal]
        flat = torch.cat([each.view(torch.uint8) for each in normal])
        distributed.broadcast(flat, src=0)
        for tensor, part in zip(group, flat.split([each.nbytes for each in group]), strict=True):
            # A slice at an odd offset cannot be viewed as a wider dtype: clone aligns it.
            tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))


def close_connections(group: Any) -> None:
    """Close the connections of a Gloo group, so that all that waits for this process fails.

    A pending collective of this process fails too, on its threads. Afterwards Gloo uses the memory
    of no message, and an operation of the group is an error at once.
    """
    # Gloo has no call for that. The destructor of a group waits for pending collectives, and runs
    # only when nothing refers to the group. But a receive that takes too long closes all
    # connections, because the memory for its message may not exist any longer.
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1, device="cpu")], peer, _TAG).wait(_SOON)


@cache
def close_group_at_exit() -> None:
    """Destroy this process's Gloo groups before the interpreter exits; later calls do nothing."""

    # Gloo's threads release the tensors of a collective shortly after it has completed. If the
    # interpreter exits before that (for example after an error that all ranks raise together), the
    # thread uses a finalized interpreter and the process aborts ("terminate called without an
    # active exception", signal 6), regardless of its exit status. Lightning destroys NCCL's group
    # at exit, but not Gloo's.
    def close() -> None:
        if _has_gloo():
            # In a thread: the destructor waits for a pending collective, whose rank may be dead.
            closing = Thread(target=distributed.destroy_process_group, daemon=True)
            closing.start()
            closing.join(_TIMEOUT)

    if distributed.is_available():
        atexit.register(close)


def close_default_group() -> None:
    """Close the connections of torch's default group, so that no rank waits for this one."""
    if _has_gloo():
        group = distributed.group.WORLD
        close_connections(group)
        if group in _controls:
            close_connections(_controls[group])
        _closed.add(group)


def open_control_group(**options: Any) -> Any:
    """Return a second Gloo group of all ranks, for agreements; every rank must call this.

    None for a single rank. The options are those of ``new_group``.
    """
    # Collectives are paired by their order in a group. Lightning sends a message in the default
    # group before each batch, so a rank that has no more batches would not find out there.
    world: Any = distributed.group.WORLD
    if world.size() > 1 and world not in _controls:
        _controls[world] = distributed.new_group(backend="gloo", **options)
    return _controls.get(world)


def is_default_group_closed() -> bool:
    """Return whether `close_default_group` was called, and `reopen_default_group` was not."""
    return distributed.is_initialized() and distributed.group.WORLD in _closed


def reopen_default_group(**options: Any) -> None:
    """Open torch's default group again if it is closed; every rank must call this.

    The options are those of ``init_process_group``.
    """
    if not is_default_group_closed():
        return
    # The store of the closed group serves the new one: a new store would need its host, which may
    # be a rank that has not yet learned of the error. A prefix keeps the keys of both apart.
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
    place: Any = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
    backend = distributed.get_backend()
    distributed.destroy_process_group()
    make_store: Any = distributed.PrefixStore  # type: ignore[attr-defined] # not in __all__
    store = make_store(f"d9m.{next(_numbers)}", store)
    distributed.init_process_group(backend, store=store, **place, **options)


def _has_gloo() -> bool:
    return distributed.is_initialized() and "gloo" in distributed.get_backend()


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
        """Publish that this rank failed by itself. Never raises."""
        self._run(lambda: self._publish(summarize_error(error)))

    def find_lost(self) -> dict[int, str]:
        """Describe the lost ranks, for a rank whose collective failed. Never raises.

        Closes the default group, and waits at most the limit for the other ranks to fail, too.

        Returns:
            A sentence for each lost rank, in rank order; empty if every rank responds.
        """
        close_default_group()  # a rank that waits for this one would seem to hang
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
            # The launcher or rank 0 hosts the store. If it cannot be reached, a rank that has not
            # answered may have had no way to: only the processes of this host are known then.
            if is_reachable or rank == 0 or state in {"ended", "stopped"}:
                name = f"Rank {rank} (process {self._processes[rank][1]})"
                lost[rank] = f"{name} {_SILENT[state].format(self._limit)}"
        return lost

    def add_lost_ranks(self, error: BaseException) -> None:
        """Append the lost ranks to the error of a failed collective; publish any other error."""
        if isinstance(error, RankLostError):
            return
        if not _is_failure(error):
            self.report_error(error)
        elif lost := self.find_lost():
            error.args = ("\n".join([str(error), *lost.values()]),)

    def _run(self, function: Callable[[], None]) -> bool:
        """Call the store; return whether it answered."""
        # In a thread, as a store whose host is stopped blocks indefinitely.
        succeeded = []

        def attempt() -> None:
            try:
                function()
            except (RuntimeError, OSError):  # the store's host has ended
                return
            succeeded.append(True)

        thread = Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(self._limit + 1)
        return bool(succeeded)

    def _publish(self, status: str) -> None:
        self._store.set(f"{self._prefix}.{self._rank}", status)

    def _collect(self, statuses: dict[int, str]) -> None:
        """Add the status of each rank as it comes; an empty one is a failed collective."""
        # `get` would wait for a key, and so for the first rank that is lost; `check` does not.
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
            # Not `os.kill(process_id, 0)`, which succeeds for a zombie and for a stopped process.
            status = psutil.Process(process_id).status()
        except psutil.NoSuchProcess:
            return "ended"
        return _STATES.get(status, "running")


def summarize_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def connect_liveness(ranks: Ranks) -> RankLiveness | None:
    """Connect the ranks by the store of torch's default group; every rank must call this.

    Returns:
        None without a process group of torch's.
    """
    if ranks.is_alone or not distributed.is_available() or not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
    processes = ranks.gather_json(identify_process())
    return RankLiveness(store, ranks.rank, processes, prefix=str(next(_numbers)))


@contextmanager
def lost_ranks_named(activity: str, rank: int, liveness: RankLiveness | None) -> Iterator[None]:
    """Raise a ``RankLostError`` that names the lost ranks if a collective inside fails."""
    try:
        yield
    except RuntimeError as error:
        if not _is_failure(error):
            raise
        lost = {} if liveness is None else liveness.find_lost()
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
