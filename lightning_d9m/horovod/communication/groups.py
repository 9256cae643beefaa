"""Process groups: Horovod's collectives in the form of torch's, or torch's between its ranks.

Horovod starts collectives only at the next cycle of its threads, and in each cycle its ranks
exchange messages even if there is nothing to do. On CPUs, where ranks compute on the cores that the
exchange needs, both cost a good part of a step. torch's Gloo starts at once, and sleeps until a
message arrives.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.communication.rank_store import connect_store, find_interface

if TYPE_CHECKING:
    _Store = object
else:
    from torch.distributed import Store as _Store

# Sleep a twentieth of the time waited so far, within these bounds. Frequent polls take the core
# from a rank that computes; rare ones delay the result.
_POLL_SECONDS = (0.0001, 0.002)
_POLL_SHARE = 0.05
_NAMES = 1024  # more than collectives that are pending at once; Horovod keeps what it knows by name

Gather = Callable[[Any], list[Any]]


class HorovodWork:
    """A collective that Horovod knows by a handle.

    ``take`` receives what it returns.
    """

    def __init__(self, hvd: Any, handle: int, take: Callable[[Any], None]) -> None:
        self._hvd = hvd
        self._handle = handle
        self._take = take
        self._end: Callable[[], None] | None = None

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self._end is not None or bool(self._hvd.poll(self._handle))

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for its end; poll and sleep, as hvd.synchronize() spins.

        Raises:
            RuntimeError: It has failed, or lasts longer.
        """
        began = time.monotonic()
        while not self.is_completed():
            waited = time.monotonic() - began
            if timeout is not None and waited > timeout.total_seconds():
                raise RuntimeError("A collective of Horovod timed out.")
            time.sleep(min(max(_POLL_SHARE * waited, _POLL_SECONDS[0]), _POLL_SECONDS[1]))
        if self._end is None:  # Horovod forgets the handle then
            self._end = self._synchronize()
        self._end()

    def _synchronize(self) -> Callable[[], None]:
        """Take the result, and return what raises the error of the collective, if there is one."""
        try:
            self._take(self._hvd.synchronize(self._handle))
        except RuntimeError as error:  # HorovodInternalError is one
            return partial(_raise, error)
        return lambda: None


def _raise(error: Exception) -> None:
    raise error


class HorovodGroup:
    """Horovod's collectives: NCCL on CUDA, Gloo or MPI elsewhere. It pairs them by name.

    They are those of a process group of torch, and all ranks start them in the same order. The
    label separates groups. Tensors are flat and contiguous; they travel as bytes, because Horovod
    does not know every dtype.
    """

    def __init__(self, hvd: ModuleType, label: str) -> None:
        self._hvd: Any = hvd
        self._label = label
        self._numbers = count()

    def rank(self) -> int:
        """Return the rank of this process."""
        return int(self._hvd.rank())

    def size(self) -> int:
        """Return the number of processes."""
        return int(self._hvd.size())

    def name(self) -> str:
        """Return the name of the backend."""
        return "horovod"

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> HorovodWork:
        """Gather tensors of equal length, at least 1."""
        (parts,), (tensor,) = outputs, inputs

        def take(gathered: Tensor) -> None:
            for part, found in zip(parts, gathered.chunk(len(parts)), strict=True):
                part.view(torch.uint8).copy_(found)

        handle = self._hvd.allgather_async(tensor.view(torch.uint8), name=self._next("allgather"))
        return HorovodWork(self._hvd, handle, take)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> HorovodWork:
        """Send parts of a tensor, of so many elements, to all ranks."""

        def take(found: Any) -> None:
            output.view(torch.uint8).copy_(found[0])

        splits = torch.tensor(sent, dtype=torch.int32) * tensor.element_size()
        name = self._next("alltoall")
        handle = self._hvd.alltoall_async(tensor.view(torch.uint8), splits=splits, name=name)
        return HorovodWork(self._hvd, handle, take)

    def broadcast(self, tensor: Tensor, source: int) -> HorovodWork:
        """Overwrite a tensor with that of a rank."""
        name = self._next("broadcast")
        handle = self._hvd.broadcast_async_(tensor.view(torch.uint8), source, name=name)
        return HorovodWork(self._hvd, handle, lambda _: None)

    def _next(self, operation: str) -> str:
        return f"d9m.{self._label}.{operation}.{next(self._numbers) % _NAMES}"


def open_gloo(rank: int, size: int, gather: Gather, limit: timedelta) -> Any:
    """Return a Gloo group that no other code sees: torch.distributed stays uninitialized.

    ``gather`` gathers an object from all ranks, to exchange the addresses. A collective that takes
    longer than the limit fails.
    """
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - the public constructor takes no device
    options._devices = [_make_device(gloo)]  # noqa: SLF001 - as above
    options._timeout = limit  # noqa: SLF001 - as above
    return gloo(_GatheredStore(gather), rank, size, options)


def open_nccl(rank: int, size: int, gather: Gather, limit: timedelta) -> Any:
    """Return a group for CUDA tensors, for whose collectives the current stream waits.

    Horovod reports a collective as done when the device has finished it, so the host would wait,
    and the optimizer would be launched only after the device has nothing left to do.

    Raises:
        SettingError: A rank cannot connect to rank 0; raised on every rank.
    """
    store = connect_store(rank, gather, limit)
    lost = [number for number, found in enumerate(gather(store is not None)) if not found]
    if lost:
        raise SettingError(
            f"Rank {', '.join(map(str, lost))} cannot connect to the store on rank 0, over "
            "which NCCL exchanges its addresses: set GLOO_SOCKET_IFNAME to a network interface "
            'that connects the hosts, or pass transport="horovod".'
        )
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = limit  # noqa: SLF001 - as torch.distributed itself sets it
    return nccl(store, rank, size, options)


class _GatheredStore(_Store):
    """A store for the addresses of a group's ranks, filled by one exchange, without a server."""

    def __init__(self, gather: Gather) -> None:
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


def _make_device(gloo: Any) -> Any:
    interface = find_interface()
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()
