"""A store on rank 0 in which the ranks report their status after a collective has failed."""

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
from torch import distributed

from lightning_d9m.horovod.communicator import Communicator
from lightning_d9m.horovod.transports import find_interface
from lightning_d9m.recording.rank_liveness import RankLiveness, identify_process

_CONNECT_TIMEOUT = timedelta(seconds=10)


def connect_liveness(communicator: Communicator) -> RankLiveness | None:
    """Connect all ranks to a store on rank 0; every rank must call this.

    Returns:
        None for a single rank, or if a rank cannot connect: then no error names the lost ranks.
    """
    if communicator.size == 1:
        return None
    store = None
    if communicator.rank == 0:
        with suppress(RuntimeError, OSError):
            store = _open_store("127.0.0.1", 0, is_master=True)
    address = (_find_address(), 0 if store is None else store.port)
    host, port = communicator.gather_objects(address)[0]
    if communicator.rank > 0 and port:
        with suppress(RuntimeError, OSError):
            store = _open_store(host, port, is_master=False)
    process = (*identify_process(), int(store is not None))
    gathered = communicator.gather_objects(process)
    if store is None or not all(is_connected for *_, is_connected in gathered):
        return None
    return RankLiveness(store, communicator.rank, [(host, pid) for host, pid, _ in gathered])


def _open_store(host: str, port: int, *, is_master: bool) -> Any:
    store: Any = distributed.TCPStore  # type: ignore[attr-defined] # public, but not in __all__
    return store(host, port, is_master=is_master, timeout=_CONNECT_TIMEOUT, wait_for_workers=False)


def _find_address() -> str:
    """Return the IPv4 address by which other hosts reach this one."""
    for address in psutil.net_if_addrs().get(find_interface() or "", []):
        if address.family == socket.AF_INET:
            return str(address.address)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
