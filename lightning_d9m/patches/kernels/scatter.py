"""``scatter``, ``scatter_add`` and ``scatter_reduce``: elements reduced where an index says.

torch's CUDA kernels multiply and add with atomics. Here sums are exact, see ``exact_sums``, and
factors are sorted by place. What torch does deterministically (assignment,
and the reductions of ``scatter_reduce`` other than the product) is left to torch.
"""

from functools import partial
from math import prod

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.places import add_to_places, add_to_sums, gets_few, unravel
from lightning_d9m.patches.primitives.fallback import Original, holds, raise_as_original
from lightning_d9m.patches.primitives.segment_reduce import Update, multiply_into

_LEGACY = {"add": "sum", "multiply": "prod"}


def scatter_reduce(
    original: Original,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor | Update:
    """Multiply the source's elements into a tensor, from first to last."""
    bound = partial(original, self, dim, index, src, reduce, include_self=include_self)
    if reduce != "prod":
        result: Tensor = bound()
        return result
    return _scatter(bound, self, dim, index, src, "prod", include_self=include_self)


def scatter(
    original: Original, self: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str
) -> Update:
    """Add the source's elements to a tensor, or multiply them into it from first to last."""
    bound = partial(original, self, dim, index, src, reduce=reduce)
    if reduce not in _LEGACY:
        raise_as_original(bound)
    return _scatter(bound, self, dim, index, src, _LEGACY[reduce])


def scatter_add(original: Original, self: Tensor, dim: int, index: Tensor, src: Tensor) -> Update:
    """Add the source's elements to a tensor."""
    return _scatter(partial(original, self, dim, index, src), self, dim, index, src, "sum")


def _scatter(
    bound: Original,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Update:
    dims = max(self.dim(), 1)
    shape, wanted, given = (part.shape or torch.Size([1]) for part in (self, index, src))
    axis = dim % dims
    if (
        not -dims <= dim < dims
        or index.dtype not in (torch.int32, torch.int64)
        or src.dtype != self.dtype
        or (index.numel() and not len(shape) == len(wanted) == len(given))
        or any(
            want > give or (want > have and side != axis)
            for side, (have, want, give) in enumerate(zip(shape, wanted, given, strict=False))
            if index.numel()
        )
    ):
        raise_as_original(bound)
    if not index.numel():
        return Update(lambda _: None)
    if not holds((index >= 0) & (index < shape[axis])):
        raise_as_original(bound)
    index, values = index.reshape(wanted), src.view(given)[tuple(slice(size) for size in wanted)]

    def add(target: Tensor) -> None:
        _add(target.view(shape), axis, index, values)

    def write(target: Tensor) -> None:
        places = _find_places(index, shape, axis)
        flat = target.is_contiguous()
        multiply_into(
            target.view(-1) if flat else target,
            (places,) if flat else unravel(places, shape),
            places,
            target.numel(),
            values.flatten(),
            include_self=include_self,
        )

    return Update(add if reduce == "sum" else write)


def _add(target: Tensor, axis: int, index: Tensor, values: Tensor) -> None:
    shape, wanted = target.shape, index.shape
    if not (target.is_floating_point() or target.is_complex()):
        # torch adds integers alike in any order.
        places = unravel(_find_places(index, shape, axis), shape)
        target.index_put_(places, values.flatten(), accumulate=True)
        return
    alike = wanted[:axis] + wanted[axis + 1 :] == shape[:axis] + shape[axis + 1 :]
    if not alike or target.is_complex() or gets_few(target, values):
        add_to_places(target, shape, _find_places(index, shape, axis), values.flatten())
        return
    outer, inner = prod(shape[:axis]), prod(shape[axis + 1 :])
    whole = target.contiguous()
    add_to_sums(
        whole.view(outer, shape[axis], inner),
        index.reshape(outer, wanted[axis], inner),
        values.reshape(outer, wanted[axis], inner),
        include=True,
    )
    if whole is not target:
        target.copy_(whole)


def _find_places(index: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Return the position in the flattened result that each element of the index stands for."""
    places, stride = torch.zeros_like(index, dtype=torch.int64), 1
    for side in reversed(range(len(shape))):
        ranks = torch.arange(index.shape[side], device=index.device)
        ranks = ranks.view([-1] + [1] * (len(shape) - 1 - side))
        places = places + (index if side == axis else ranks) * stride
        stride *= shape[side]
    return places.flatten()
