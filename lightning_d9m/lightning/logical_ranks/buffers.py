"""Buffers of a module in a step of several logical ranks."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Saved:
    """The tensors that a module held as buffers, and copies of their values."""

    owners: list[tuple[dict[str, Tensor | None], str, Tensor]]
    values: list[Tensor]


class StepBuffers:
    """Lets each logical rank start from the buffers at the start of the step.

    Running statistics of batch normalization thus follow logical rank 0 alone, as they follow
    process 0 in DDP, and no logical rank depends on those before it in its process.
    """

    def __init__(self, module: nn.Module, block: range) -> None:
        self._module = module
        self._alone = len(block) == 1
        self._has_first = block.start == 0
        self._start: _Saved | None = None
        self._first: _Saved | None = None

    def begin(self) -> None:
        """Save the buffers at the start of a step."""
        self._first = None
        if not self._alone:
            self._start = self._save()

    def put_back(self) -> None:
        """Restore the buffers after a logical rank, before the next one."""
        if self._start is None:
            return
        if self._has_first and self._first is None:
            self._first = self._save()
        _restore(self._start)

    def finish(self) -> list[Tensor]:
        """Restore what logical rank 0 left, in its process; return the buffers to broadcast."""
        if self._first is not None:
            _restore(self._first)
        self._start = self._first = None
        return [tensor for _, _, tensor in self._list()]

    def _save(self) -> _Saved:
        owners = list(self._list())
        return _Saved(owners, [tensor.clone() for _, _, tensor in owners])

    def _list(self) -> Iterable[tuple[dict[str, Tensor | None], str, Tensor]]:
        for module in self._module.modules():
            buffers = module._buffers  # noqa: SLF001 - a module may have replaced the tensor
            for name, tensor in buffers.items():
                if tensor is not None:
                    yield buffers, name, tensor


@torch.no_grad()
def _restore(saved: _Saved) -> None:
    for buffers, name, tensor in saved.owners:
        buffers[name] = tensor
    if saved.values:
        tensors = [tensor for _, _, tensor in saved.owners]
        torch._foreach_copy_(tensors, saved.values)
