"""Evaluation in which a sample's bits do not depend on what shares its batch.

Products of matrices, convolutions and attention choose their kernel, and with it their order of
summation, by the shape of the batch. Here the wrapped module sees one shape alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_d9m.errors import SettingError


class FixedShape(nn.Module):
    """Evaluates a module in batches of one size: larger ones are cut, smaller ones filled up.

    What fills up is the last sample, repeated; its outputs are dropped. Whether a sample's bits
    then still depend on its place in the batch is up to the kernels: ``d9m audit inference``
    measures it. Every tensor argument whose first dimension is that of the first one is a batch.

    Args:
        module: What is evaluated. Its outputs hold the batch in their first dimension.
        size: The number of samples that it always sees.

    Raises:
        SettingError: When ``size`` is not a whole number from 1; in a call, when no argument is a
            batch, or an output is none.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        super().__init__()
        if type(size) is not int or size < 1:
            raise SettingError(f"size is {size!r}; allowed: a whole number from 1.")
        self.module = module
        self.size = size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on parts of ``size`` samples, and put its outputs together."""
        count = _count_samples((args, kwargs))
        parts = []
        for start in range(0, count, self.size):
            chosen = self._choose(start, count)
            part_args, part_kwargs = tree_map(chosen, (args, kwargs))
            kept = min(self.size, count - start)
            parts.append(_keep(self.module(*part_args, **part_kwargs), self.size, kept))
        return _join(parts)

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
    """Evaluates a module one sample at a time: the bits of a sample are always its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, 1)


def _count_samples(arguments: Any) -> int:
    for leaf in tree_flatten(arguments)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf):
            return len(leaf)
    raise SettingError(
        "There is no batch among the arguments: none is a tensor with a first dimension of at "
        "least one sample."
    )


def _keep(outputs: Any, size: int, kept: int) -> Any:
    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim() or len(leaf) != size:
            raise SettingError(
                f"The module gave a tensor of shape {list(leaf.shape)} for {size} samples; allowed "
                "are outputs that hold the samples in their first dimension. Wrap the part of the "
                "model whose outputs do."
            )
        return leaf[:kept]

    return tree_map(keep, outputs)


def _join(parts: Sequence[Any]) -> Any:
    """Put nested outputs of the same form together, tensor by tensor."""
    flat = [tree_flatten(part) for part in parts]
    leaves = [
        torch.cat(leaf) if isinstance(leaf[0], Tensor) else leaf[0]
        for leaf in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])
