"""Transports for collectives: Horovod, or torch's Gloo between the ranks that Horovod started.

Horovod starts collectives only at the next cycle of its threads, and in each cycle its ranks
exchange messages even if there is nothing to do. On CPUs, where ranks compute on the cores that the
exchange needs, both cost a good part of a step. torch's Gloo uses the same ring, starts at once,
and sleeps until a message arrives.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, distributed

from lightning_d9m.logical_ranks.connections import close_connections

if TYPE_CHECKING:
    _Store = object
else:
    from torch.distributed import Store as _Store

# Sleep a twentieth of the time waited so far, within these bounds. Frequent polls take the core
# from a rank that computes; rare ones delay the result.
_POLL_SECONDS = (0.0001, 0.002)
_POLL_SHARE = 0.05
_UNBOUNDED = timedelta(days=365)


class HorovodPending:
    """A collective that Horovod knows by a handle."""

    def __init__(self, hvd: ModuleType, handle: int) -> None:
        self._hvd: Any = hvd
        self._handle = handle

    def is_done_within(self, seconds: float) -> bool:
        """Wait at most so long for its end; poll and sleep, as hvd.synchronize() spins."""
        began = time.monotonic()
        while not self._hvd.poll(self._handle):
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            time.sleep(min(max(_POLL_SHARE * waited, _POLL_SECONDS[0]), _POLL_SECONDS[1]))
        return True

    def get_result(self) -> Tensor:
        """Return the result of a collective that is done, or raise its RuntimeError."""
        result: Tensor = self._hvd.synchronize(self._handle)
        return result


class HorovodTransport:
    """Horovod's collectives: NCCL on CUDA, Gloo or MPI elsewhere. It pairs them by name.

    All ranks start sums and broadcasts in the same order, and likewise minima and gathers. Tensors
    are contiguous.

    Attributes:
        supports_unbounded_wait: Whether a collective may wait for hours for its last rank.
    """

    # Horovod warns of a collective that waits for a minute, and ends the run eventually.
    supports_unbounded_wait = False

    def __init__(self, hvd: ModuleType) -> None:
        self._hvd: Any = hvd

    def sum(self, tensor: Tensor, name: str) -> HorovodPending:
        """Start to sum a tensor over the ranks in place."""
        return self._reduce(tensor, name, self._hvd.Sum)

    def minimize(self, tensor: Tensor, name: str) -> HorovodPending:
        """Start to take the elementwise minimum over the ranks in place."""
        return self._reduce(tensor, name, self._hvd.Min)

    def gather(self, tensor: Tensor, name: str) -> HorovodPending:
        """Start to concatenate flat tensors of equal length, at least 1, in rank order."""
        return HorovodPending(self._hvd, self._hvd.allgather_async(tensor, name=name))

    def broadcast(self, tensor: Tensor, name: str) -> HorovodPending:
        """Start to overwrite a tensor with that of rank 0."""
        return HorovodPending(self._hvd, self._hvd.broadcast_async_(tensor, 0, name=name))

    def _reduce(self, tensor: Tensor, name: str, operation: Any) -> HorovodPending:
        handle = self._hvd.allreduce_async_(tensor, name=name, op=operation)
        return HorovodPending(self._hvd, handle)

    def close(self) -> None:
        """Do nothing: Horovod runs until the process ends."""


class TorchPending:
    """A collective of a process group of torch.

    It fills the result.
    """

    def __init__(self, work: Any, result: Tensor) -> None:
        self._work = work
        self._result = result

    def is_done_within(self, seconds: float) -> bool:
        """Return whether it has ended, after waiting so long."""
        try:
            # A timeout of zero would wait indefinitely.
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:  # a timeout, or a failure, which get_result() raises
            return bool(self._work.is_completed())
        return True

    def get_result(self) -> Tensor:
        """Wait for the end, on CUDA by the current stream alone, and return the result."""
        self._work.wait()
        return self._result


class TorchTransport:
    """Gloo groups that no other code sees: torch.distributed stays uninitialized.

    Gloo pairs collectives by the order in which ranks start them. Therefore sums and broadcasts,
    which may be pending when a rank starts something else, have one group, and agreements and
    gathers have another, in which a collective may wait until the last rank joins it.

    ``gather`` gathers an object from all ranks, to exchange the addresses. A sum or a broadcast
    that takes longer than the limit fails.
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
            options = gloo._Options()  # noqa: SLF001 - the public constructor takes no device
            options._devices = [_make_device(gloo)]  # noqa: SLF001 - as above
            options._timeout = timedelta(seconds=limit_seconds)  # noqa: SLF001 - as above
            groups.append(gloo(_GatheredStore(gather), rank, size, options))
        self._tensors, self._control = groups

    @property
    def process_group(self) -> Any:
        """The process group of torch that sums gradients."""
        return self._tensors

    def sum(self, tensor: Tensor, name: str) -> TorchPending:
        """See `HorovodTransport`."""
        return TorchPending(self._tensors.allreduce(tensor, distributed.ReduceOp.SUM), tensor)

    def minimize(self, tensor: Tensor, name: str) -> TorchPending:
        """See `HorovodTransport`."""
        work = self._control.allreduce(tensor, distributed.ReduceOp.MIN, timeout=_UNBOUNDED)
        return TorchPending(work, tensor)

    def gather(self, tensor: Tensor, name: str) -> TorchPending:
        """See `HorovodTransport`."""
        gathered = tensor.new_empty(self._size * len(tensor))
        work = self._control.allgather(list(gathered.chunk(self._size)), tensor)
        return TorchPending(work, gathered)

    def broadcast(self, tensor: Tensor, name: str) -> TorchPending:
        """See `HorovodTransport`."""
        return TorchPending(self._tensors.broadcast(tensor, 0), tensor)

    def fail(self) -> None:
        """Let every collective fail, here and where this rank is waited for."""
        for group in (self._tensors, self._control):
            close_connections(group)

    def close(self) -> None:
        """Close the connections."""
        self.fail()
        del self._tensors, self._control


class _GatheredStore(_Store):
    """A store for the addresses of a group's ranks, filled by one exchange, without a server."""

    def __init__(self, gather: Callable[[dict[str, bytes]], Sequence[dict[str, bytes]]]) -> None:
        super().__init__()
        self._gather = gather
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._known[key] = bytes(value)

    def get(self, key: str) -> bytes:
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        # Each rank has set its own keys before it waits for those of others.
        if not self._known.keys() >= set(keys):
            self._known = {k: v for known in self._gather(self._known) for k, v in known.items()}


def find_interface() -> str | None:
    """Return the network interface that the user of torch or Horovod's launcher chose."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE")


def _make_device(gloo: Any) -> Any:
    interface = find_interface()
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


Pending: TypeAlias = HorovodPending | TorchPending
Transport: TypeAlias = HorovodTransport | TorchTransport
