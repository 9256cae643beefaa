"""Reference sums over logical ranks, straight from the definition, and awkward values."""

import math
import operator

import torch


def hold_sums(values, merges, add=operator.add):
    """Return the sums that are held when values have come in, each added to so many before it."""
    held = []
    for value, count in zip(values, merges, strict=True):
        for _ in range(count):
            value = add(held.pop(), value)  # noqa: PLW2901 - the sum so far
        held.append(value)
    return held


def add_in_tree_order(leaves):
    """Add tensors from the top of the tree down; None is +0.0."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while 2 * half < len(leaves):
        half *= 2
    left, right = add_in_tree_order(leaves[:half]), add_in_tree_order(leaves[half:])
    if left is None and right is None:
        return None
    return (0.0 if left is None else left) + (0.0 if right is None else right)


def average_leaves(leaves):
    """Return the average in the dtype of the leaves, rounded once; None if all are None."""
    first = next((leaf for leaf in leaves if leaf is not None), None)
    if first is None:
        return None
    if first.is_complex():
        parts = [None if leaf is None else torch.view_as_real(leaf) for leaf in leaves]
        return torch.view_as_complex(average_leaves(parts))
    wide = first.dtype if first.element_size() >= 4 else torch.float32
    total = add_in_tree_order([None if leaf is None else leaf.to(wide) for leaf in leaves])
    average = torch.div(total, len(leaves)).to(first.dtype)
    return average.masked_fill_(average.isnan(), math.nan)


def make_leaf(shape, dtype, generator, *, awkward=False):
    """Return random values of very different sizes; on request with zeros, infinities and NaNs."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values *= torch.exp2(torch.randint(-9, 9, tuple(shape), generator=generator))
    leaf = values.to(dtype)
    if awkward:
        special = torch.tensor([-0.0, -0.0, 0.0, math.inf, -math.inf, math.nan, 1e-40, 3e38])
        picks = special[torch.randint(len(special), tuple(shape), generator=generator)].to(dtype)
        leaf = torch.where(torch.rand(shape, generator=generator) < 0.5, picks, leaf)
        if dtype is torch.float32:  # NaNs with different payloads
            payloads = torch.randint(1, 2**20, tuple(shape), generator=generator)
            with_payload = (0x7FC00000 + payloads).to(torch.int32).view(torch.float32)
            leaf = torch.where(leaf.isnan(), with_payload, leaf)
    return leaf


def bits(tensor):
    """Return the bytes of a tensor, dtype and shape, or None."""
    if tensor is None:
        return None
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), plain.numpy().tobytes()


def complete(pending):
    """Fold a sum that was started, and wait for the parts of others."""
    pending.fold()
    pending.finish()
