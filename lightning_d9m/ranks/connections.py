"""The connections of process groups, and their end: after an error, and before Python exits.

Gloo's threads release the tensors of a collective shortly after it has completed. If the
interpreter exits before that (for example after an error that all ranks raise together), the thread
uses a finalized interpreter and the process aborts ("terminate called without an active exception",
signal 6), regardless of its exit status. Lightning destroys NCCL's group at exit, but not Gloo's.
"""

import atexit
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

_TAG = 2**31 - 1  # of a message that nobody sends
_SOON = timedelta(milliseconds=1)
# Seconds to wait; a collective may wait for a rank that has died.
_TIMEOUT = 5.0
_closed: WeakSet[Any] = WeakSet()
_controls: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by default group
_openings = count(1)  # separates groups in one store, and is equal on every rank


def close_connections(group: Any) -> None:
    """Close the connections of a Gloo group, so that all that waits for this process fails.

    A pending collective of this process fails too, on its threads. Afterwards Gloo uses the memory
    of no message, and an operation of the group is an error at once.

    Gloo has no call for that. The destructor of a group waits for pending collectives, and runs
    only when nothing refers to the group. But a receive that takes too long closes all connections,
    because the memory for its message may not exist any longer.
    """
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, _TAG).wait(_SOON)


@cache
def close_group_at_exit() -> None:
    """Destroy this process's Gloo groups before the interpreter exits; later calls do nothing."""
    if torch.distributed.is_available():
        atexit.register(_close_group)


def _close_group() -> None:
    if _has_gloo():
        closing = Thread(target=torch.distributed.destroy_process_group, daemon=True)
        closing.start()
        closing.join(_TIMEOUT)


def close_default_group() -> None:
    """Close the connections of torch's default group, so that no rank waits for this one."""
    if _has_gloo():
        group = torch.distributed.group.WORLD
        close_connections(group)
        if group in _controls:
            close_connections(_controls[group])
        _closed.add(group)


def open_control_group(**options: Any) -> Any:
    """Return a second Gloo group of all ranks, for agreements; every rank must call this.

    Collectives are paired by their order in a group. Lightning sends a message in the default group
    before each batch, so a rank that has no more batches would not find out there. None for a
    single rank. The options are those of ``new_group``.
    """
    distributed: Any = torch.distributed
    world = distributed.group.WORLD
    if world.size() > 1 and world not in _controls:
        _controls[world] = distributed.new_group(backend="gloo", **options)
    return _controls.get(world)


def is_default_group_closed() -> bool:
    """Return whether `close_default_group` was called, and `reopen_default_group` was not."""
    return torch.distributed.is_initialized() and torch.distributed.group.WORLD in _closed


def reopen_default_group(**options: Any) -> None:
    """Open torch's default group again if it is closed; every rank must call this.

    The store of the closed group is used, because its host may be a rank that has not yet learned
    of the error.

    The options are those of ``init_process_group``.
    """
    if not is_default_group_closed():
        return
    distributed: Any = torch.distributed
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
    place = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
    backend = distributed.get_backend()
    distributed.destroy_process_group()
    store = distributed.PrefixStore(f"d9m.{next(_openings)}", store)
    distributed.init_process_group(backend, store=store, **place, **options)


def _has_gloo() -> bool:
    return torch.distributed.is_initialized() and "gloo" in torch.distributed.get_backend()
