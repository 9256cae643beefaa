"""Places of a tensor that indices name, and exact sums there; see ``exact_sums``."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from lightning_d9m.patches.exact_sums import Part, accumulate, plan_pieces
from lightning_d9m.patches.triton.launch import allocate

_MANY = 2  # outputs for each value, beyond which only those that get a value are read


def add_to_places(target: Tensor, sizes: Sequence[int], keys: Tensor, values: Tensor) -> None:
    """Add values to the places of a tensor that keys name; see :func:`update_places`.

    The tensor may be complex.
    """
    if target.is_complex():
        target, values = view_parts(target), view_parts(values)

    def add(rows: Tensor, keys: Tensor, values: Tensor) -> None:
        sums = rows.view(1, len(rows), -1)
        add_to_sums(sums, keys, values.reshape(1, len(keys), -1), include=True)

    update_places(target, sizes, keys, values, add)


def update_places(
    target: Tensor,
    sizes: Sequence[int],
    keys: Tensor,
    values: Tensor,
    update: Callable[[Tensor, Tensor, Tensor], None],
) -> None:
    """Change the places of a tensor that keys name.

    Time and memory grow with the number of values, not with the size of the target.

    Args:
        target: Of shape ``[*sizes, *rest]``, with any strides.
        sizes: The sizes of the dimensions that the keys go through.
        keys: Positions as if these dimensions were one; of shape ``[m]``.
        values: Of shape ``[m, *rest]``.
        update: Takes contiguous rows of shape ``[n, *rest]``, which it changes, and keys and values
            for them.
    """
    if not values.numel():
        return
    if not gets_few(target, values):
        whole = target.contiguous()
        update(whole.view(prod(sizes), *target.shape[len(sizes) :]), keys, values)
        if whole is not target:
            target.copy_(whole)
        return
    ordered = torch.sort(keys, stable=True).values
    slots = torch.searchsorted(ordered, keys)  # the first place of an equal key
    rows = target[unravel(ordered, sizes)].contiguous()  # it has the strides of the target
    update(rows, slots, values)
    # Values for one place are equal, so the order of the writes has no effect.
    target.index_put_(unravel(keys, sizes), rows.index_select(0, slots))


def gets_few(target: Tensor, values: Tensor) -> bool:
    """Return whether the values are so few that only their places should be read and written."""
    return target.numel() > _MANY * values.numel()


def add_to_sums(out: Tensor, index: Tensor, values: Tensor, *, include: bool) -> None:
    """Write into each place the sum of the values that go to it.

    Args:
        out: Floating point, contiguous, of shape ``[outer, count, inner]``.
        index: Of shape ``[m]``, or of the values' shape. What is outside ``0 .. count - 1`` is
            skipped.
        values: Of shape ``[outer, m, inner]``; float64 only if ``out`` is.
        include: Whether what is in ``out`` is a term as well. A place without a value then keeps
            its bits; else it becomes 0.
    """
    places = index.view(1, -1, 1) if index.dim() == 1 else index
    part = Part(places, values.contiguous().unsqueeze(1))
    pieces = plan_pieces(out.dtype, values.shape[1] + 1)
    accumulate(out.unsqueeze(1), lambda: [part], pieces, include=include)


def sum_by_index(index: Tensor, values: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the sums of shape ``[outer, count, inner]``; see :func:`add_to_sums`."""
    outer, _, inner = values.shape
    out = allocate((outer, count, inner), dtype, values.device)
    add_to_sums(out, index, values, include=False)
    return out


def view_parts(values: Tensor) -> Tensor:
    """Return the real and the imaginary parts in a last dimension of 2."""
    return torch.view_as_real(values.resolve_conj())


def unravel(places: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Turn positions in a flattened tensor into one index for each of its dimensions."""
    indices: list[Tensor] = []
    for size in reversed(shape[1:]):
        indices.append(places % size)
        places = places // size
    return (places, *reversed(indices))
