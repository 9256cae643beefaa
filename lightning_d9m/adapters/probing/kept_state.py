"""What a training step may change beside gradients: kept, and put back in place.

Buffers, the states of metrics, counters and lists: every attribute of every module that is a
tensor, an array, a number or a container of such. Objects of other classes are left alone.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Restore = Callable[[], Any]

# Modules, parameters and hooks: a step does not replace them. Buffers are among the rest.
_FIXED = frozenset(vars(nn.Module())) - {"_buffers"}


class KeptState:
    """The state of a model, and of further values, at the moment at which this is made.

    Args:
        model: Its weights and their gradients are not kept.
        values: What else a step may write into: its batch, say.
    """

    def __init__(self, model: nn.Module, values: object) -> None:
        self._memory: dict[int, Restore] = {}
        self._restores = [_keep_attributes(module, self._memory) for module in model.modules()]
        # Those of TorchScript are in none of its attributes.
        self._restores.append(_keep([values, *model.buffers()], self._memory))

    def restore(self) -> None:
        """Put everything back; the objects stay the same ones, for others may hold them too."""
        for restore in self._restores:
            restore()


def _keep_attributes(module: nn.Module, memory: dict[int, Restore]) -> Restore:
    attributes = vars(module)
    kept = {name: _keep(value, memory) for name, value in attributes.items() if name not in _FIXED}

    def restore() -> None:
        for name in [name for name in attributes if name not in _FIXED and name not in kept]:
            del attributes[name]
        for name, own in kept.items():
            attributes[name] = own()

    return restore


def _keep(value: Any, memory: dict[int, Restore]) -> Restore:
    """Return what puts a value back into its state and returns it: the same object."""
    if id(value) in memory:  # held twice, or holds itself
        return lambda: value
    if isinstance(value, nn.Module | nn.Parameter) or not isinstance(value, _KEPT):
        return lambda: value
    memory[id(value)] = lambda: value
    if isinstance(value, Tensor):
        return _keep_tensor(value)
    if isinstance(value, np.ndarray):
        return _keep_array(value)
    return _keep_container(value, memory)


def _keep_container(value: Any, memory: dict[int, Restore]) -> Restore:
    if isinstance(value, dict):
        return _keep_dict(value, memory)
    if isinstance(value, set):
        return _keep_items(value, list(value), value.update, memory)
    if isinstance(value, list | deque):
        return _keep_items(value, value, value.extend, memory)
    parts = [_keep(part, memory) for part in value]

    def restore() -> Any:
        for part in parts:
            part()
        return value

    return restore


_KEPT = (Tensor, np.ndarray, dict, set, list, deque, tuple)


def _keep_tensor(tensor: Tensor) -> Restore:
    copy = tensor.detach().clone()

    def restore() -> Tensor:
        # Through .data, so that autograd does not take it for a change of its own saved tensors.
        with torch.no_grad():
            tensor.data.copy_(copy)
        return tensor

    return restore


def _keep_array(array: np.ndarray) -> Restore:
    copy = array.copy()

    def restore() -> np.ndarray:
        if array.flags.writeable:
            array[...] = copy
        return array

    return restore


def _keep_dict(table: dict[Any, Any], memory: dict[int, Restore]) -> Restore:
    kept = {key: _keep(value, memory) for key, value in table.items()}

    def restore() -> Any:
        entries = {key: own() for key, own in kept.items()}
        table.clear()
        table.update(entries)
        return table

    return restore


def _keep_items(
    container: Any, items: Any, refill: Callable[[Any], None], memory: dict[int, Restore]
) -> Restore:
    kept = [_keep(item, memory) for item in items]

    def restore() -> Any:
        entries = [own() for own in kept]
        container.clear()
        refill(entries)
        return container

    return restore
