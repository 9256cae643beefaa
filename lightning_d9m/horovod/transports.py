"""How what crosses the ranks travels: by Horovod, or by torch's Gloo among Horovod's ranks.

Horovod starts nothing between two cycles of its threads, and in each cycle its ranks exchange
messages even if there is nothing to do. Where ranks compute on the cores that the exchange needs,
on CPUs, both cost a good part of a step. torch's Gloo is the same ring, starts at once, and sleeps
until a message comes.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, distributed

if TYPE_CHECKING:
    _Store = object
else:
    from torch.distributed import Store as _Store

# Look again after a twentieth of what the wait has taken so far, within these bounds: looking often
# takes the core from a rank that computes, looking seldom leaves a result lying.
_POLL_SECONDS = (0.0001, 0.002)
_POLL_SHARE = 0.05
_PATIENCE = timedelta(days=365)


class Pending(Protocol):
    """An exchange that was started."""

    def is_done_within(self, seconds: float) -> bool:
        """Wait for its end, at most so long, without taking a core from who computes."""
        ...

    def get_result(self) -> Tensor:
        """Return what came of it once it is done, or raise the RuntimeError that ended it."""
        ...


class Transport(Protocol):
    """Moves contiguous tensors between the ranks.

    Sums and broadcasts have one order, the same on every rank; so have minima and what is gathered.

    Attributes:
        supports_unbounded_wait: Whether what only some ranks have started may lie for hours.
    """

    supports_unbounded_wait: bool

    def sum(self, tensor: Tensor, name: str) -> Pending:
        """Start to sum a tensor over the ranks in place."""
        ...

    def minimise(self, tensor: Tensor, name: str) -> Pending:
        """Start to take the smallest of each element over the ranks, in place."""
        ...

    def gather(self, tensor: Tensor, name: str) -> Pending:
        """Start to join flat tensors of one length, at least 1, in rank order."""
        ...

    def broadcast(self, tensor: Tensor, name: str) -> Pending:
        """Start to overwrite a tensor with that of rank 0."""
        ...

    def close(self) -> None:
        """Give the connections up, without waiting for what is under way."""
        ...


class _HorovodPending:
    """What Horovod knows by a handle."""

    def __init__(self, hvd: ModuleType, handle: int) -> None:
        self._hvd: Any = hvd
        self._handle = handle

    def is_done_within(self, seconds: float) -> bool:
        """Poll and sleep: hvd.synchronize() alone spins on yield()."""
        began = time.monotonic()
        while not self._hvd.poll(self._handle):
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            time.sleep(min(max(_POLL_SHARE * waited, _POLL_SECONDS[0]), _POLL_SECONDS[1]))
        return True

    def get_result(self) -> Tensor:
        result: Tensor = self._hvd.synchronize(self._handle)
        return result


class HorovodTransport:
    """Horovod's own collectives: NCCL on CUDA, Gloo or MPI elsewhere. It pairs them by name."""

    supports_unbounded_wait = (
        False  # it warns of what lies for a minute, and ends the run in the end
    )

    def __init__(self, hvd: ModuleType) -> None:
        self._hvd: Any = hvd

    def sum(self, tensor: Tensor, name: str) -> Pending:
        """See `Transport`."""
        return self._reduce(tensor, name, self._hvd.Sum)

    def minimise(self, tensor: Tensor, name: str) -> Pending:
        """See `Transport`."""
        return self._reduce(tensor, name, self._hvd.Min)

    def gather(self, tensor: Tensor, name: str) -> Pending:
        """See `Transport`."""
        return _HorovodPending(self._hvd, self._hvd.allgather_async(tensor, name=name))

    def broadcast(self, tensor: Tensor, name: str) -> Pending:
        """See `Transport`."""
        return _HorovodPending(self._hvd, self._hvd.broadcast_async_(tensor, 0, name=name))

    def _reduce(self, tensor: Tensor, name: str, operation: Any) -> Pending:
        handle = self._hvd.allreduce_async_(tensor, name=name, op=operation)
        return _HorovodPending(self._hvd, handle)

    def close(self) -> None:
        """Horovod runs on until the process ends."""


class _TorchPending:
    def __init__(self, work: Any, result: Tensor) -> None:
        self._work = work
        self._result = result

    def is_done_within(self, seconds: float) -> bool:
        try:
            # Zero would mean for ever.
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:  # it took longer, or it failed, which get_result() tells
            return bool(self._work.is_completed())
        return True

    def get_result(self) -> Tensor:
        self._work.wait()
        return self._result


class TorchTransport:
    """Gloo groups of torch, which no other code sees: torch.distributed stays uninitialised.

    Gloo pairs what the ranks start by its order. So sums, which may be under way when a rank turns
    to something else, have one group, and what the ranks say to each other has another, in which
    an exchange may lie until the last rank joins it.

    Args:
        rank: This rank.
        size: The number of ranks.
        gather: Gathers an object from all ranks; the connections are made known by it.
        limit_seconds: A sum or a broadcast that takes longer fails.
    """

    supports_unbounded_wait = True

    def __init__(
        self,
        rank: int,
        size: int,
        gather: Callable[[dict[str, bytes]], Sequence[dict[str, bytes]]],
        *,
        limit_seconds: float,
    ) -> None:
        self._size = size
        gloo: Any = distributed.ProcessGroupGloo
        groups = []
        for _ in range(2):
            options = gloo._Options()  # noqa: SLF001 - else it takes the host's name, not a device
            options._devices = [_make_device(gloo)]  # noqa: SLF001
            options._timeout = timedelta(seconds=limit_seconds)  # noqa: SLF001
            groups.append(gloo(_GatheredStore(gather), rank, size, options))
        self._sums, self._talk = groups

    def sum(self, tensor: Tensor, name: str) -> Pending:
        """See `Transport`."""
        return _TorchPending(self._sums.allreduce(tensor, distributed.ReduceOp.SUM), tensor)

    def minimise(self, tensor: Tensor, name: str) -> Pending:
        """See `Transport`."""
        work = self._talk.allreduce(tensor, distributed.ReduceOp.MIN, timeout=_PATIENCE)
        return _TorchPending(work, tensor)

    def gather(self, tensor: Tensor, name: str) -> Pending:
        """See `Transport`."""
        gathered = tensor.new_empty(self._size * len(tensor))
        work = self._talk.allgather(list(gathered.chunk(self._size)), tensor)
        return _TorchPending(work, gathered)

    def broadcast(self, tensor: Tensor, name: str) -> Pending:
        """See `Transport`."""
        return _TorchPending(self._sums.broadcast(tensor, 0), tensor)

    def close(self) -> None:
        """Close the connections."""
        self._sums.abort()
        self._talk.abort()
        del self._sums, self._talk


class _GatheredStore(_Store):
    """Where the ranks of a group find each other's addresses: one exchange, and no server."""

    def __init__(self, gather: Callable[[dict[str, bytes]], Sequence[dict[str, bytes]]]) -> None:
        super().__init__()
        self._gather = gather
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._known[key] = bytes(value)

    def get(self, key: str) -> bytes:
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        # Each rank has set its own when it waits for those of others.
        if not self._known.keys() >= set(keys):
            self._known = {k: v for known in self._gather(self._known) for k, v in known.items()}


def _make_device(gloo: Any) -> Any:
    """Listen where torch's users say, else where Horovod's launcher found that ranks connect."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE")
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()
