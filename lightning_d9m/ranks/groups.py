"""Ranks that are the processes of a group of ``torch.distributed``, or of one like it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import _disable_current_modes

from lightning_d9m.ranks.ranks import Ranks


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
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = gather_equal(group, sent.to(find_device(group)), wait)
        return [row.numpy().tobytes() for row in rows.cpu()]


def gather_equal(group: Any, tensor: Tensor, wait: Callable[[Any], None] | None = None) -> Tensor:
    """Return the flat tensor of each process, in one row each."""
    gathered = tensor.new_empty(group.size() * len(tensor))
    work = group.allgather([list(gathered.chunk(group.size()))], [tensor])
    work.wait() if wait is None else wait(work)
    return gathered.view(group.size(), -1)


def find_device(group: Any) -> torch.device:
    """Return the device of the tensors that a group can gather: NCCL has none on the host."""
    kinds = {"cpu", "cuda"}
    if hasattr(group, "_device_types"):  # of torch.distributed, around its backends
        kinds = {device.type for device in group._device_types}  # noqa: SLF001 - not public
    elif "nccl" in group.name().lower():
        kinds = {"cuda"}
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def broadcast_tensors(tensors: Iterable[Tensor], broadcast: Callable[[Tensor], None]) -> None:
    """Overwrite tensors of any dtype with those of the first rank, one message per device.

    ``broadcast`` overwrites a flat tensor of bytes.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    for group in by_device.values():
        flat = torch.cat([as_bytes(tensor) for tensor in group])
        broadcast(flat)
        for tensor, part in zip(group, flat.split([each.nbytes for each in group]), strict=True):
            # A slice at an odd offset cannot be viewed as a wider dtype: clone aligns it.
            tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, which may be one of inference mode."""
    normal = tensor.clone() if tensor.is_inference() else tensor
    return normal.detach().contiguous().reshape(-1).view(torch.uint8)
