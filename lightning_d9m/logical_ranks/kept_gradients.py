"""Gradients of earlier batches, to which later ones are added before a step."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.logical_ranks.accumulation import Gradients, separate


class KeptGradients:
    """A set of gradients for each logical rank of a process, from one batch to the next.

    Autograd adds the gradients of a logical rank to those of its earlier batches, as if the rank
    were alone in its process. The sum over batches is therefore the same on any number of
    processes, and only the gradients of the last batch travel.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        self._named = list(named_parameters)
        self._kept: dict[int, Gradients] = {}

    def keep(self, logical_rank: int) -> None:
        """Take the gradients of a logical rank away, until ``put_back``."""
        gradients = [parameter.grad for _, parameter in self._named]
        separate(gradients)
        self._kept[logical_rank] = gradients
        for _, parameter in self._named:
            parameter.grad = None

    def put_back(self, logical_rank: int) -> None:
        """Set ``grad`` to what was kept of a logical rank, before its next backward pass."""
        gradients = self._kept.pop(logical_rank, None)
        if gradients is not None:
            for (_, parameter), gradient in zip(self._named, gradients, strict=True):
                parameter.grad = gradient

    def clear(self) -> None:
        """Forget the gradients."""
        self._kept.clear()

    def capture(self) -> dict[str, dict[int, Tensor]]:
        """Return copies of the gradients by parameter and logical rank."""
        found: dict[str, dict[int, Tensor]] = {}
        for rank, gradients in self._kept.items():
            for (name, _), gradient in zip(self._named, gradients, strict=True):
                if gradient is not None:
                    found.setdefault(name, {})[rank] = gradient.detach().to("cpu", copy=True)
        return found

    def restore(self, saved: Mapping[str, Mapping[int, Any]], block: range) -> None:
        """Restore the gradients of the logical ranks of this process."""
        for rank in block:
            gradients = [saved.get(name, {}).get(rank) for name, _ in self._named]
            if any(gradient is not None for gradient in gradients):
                self._kept[rank] = [
                    None if each is None else torch.empty_like(parameter).copy_(each).detach()
                    for (_, parameter), each in zip(self._named, gradients, strict=True)
                ]
