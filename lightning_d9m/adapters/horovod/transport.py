"""How a sum over the ranks travels: by Horovod, or by torch's Gloo among Horovod's ranks.

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
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, distributed

if TYPE_CHECKING:
    _Store = object
else:
    from torch.distributed import Store as _Store

Operation = Literal["Sum", "Min"]
# Look again after a twentieth of what the wait has taken so far, within these bounds: looking often
# takes the core from a rank that computes, looking seldom leaves a result lying.
_POLL_SECONDS = (0.0001, 0.002)
_POLL_SHARE = 0.05


class Pending(Protocol):
    """An exchange that was started."""

    def is_done_within(self, seconds: float) -> bool:
        """Wait for its end, at most so long, without taking a core from who computes."""
        ...

    def get_result(self) -> Any:
        """Return what came of it once it is done, or raise the RuntimeError that ended it."""
        ...


class Transport(Protocol):
    """Reduces tensors over the ranks."""

    def start(self, tensor: Tensor, name: str, operation: Operation) -> Pending:
        """Start to reduce a contiguous tensor in place. Sums start in one order on every rank."""
        ...

    def close(self, *, broken: bool) -> None:
        """Give the connections up; broken, without waiting for what is under way."""
        ...


class HorovodPending:
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

    def get_result(self) -> Any:
        """Return the tensor."""
        return self._hvd.synchronize(self._handle)


class HorovodTransport:
    """Horovod's own allreduce: NCCL on CUDA, Gloo or MPI elsewhere."""

    def __init__(self, hvd: ModuleType) -> None:
        self._hvd: Any = hvd

    def start(self, tensor: Tensor, name: str, operation: Operation) -> Pending:
        """Horovod pairs what the ranks start by its name."""
        reduction = getattr(self._hvd, operation)
        handle = self._hvd.allreduce_async_(tensor, name=name, op=reduction)
        return HorovodPending(self._hvd, handle)

    def close(self, *, broken: bool) -> None:
        """Horovod runs on until the process ends."""


class _TorchPending:
    def __init__(self, work: Any) -> None:
        self._work = work

    def is_done_within(self, seconds: float) -> bool:
        try:
            # Zero would mean for ever.
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:  # it took longer, or it failed, which get_result() tells
            return bool(self._work.is_completed())
        return True

    def get_result(self) -> None:
        self._work.wait()


class TorchTransport:
    """Gloo groups of torch, which no other code sees: torch.distributed stays uninitialised.

    Gloo pairs what the ranks start by its order. So sums, which may be under way while a rank is
    about to do something else, have one group, and minima, by which the ranks agree, another.

    Args:
        rank: This rank.
        size: The number of ranks.
        gather: Gathers an object from all ranks; the connections are made known by it.
        limit_seconds: An exchange that takes longer fails.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        gather: Callable[[dict[str, bytes]], Sequence[dict[str, bytes]]],
        *,
        limit_seconds: float,
    ) -> None:
        self._groups: dict[Operation, Any] = {}
        gloo: Any = distributed.ProcessGroupGloo
        for operation in ("Sum", "Min"):
            options = gloo._Options()  # noqa: SLF001 - else it takes the host's name, not a device
            options._devices = [_make_device(gloo)]  # noqa: SLF001
            options._timeout = timedelta(seconds=limit_seconds)  # noqa: SLF001
            self._groups[operation] = gloo(_GatheredStore(gather), rank, size, options)

    def start(self, tensor: Tensor, name: str, operation: Operation) -> Pending:
        """Start in this group's order."""
        options: Any = distributed.AllreduceOptions()
        if operation == "Min":
            options.reduceOp = distributed.ReduceOp.MIN
        return _TorchPending(self._groups[operation].allreduce([tensor], options))

    def close(self, *, broken: bool) -> None:
        """Close the connections."""
        for group in self._groups.values():
            if broken:
                group.abort()
        self._groups = {}


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
