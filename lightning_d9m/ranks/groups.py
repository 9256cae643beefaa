"""Process groups of ``torch.distributed``, or ones like them: what they gather, and their end.

Gloo's threads release the tensors of a collective shortly after it has completed. If the
interpreter exits before that (for example after an error that all ranks raise together), the thread
uses a finalized interpreter and the process aborts ("terminate called without an active exception",
signal 6), regardless of its exit status. Lightning destroys NCCL's group at exit, but not Gloo's.
"""

import atexit
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import _disable_current_modes

from lightning_d9m.ranks.ranks import Ranks

_TAG = 2**31 - 1  # of a message that nobody sends
_SOON = timedelta(milliseconds=1)
# Seconds to wait; a collective may wait for a rank that has died.
_TIMEOUT = 5.0
_closed: WeakSet[Any] = WeakSet()
_controls: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by default group
_openings = count(1)  # separates groups in one store, and is equal on every rank


def ranks_of_group(group: Any = None, wait: Callable[[Any], None] | None = None) -> Ranks:
    """Return the ranks of a group; None is the default group, or a single rank without one.

    ``wait`` waits for a collective; the default waits as long as the group does.
    """
    if group is None and distributed.is_available() and distributed.is_initialized():
        group = distributed.group.WORLD
    if group is None or group.size() == 1:
        return Ranks(0)
    return Ranks(group.rank(), lambda data: _exchange(group, data, wait))


def gather_bytes(data: bytes, group: Any = None) -> list[bytes]:
    """Return the bytes of every process of a group; the lengths may differ."""
    return ranks_of_group(group).gather_bytes(data)


def _exchange(group: Any, data: bytes, wait: Callable[[Any], None] | None) -> list[bytes]:
    # Lightning validates in inference mode, whose tensors may not be written to elsewhere. A mode
    # that probes operations would see bytes that no two runs have in common.
    with torch.inference_mode(mode=False), _disable_current_modes():
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_find_device(group))
        rows = [torch.empty_like(sent) for _ in range(group.size())]
        work = group.allgather([rows], [sent])
        work.wait() if wait is None else wait(work)
        return [row.cpu().numpy().tobytes() for row in rows]


def _find_device(group: Any) -> torch.device:
    """Return the device of the tensors that a group can gather: NCCL has none on the host."""
    kinds = {"cpu", "cuda"}
    if hasattr(group, "_device_types"):  # of torch.distributed, around its backends
        kinds = {device.type for device in group._device_types}  # noqa: SLF001 - not public
    elif "nccl" in group.name().lower():
        kinds = {"cuda"}
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors of any dtype with those of the first rank, one message per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    for group in by_device.values():
        # Those of inference mode cannot be viewed.
        normal = [tensor.clone() if tensor.is_inference() else tensor for tensor in group]
        flat = torch.cat([each.contiguous().reshape(-1).view(torch.uint8) for each in normal])
        distributed.broadcast(flat, src=0)
        for tensor, part in zip(group, flat.split([each.nbytes for each in group]), strict=True):
            # A slice at an odd offset cannot be viewed as a wider dtype: clone aligns it.
            tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))


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
    if distributed.is_available():
        atexit.register(_close_group)


def _close_group() -> None:
    if _has_gloo():
        closing = Thread(target=distributed.destroy_process_group, daemon=True)
        closing.start()
        closing.join(_TIMEOUT)


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

    Collectives are paired by their order in a group. Lightning sends a message in the default group
    before each batch, so a rank that has no more batches would not find out there. None for a
    single rank. The options are those of ``new_group``.
    """
    world: Any = distributed.group.WORLD
    if world.size() > 1 and world not in _controls:
        _controls[world] = distributed.new_group(backend="gloo", **options)
    return _controls.get(world)


def is_default_group_closed() -> bool:
    """Return whether `close_default_group` was called, and `reopen_default_group` was not."""
    return distributed.is_initialized() and distributed.group.WORLD in _closed


def reopen_default_group(**options: Any) -> None:
    """Open torch's default group again if it is closed; every rank must call this.

    The store of the closed group is used, because its host may be a rank that has not yet learned
    of the error.

    The options are those of ``init_process_group``.
    """
    if not is_default_group_closed():
        return
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
    place: Any = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
    backend = distributed.get_backend()
    distributed.destroy_process_group()
    make_store: Any = distributed.PrefixStore  # type: ignore[attr-defined] # not in __all__
    store = make_store(f"d9m.{next(_openings)}", store)
    distributed.init_process_group(backend, store=store, **place, **options)


def _has_gloo() -> bool:
    return distributed.is_initialized() and "gloo" in distributed.get_backend()
