"""Gradients of ops whose forward pass is a fixed weighted sum along each dimension, as gathers.

Average pooling and interpolation send each input to a few neighboring outputs. Their gradient,
usually a scatter with atomics, is then a gather: each input reads the outputs it went to, in
ascending order. A gather table lists these outputs for one dimension. ``embedding_bag`` in mode
sum reads them: one thread adds each run from left to right and touches the listed elements only,
so an infinity or a NaN does not spread (in a matrix product it would meet the zeros).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.errors import D9mError
from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype, sum_bags

Parts = TypeVar("Parts", bound=tuple[Tensor | None, ...])
TableKey: TypeAlias = tuple[torch.device, Callable[..., Any], tuple[Hashable, ...]]


class GatherTable(NamedTuple):
    """For each input along one dimension, the outputs it contributed to.

    Attributes:
        outputs: The outputs of input 0, of input 1, ...; int64 of shape ``[entries]``.
        offsets: Start of each input's run in ``outputs``; int64 of shape ``[inputs]``.
        weight: The factor of each entry, or None if all are 1; shape ``[entries]``.
        divisor: The divisor of each output's mean, or None; int64 of shape ``[outputs]``.
    """

    outputs: Tensor
    offsets: Tensor
    weight: Tensor | None = None
    divisor: Tensor | None = None


class DeviceCache:
    """Tensors on a device by the arguments that they were built from.

    It evicts the least recently used entry, but never one that a CUDA graph was captured with: the
    graph reads that memory at each replay.

    Args:
        capacity: Number of entries that may be evicted.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[TableKey, tuple[Tensor | None, ...]] = OrderedDict()
        self._captured: dict[TableKey, tuple[Tensor | None, ...]] = {}
        self._lock = Lock()

    def get(self, key: TableKey) -> tuple[Tensor | None, ...]:
        """Return the tensors of a key; build them if they are not there.

        Raises:
            D9mError: They are not there, and a CUDA graph is being captured: the copy from the host
                cannot be part of a graph.
        """
        device, build, sizes = key
        capturing = device.type == "cuda" and _is_capturing()
        with self._lock:  # backward passes run on several threads
            parts = self._captured.get(key) or self._entries.get(key)
            if parts is None:
                if capturing:
                    raise D9mError(
                        "A CUDA graph is being captured, and a deterministic replacement has to "
                        f"copy a table for the sizes {sizes} to {device} first. Run the same step "
                        "once before the capture."
                    )
                parts = _build_on_device(device, build, sizes)
            if capturing:
                self._captured[key] = parts
            if key not in self._captured:
                self._entries[key] = parts
                self._entries.move_to_end(key)
                if len(self._entries) > self._capacity:
                    self._entries.popitem(last=False)
        if device.type == "cuda":
            _record_use(parts, device)
        return parts


_cache = DeviceCache(512)


def cached_on_device(device: torch.device, build: Callable[..., Parts], *sizes: Hashable) -> Parts:
    """Build tensors on the host, once for each set of sizes, and copy them to a device.

    Sizes seldom change during a training, so a layer pays for this at its first step only.

    Raises:
        D9mError: A CUDA graph is being captured, and the tensors are not on the device yet.
    """
    return cast(Parts, _cache.get((device, build, sizes)))


def _build_on_device(
    device: torch.device,
    build: Callable[..., tuple[Tensor | None, ...]],
    sizes: tuple[Hashable, ...],
) -> tuple[Tensor | None, ...]:
    built = build(*sizes)
    moved = (part if part is None else part.to(device) for part in built)
    return cast(Callable[..., tuple[Tensor | None, ...]], type(built))(*moved)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _record_use(parts: tuple[Tensor | None, ...], device: torch.device) -> None:
    """Keep evicted memory from being reused while the current stream may still read it."""
    stream = torch.cuda.current_stream(device)
    for part in parts:
        if part is not None:
            part.record_stream(stream)


def build_gather_table(
    inputs: Tensor,
    outputs: Tensor,
    input_size: int,
    *,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
) -> GatherTable:
    """Turn a list of contributions into a gather table.

    Args:
        inputs: The input of each contribution, int64 of shape ``[entries]``.
        outputs: Its output, ascending, int64 of shape ``[entries]``.
        input_size: Number of inputs.
        weight: The factor of each contribution; shape ``[entries]``.
        divisor: The divisor of each output's mean; shape ``[outputs]``.
    """
    sorted_inputs, order = torch.sort(inputs, stable=True)
    bounds = torch.arange(input_size, dtype=torch.int64, device="cpu")
    offsets = torch.searchsorted(sorted_inputs, bounds)
    return GatherTable(outputs[order], offsets, None if weight is None else weight[order], divisor)


def gather_through(gradient: Tensor, tables: Sequence[GatherTable]) -> Tensor:
    """Propagate a gradient from the outputs back to the inputs, along the last dimensions.

    Args:
        gradient: Real or complex, of shape ``[..., *outputs]``.
        tables: One for each of the last dimensions.

    Returns:
        The gradient of shape ``[..., *inputs]``, not necessarily contiguous; half and bfloat16 are
        returned as float32. Each input is a sum in ascending order of the outputs, last dimension
        first.
    """
    if gradient.is_complex():
        parts = (gather_through(part, tables) for part in (gradient.real, gradient.imag))
        return torch.complex(*parts)
    result = gradient
    dtype = accumulation_dtype(gradient.dtype)
    if not gradient.numel():
        inputs = [len(table.offsets) for table in tables]
        return gradient.new_zeros((*gradient.shape[: -len(tables)], *inputs))
    for dim in range(-1, -len(tables) - 1, -1):
        table = tables[dim]
        rows = result.movedim(dim, 0)
        # One copy both converts the dtype and makes each row contiguous.
        copied = torch.empty(rows.shape, dtype=dtype, device=rows.device).copy_(rows)
        sums = sum_bags(copied.flatten(1), table.outputs, table.offsets, table.weight)
        result = sums.view(-1, *rows.shape[1:]).movedim(0, dim)
    return result


def cast_like(result: Tensor, like: Tensor, *, keep_format: bool) -> Tensor:
    """Return a result in the dtype of a tensor, contiguous or in that tensor's memory format."""
    memory_format = suggest_memory_format(like) if keep_format else torch.contiguous_format
    return torch.empty(
        result.shape, dtype=like.dtype, device=like.device, memory_format=memory_format
    ).copy_(result)
