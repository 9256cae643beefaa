"""Evaluation in which a sample's output does not depend on the other samples of its batch.

Matrix products, convolutions and attention select their kernel, and with it their order of
summation, by the shape of the batch. Here the wrapped module always gets the same shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_d9m.errors import SettingError


class FixedShape(nn.Module):
    """Wrapper that evaluates a module in batches of one size: it splits larger batches and pads.

    It pads with copies of the last sample, whose outputs are dropped. Depending on the kernels, the
    output of a sample may still depend on its position in the batch; ``d9m audit inference``
    measures it. Every tensor argument whose first dimension is that of the first one is a batch.

    Args:
        module: The module to evaluate. The first dimension of its outputs is the batch.
        size: The batch size that it always gets.

    Raises:
        SettingError: ``size`` is not an integer from 1; or, in a call, no argument is a batch, or
            an output is not.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        super().__init__()
        if type(size) is not int or size < 1:
            raise SettingError(f"size is {size!r}; allowed: an integer from 1.")
        self.module = module
        self.size = size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on parts of ``size`` samples, and concatenate its outputs."""
        count = _count_samples((args, kwargs))
        parts = []
        for start in range(0, count, self.size):
            chosen = self._choose(start, count)
            part_args, part_kwargs = tree_map(chosen, (args, kwargs))
            kept = min(self.size, count - start)
            parts.append(_keep(self.module(*part_args, **part_kwargs), self.size, kept))
        return concatenate(parts)

    def _choose(self, start: int, count: int) -> Callable[[Any], Any]:
        def choose(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != count:
                return leaf
            part = leaf[start : start + self.size]
            missing = self.size - len(part)
            if not missing:
                return part
            return torch.cat([part, part[-1:].expand(missing, *part.shape[1:])])

        return choose


class PerSample(FixedShape):
    """Wrapper that evaluates a module one sample at a time, so no sample affects another."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, 1)


def _count_samples(arguments: Any) -> int:
    for leaf in tree_flatten(arguments)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf):
            return len(leaf)
    raise SettingError(
        "No argument is a batch, that is, a tensor with a first dimension of at least one sample."
    )


def _keep(outputs: Any, size: int, kept: int) -> Any:
    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim() or len(leaf) != size:
            raise SettingError(
                f"The module returned a tensor of shape {list(leaf.shape)} for {size} samples; "
                "allowed: outputs whose first dimension is the batch. Wrap the part of the model "
                "whose outputs have it."
            )
        return leaf[:kept]

    return tree_map(keep, outputs)


def concatenate(parts: Sequence[Any], dims: Sequence[int | None] | None = None) -> Any:
    """Concatenate nested values of the same structure, tensor by tensor.

    Args:
        parts: The values.
        dims: The dimension for each leaf, or None for a leaf that all share; by default the first
            dimension of each tensor.
    """
    flat = [tree_flatten(part) for part in parts]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    dims = dims or [0 if isinstance(column[0], Tensor) else None for column in columns]
    leaves = [
        column[0] if dim is None else torch.cat(column, dim)
        for column, dim in zip(columns, dims, strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])
