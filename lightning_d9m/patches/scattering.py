"""``scatter_reduce`` with ``reduce="prod"``; the other reductions are torch's own.

torch's CUDA kernel multiplies with atomics (a loop of compare and swap).
"""

import torch
from torch import Tensor

from lightning_d9m.patches.delegation import Original, overlaps_itself, raise_as_original
from lightning_d9m.patches.segments import multiply_segments


def scatter_reduce(
    original: Original,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Return a copy with the source's elements multiplied in, from first to last."""
    if reduce != "prod":
        result: Tensor = original(self, dim, index, src, reduce, include_self=include_self)
        return result
    return _scatter_product(original, self, dim, index, src, include_self)


def scatter_reduce_(
    original: Original,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Multiply the source's elements into a tensor, from first to last."""
    if reduce != "prod":
        result: Tensor = original(self, dim, index, src, reduce, include_self=include_self)
        return result
    if overlaps_itself(self):
        raise_as_original(original, self, dim, index, src, reduce, include_self=include_self)
    return self.copy_(_scatter_product(original, self, dim, index, src, include_self))


def _scatter_product(
    original: Original, self: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool
) -> Tensor:
    dims = max(self.dim(), 1)
    shapes = [part.shape if part.dim() else torch.Size([1]) for part in (self, index, src)]
    axis = dim % dims
    if (
        not -dims <= dim < dims
        or index.dtype not in (torch.int32, torch.int64)
        or src.dtype != self.dtype
        or (index.numel() and len({len(shape) for shape in shapes}) > 1)
        or any(
            wanted > given or (wanted > kept and side != axis)
            for side, (kept, wanted, given) in enumerate(zip(*shapes, strict=False))
            if index.numel()
        )
    ):
        raise_as_original(original, self, dim, index, src, "prod", include_self=include_self)
    if not index.numel():
        return self.clone()
    kept, wanted, _ = shapes
    places = _find_places(index.reshape(wanted).to(torch.int64), kept, axis)
    try:
        # On CUDA the check is made on the device, as torch's own is.
        inside = ((index >= 0) & (index < kept[axis])).all()
        torch.ops.aten._assert_async(inside)  # noqa: SLF001 - no wait for the device
    except RuntimeError:
        raise_as_original(original, self, dim, index, src, "prod", include_self=include_self)
    factors = src.view(shapes[2])[tuple(slice(size) for size in wanted)].flatten()
    before = self.flatten()
    if include_self:
        keys = torch.cat([torch.arange(before.numel(), device=places.device), places])
        after = multiply_segments(keys, torch.cat([before, factors]), before.numel())
    else:
        touched = torch.zeros_like(before, dtype=torch.bool).index_fill_(0, places, True)  # noqa: FBT003 - an argument of torch's
        after = multiply_segments(places, factors, before.numel()).to(self.dtype)
        after = torch.where(touched, after, before)
    return after.to(self.dtype).view(self.shape)


def _find_places(index: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Return the position in the flattened result that each element of the index stands for."""
    places, stride = torch.zeros_like(index), 1
    for side in reversed(range(len(shape))):
        ranks = torch.arange(index.shape[side], device=index.device)
        ranks = ranks.view([-1] + [1] * (len(shape) - 1 - side))
        places = places + (index if side == axis else ranks) * stride
        stride *= shape[side]
    return places.flatten()
