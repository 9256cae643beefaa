"""A key-value store of torch on rank 0, to which all ranks connect, and their status in it."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
from torch import distributed

from lightning_d9m.ranks.liveness import RankLiveness, identify_process

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


def connect_liveness(rank: int, gather: Callable[[Any], list[Any]]) -> RankLiveness | None:
    """Connect all ranks to a store on rank 0; every rank must call this.

    Returns:
        None if a rank cannot connect: then no error names the lost ranks.
    """
    store = connect_store(rank, gather, _LIVENESS_TIMEOUT)
    gathered = gather((*identify_process(), int(store is not None)))
    if store is None or not all(is_connected for *_, is_connected in gathered):
        return None
    return RankLiveness(store, rank, [(host, pid) for host, pid, _ in gathered])


def find_interface() -> str | None:
    """Return the network interface that the user of torch or Horovod's launcher chose."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE")


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
