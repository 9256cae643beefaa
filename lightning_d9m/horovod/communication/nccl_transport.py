"""Collectives of CUDA tensors by torch's NCCL, in the order of streams.

Horovod reports a collective as done when the device has finished it, so the host waits, and the
optimizer is launched only after the device has nothing left to do. With torch's process group the
current stream waits instead: the host continues at once.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed

from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.communication.rank_store import connect_store
from lightning_d9m.horovod.communication.transports import TorchPending, TorchTransport

_POLL_SECONDS = 0.001


class StreamPending(TorchPending):
    """A collective on a CUDA stream."""

    def is_done_within(self, seconds: float) -> bool:
        """Poll and sleep: with a timeout, ``wait`` would end the group."""
        until = time.monotonic() + seconds
        while not self._work.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)
        return True


class NcclTransport(TorchTransport):
    """NCCL for CUDA tensors, and Gloo for those of the CPU: agreements, objects and metrics.

    The arguments are those of `TorchTransport`.

    Raises:
        SettingError: A rank cannot connect to rank 0; raised on every rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        gather: Callable[[Any], list[Any]],
        *,
        limit_seconds: float,
    ) -> None:
        limit = timedelta(seconds=limit_seconds)
        store = connect_store(rank, gather, limit)
        lost = [number for number, found in enumerate(gather(store is not None)) if not found]
        if lost:
            raise SettingError(
                f"Rank {', '.join(map(str, lost))} cannot connect to the store on rank 0, over "
                "which NCCL exchanges its addresses: set GLOO_SOCKET_IFNAME to a network interface "
                'that connects the hosts, or pass transport="horovod".'
            )
        super().__init__(rank, size, gather, limit_seconds=limit_seconds)
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = limit  # noqa: SLF001 - as torch.distributed itself sets it
        self._nccl = nccl(store, rank, size, options)

    @property
    def process_group(self) -> Any:
        """The process group of torch that sums gradients."""
        return self._nccl

    def sum(self, tensor: Tensor, name: str) -> TorchPending:
        """See `HorovodTransport`."""
        if not tensor.is_cuda:
            return super().sum(tensor, name)
        work = self._nccl.allreduce(tensor, distributed.ReduceOp.SUM)
        return StreamPending(work, tensor)

    def gather(self, tensor: Tensor, name: str) -> TorchPending:
        """See `HorovodTransport`."""
        if not tensor.is_cuda:
            return super().gather(tensor, name)
        gathered = tensor.new_empty(self._size * len(tensor))
        return StreamPending(
            self._nccl.allgather(list(gathered.chunk(self._size)), tensor), gathered
        )

    def broadcast(self, tensor: Tensor, name: str) -> TorchPending:
        """See `HorovodTransport`."""
        if not tensor.is_cuda:
            return super().broadcast(tensor, name)
        return StreamPending(self._nccl.broadcast(tensor, 0), tensor)

    def close(self) -> None:
        """Close the connections."""
        self._nccl.abort()
        del self._nccl
        super().close()
