"""A key-value store of torch on rank 0, to which all ranks connect, and their status in it."""

import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
from torch import distributed

from lightning_d9m.horovod.communication.transports import find_interface
from lightning_d9m.recording.rank_liveness import RankLiveness, identify_process

if TYPE_CHECKING:
    from lightning_d9m.horovod.communication.communicator import Communicator

_LIVENESS_TIMEOUT = timedelta(seconds=10)


def connect_store(rank: int, gather: Callable[[Any], list[Any]], timeout: timedelta) -> Any | None:
    """Connect this rank to a store on rank 0; every rank must call this.

    After the timeout connecting, or waiting for a key, fails.

    Returns:
        None if this rank cannot connect.
    """
    store = None
    if rank == 0:
        with suppress(RuntimeError, OSError):
            store = _open_store("127.0.0.1", 0, timeout, is_master=True)
    host, port = gather((_find_address(), 0 if store is None else store.port))[0]
    if rank > 0 and port:
        with suppress(RuntimeError, OSError):
            store = _open_store(host, port, timeout, is_master=False)
    return store


def connect_liveness(communicator: "Communicator") -> RankLiveness | None:
    """Connect all ranks to a store on rank 0; every rank must call this.

    Returns:
        None for a single rank, or if a rank cannot connect: then no error names the lost ranks.
    """
    if communicator.size == 1:
        return None
    store = connect_store(communicator.rank, communicator.gather_objects, _LIVENESS_TIMEOUT)
    process = (*identify_process(), int(store is not None))
    gathered = communicator.gather_objects(process)
    if store is None or not all(is_connected for *_, is_connected in gathered):
        return None
    return RankLiveness(store, communicator.rank, [(host, pid) for host, pid, _ in gathered])


def _open_store(host: str, port: int, timeout: timedelta, *, is_master: bool) -> Any:
    store: Any = distributed.TCPStore  # type: ignore[attr-defined] # public, but not in __all__
    return store(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)


def _find_address() -> str:
    """Return the IPv4 address by which other hosts reach this one."""
    for address in psutil.net_if_addrs().get(find_interface() or "", []):
        if address.family == socket.AF_INET:
            return str(address.address)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
