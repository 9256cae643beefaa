"""Parameters that ``FullyShardedDataParallel`` (FSDP1) has divided: the part of each on this rank.

It flattens the parameters of a module into one and gives each rank an equal part of that, so a rank
holds a contiguous range of a parameter, or nothing of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_d9m.hashing.shards import Shard, has_base, make_shard, may_be_sharded


class FlatLayout(NamedTuple):
    """The part of a parameter that a rank holds.

    Attributes:
        shape: The shape of the whole parameter.
        first: The number of the first element that the rank holds.
        data: The elements, of shape (n,).
        ranks: The ranks that together hold the parameter once.
    """

    shape: tuple[int, ...]
    first: int
    data: Tensor
    ranks: Sequence[int]

    def find_state_shard(self, state: Tensor) -> Shard | None:
        """Return the shard of an optimizer's state for this parameter.

        Returns:
            None for state without a value for each element, such as the number of steps.
        """
        if not state.dim() or state.numel() != self.data.numel():
            return None
        return make_shard(self.shape, state, self.first, self.ranks)


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
