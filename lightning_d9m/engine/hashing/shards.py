"""The digest of a whole tensor from the shards that ranks hold, without gathering the tensor.

A shard here is a range of the tensor's bytes. Its rank hashes the chunks that lie within the range,
and keeps the bytes of the chunks that it shares with other ranks: fewer than 128 KiB at each end.
From these parts of all ranks follows the digest that the whole tensor has (docs/digest.md).
"""

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from lightning_d9m.engine.hashing.digest import ORDINARY, DigestQueue, make_header
from lightning_d9m.engine.hashing.xxh3 import CHUNK_BYTES, hash_chunk
from lightning_d9m.errors import DigestError

_LEAF = 8  # bytes of the digest of a chunk


@dataclass(frozen=True)
class Shard:
    """A range of a tensor's bytes that this rank holds.

    Attributes:
        header: The header of the whole tensor's digest.
        size: The whole tensor's bytes.
        begin: The first byte of the range.
        data: The bytes, of shape (n,) and dtype uint8.
        ranks: The ranks that together hold the tensor once.
    """

    header: bytes
    size: int
    begin: int
    data: Tensor
    ranks: tuple[int, ...]


class ShardParts(NamedTuple):
    """One rank's knowledge of a tensor.

    Attributes:
        begin: The first byte of the range.
        head: The bytes before the first chunk that the rank holds completely.
        leaves: The digests of those chunks, 8 bytes each.
        tail: The bytes after the last of them.
    """

    begin: int
    head: bytes
    leaves: bytes
    tail: bytes

    @property
    def end(self) -> int:
        """The byte after the range, but for the padding of the last chunk."""
        chunks = len(self.leaves) // _LEAF
        return self.begin + len(self.head) + chunks * CHUNK_BYTES + len(self.tail)


# FullyShardedDataParallel (FSDP1) flattens the parameters of a module into one and gives each rank
# an equal part of that, so a rank holds a contiguous range of a parameter, or nothing of it.
class FlatLayout(NamedTuple):
    """The part on this rank of a parameter that ranks divide, as a range of its elements.

    Attributes:
        shape: The shape of the whole parameter.
        first: The number of the first element that the rank holds.
        data: The elements.
        ranks: The ranks that together hold the parameter once.
    """

    shape: Sequence[int]
    first: int
    data: Tensor
    ranks: Sequence[int]

    def find_shard(self, value: Tensor) -> Shard | None:
        """Return the shard of the parameter, or of an optimizer's state for it.

        Returns:
            None for state without a value for each element, such as the number of steps, and if its
            elements are not bytes in row-major order.
        """
        ordinary = type(value) in ORDINARY and value.layout is torch.strided
        has_elements = value.dim() > 0 and value.numel() == self.data.numel()
        if not ordinary or value.is_quantized or not has_elements:
            return None
        header = make_header(value.dtype, tuple(self.shape))
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        size = value.itemsize
        return Shard(header, prod(self.shape) * size, self.first * size, flat, tuple(self.ranks))


def is_sharded_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor of which ranks hold different parts."""
    placements: Any = () if type(tensor) in ORDINARY else getattr(tensor, "placements", ())
    return any(not placement.is_replicate() for placement in placements)


def find_dtensor_shard(tensor: Any) -> Shard | None:
    """Return this rank's shard of a sharded DTensor.

    Returns:
        None unless the tensor is divided along its first dimension only.
    """
    placements = tensor.placements
    if any(getattr(placement, "dim", 0) != 0 or placement.is_partial() for placement in placements):
        return None
    (chunk,) = tensor.__create_chunk_list__()
    row = prod(tensor.shape[1:])
    mesh = tensor.device_mesh
    index = tuple(
        at if placement.is_replicate() else slice(None)
        for at, placement in zip(mesh.get_coordinate(), placements, strict=True)
    )
    ranks = mesh.mesh[index].reshape(-1).tolist()
    first = min(chunk.offsets[0], tensor.shape[0]) * row
    local = tensor.to_local()
    return FlatLayout(tensor.shape, first, local, ranks).find_shard(local)


def has_base(value: object, *names: str) -> bool:
    """Return whether the class of a value, or a base of it, has one of some names.

    The package that defines the base need not be imported.
    """
    return any(base.__name__ in names for base in type(value).__mro__)


def reshard(model: nn.Module) -> None:
    """Let the modules of FSDP2 hold their shards."""
    # After a forward pass without a backward pass, as in a validation, the outermost module holds
    # whole parameters, other objects than those of the optimizer, in the dtype of the computation.
    if not may_be_sharded():
        return
    for module in model.modules():
        if has_base(module, "FSDPModule"):
            module.reshard()  # type: ignore[operator]


def may_be_sharded() -> bool:
    """Return whether ranks may hold parts of tensors: FSDP needs a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def find_flat_layouts(model: nn.Module) -> dict[int, FlatLayout]:
    """Return the layout of each divided parameter by its id; none without FSDP1.

    With ``use_orig_params=False`` flat parameters replace the parameters of the model. They have no
    layout.
    """
    if not may_be_sharded():
        return {}
    return {
        key: layout
        for module in model.modules()
        if has_base(module, "FullyShardedDataParallel")
        for key, layout in _list_layouts(getattr(module, "_handle", None))
    }


def count_stages(model: nn.Module) -> int:
    """Return the number of stages of the pipeline that runs modules of a model; 0 without one."""
    # A stage holds its module, and a module does not know its stage, so that this looks through the
    # objects of the process, if the program has imported pipelines and opened a process group, from
    # which a stage takes its rank.
    pipelines = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelines is None or not may_be_sharded():
        return 0
    base = pipelines._PipelineStageBase  # noqa: SLF001 - of both kinds
    modules = set(map(id, model.modules()))
    stages = [value for value in gc.get_objects() if base in type(value).__mro__]
    counts = [s.num_stages for s in stages if modules & set(map(id, s.submod.modules()))]
    return max(counts, default=0)


def find_hybrid_sharding(owners: Iterable[object]) -> str | None:
    """Return why a model that FSDP1 divides within groups of ranks cannot be resumed, or None.

    Args:
        owners: A strategy, or the modules of the model with the wrappers around it.
    """
    for owner in owners:
        if has_base(owner, "FSDPStrategy", "FullyShardedDataParallel"):
            name = str(getattr(getattr(owner, "sharding_strategy", None), "name", ""))
            if "HYBRID" in name:
                return (
                    f"The model is divided with sharding_strategy={name}, with which the "
                    "optimizer's state differs after it is loaded. Use FULL_SHARD, or fully_shard "
                    "on a mesh of two dimensions."
                )
    return None


def _list_layouts(handle: Any) -> Iterator[tuple[int, FlatLayout]]:
    from torch import distributed

    flat = None if handle is None else handle.flat_param
    parameters = getattr(flat, "_params", None)
    if flat is None or parameters is None:
        return
    ranks = [distributed.get_rank()]
    if handle.uses_sharded_strategy:
        ranks = distributed.get_process_group_ranks(handle.process_group)
    # A parameter that is not in row-major order gets no layout: its range is not one of elements.
    contiguous = getattr(flat, "_contiguities", [True] * len(parameters))
    # Between forward and backward pass the parameters are whole, and the flat one keeps the shard.
    # Before the first forward pass it is the shard.
    shard = getattr(flat, "_local_shard", flat).detach()
    for parameter, part, shape, ordered in zip(
        parameters,
        flat._shard_param_infos,  # noqa: SLF001 - as above
        flat._shapes,  # noqa: SLF001 - as above
        contiguous,
        strict=True,
    ):
        if not ordered:
            continue
        first = part.intra_param_start_idx if part.in_shard else 0
        begin = part.offset_in_shard if part.in_shard else 0
        data = shard[begin : begin + (part.numel_in_shard if part.in_shard else 0)]
        yield id(parameter), FlatLayout(tuple(shape), first, data, ranks)


def read_shards(shards: Iterable[Shard]) -> list[ShardParts]:
    """Hash the chunks within the shards and copy the bytes at their ends.

    An accelerator is synchronized once for all chunks, and once for each shard whose ends lie
    within a chunk.
    """
    shards = list(shards)
    bounds = []  # of the chunks that each shard holds completely
    for shard in shards:
        length = end = len(shard.data)
        begin = -shard.begin % CHUNK_BYTES
        if shard.begin + length < shard.size:  # the last chunk of the tensor may be incomplete
            end -= (shard.begin + length) % CHUNK_BYTES
        bounds.append((begin, end) if begin < end else (length, length))
    # torch refuses to slice memory that FSDP has freed.
    inner = [shard.data[begin:end] for shard, (begin, end) in zip(shards, bounds, strict=True)]
    queue = DigestQueue()
    queue.read_chunks(inner)
    return [
        ShardParts(shard.begin, _copy(shard.data[:begin]), leaves, _copy(shard.data[end:]))
        for shard, (begin, end), leaves in zip(shards, bounds, queue.fetch_chunks(), strict=True)
    ]


def combine_shards(header: bytes, size: int, parts: Sequence[ShardParts]) -> str:
    """Return the digest of the whole tensor.

    Args:
        header: The header of its digest.
        size: Its bytes.
        parts: Those of all ranks that together hold it once, in any order.

    Raises:
        DigestError: If the parts do not cover the tensor.
    """
    # A chunk whose bytes lie on several ranks is put together from the tail of one part and the
    # head of the next, and also from parts that lie completely within it.
    leaves = pending = b""
    at = 0
    for part in sorted(parts):
        if part.begin == part.end:
            continue
        if part.begin != at:
            break
        at = min(part.end, size)
        pending += part.head
        if part.leaves:
            leaves += hash_chunk(pending) + part.leaves
            pending = b""
        pending += part.tail
        if len(pending) >= CHUNK_BYTES:
            leaves += hash_chunk(pending[:CHUNK_BYTES])
            pending = pending[CHUNK_BYTES:]
    if at != size:
        ranges = sorted((part.begin, part.end) for part in parts)
        raise DigestError(
            f"The shards of a tensor do not cover it: it has {size:,} bytes, the ranks hold "
            f"{ranges}. All ranks must digest the same training state."
        )
    return xxh3_128_hexdigest(header + leaves + hash_chunk(pending))


def _copy(data: Tensor) -> bytes:
    # A clone: numpy() makes a storage that it shares fixed in size, and FSDP resizes storages.
    return data.cpu().clone().numpy().tobytes() if len(data) else b""
