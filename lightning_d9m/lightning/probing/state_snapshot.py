"""A snapshot of the state that a training step may change besides gradients.

Buffers, the states of metrics, counters and lists: every attribute of every module that is a
tensor, an array, a number, a random generator, or a container of such. A dataclass, and an object
of a class that the program defines, is a container of its attributes. Objects of a library's
classes, and of those that extend one, are left alone.
"""

import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Restore = Callable[[], Any]

# Modules, parameters and hooks: a step does not replace them. Buffers are among the rest.
_FIXED = frozenset(vars(nn.Module())) - {"_buffers"}


class StateSnapshot:
    """The state of a model, and of further values, at the moment at which this is made.

    The weights of the model and their gradients are not kept. The values are what else a step
    may write into: its batch, say.
    """

    def __init__(self, model: nn.Module, values: object) -> None:
        self._known: set[int] = set()
        self._snapshots: tuple[tuple[type, Callable[[Any], Restore]], ...] = (
            (Tensor, _snapshot_tensor),
            (np.ndarray, _snapshot_array),
            (torch.Generator, lambda own: _restoring(own.set_state, own.get_state())),
            (np.random.Generator, lambda own: _snapshot_bits(own.bit_generator)),
            (np.random.RandomState, lambda own: _restoring(own.set_state, own.get_state())),
            (random.Random, lambda own: _restoring(own.setstate, own.getstate())),
            (dict, self._snapshot_dict),
            (set, lambda own: self._snapshot_items(own, list(own), own.update)),
            (list, lambda own: self._snapshot_items(own, own, own.extend)),
            (deque, lambda own: self._snapshot_items(own, own, own.extend)),
            (tuple, self._snapshot_tuple),
        )
        self._restores = [self._snapshot_attributes(module, _FIXED) for module in model.modules()]
        # Buffers of TorchScript are in none of its attributes.
        self._restores.append(self._snapshot([values, *model.buffers()]))

    def restore(self) -> None:
        """Put everything back; the objects stay the same ones, for others may hold them too."""
        for restore in self._restores:
            restore()

    def _snapshot(self, value: Any) -> Restore:
        """Return what puts a value back into its state and returns it: the same object."""
        known = id(value) in self._known  # held twice, or holds itself
        snapshot = None if known else self._find_snapshot(value)
        if snapshot is None:
            return lambda: value
        self._known.add(id(value))
        restore = snapshot(value)

        def restore_and_return() -> Any:
            restore()
            return value

        return restore_and_return

    def _find_snapshot(self, value: Any) -> Callable[[Any], Restore] | None:
        """Return what keeps a value of this type; None for one that is left alone."""
        if isinstance(value, nn.Module | nn.Parameter | type):
            return None
        for kind, snapshot in self._snapshots:
            if isinstance(value, kind):
                return snapshot
        own = hasattr(value, "__dict__") and (
            is_dataclass(value) or _is_user_class(value.__class__)
        )
        return self._snapshot_attributes if own else None

    def _snapshot_attributes(self, owner: Any, fixed: frozenset[str] = frozenset()) -> Restore:
        attributes = vars(owner)
        kept = {name: self._snapshot(own) for name, own in attributes.items() if name not in fixed}

        def restore() -> None:
            for name in attributes.keys() - kept.keys() - fixed:
                del attributes[name]
            for name, own in kept.items():
                attributes[name] = own()

        return restore

    def _snapshot_dict(self, table: dict[Any, Any]) -> Restore:
        kept = {key: self._snapshot(value) for key, value in table.items()}

        def restore() -> None:
            entries = {key: own() for key, own in kept.items()}
            table.clear()
            table.update(entries)

        return restore

    def _snapshot_items(self, container: Any, items: Any, refill: Callable[[Any], None]) -> Restore:
        kept = [self._snapshot(item) for item in items]

        def restore() -> None:
            entries = [own() for own in kept]
            container.clear()
            refill(entries)

        return restore

    def _snapshot_tuple(self, parts: tuple[Any, ...]) -> Restore:
        kept = [self._snapshot(part) for part in parts]

        def restore() -> None:
            for part in kept:
                part()

        return restore


@cache
def _is_user_class(kind: type) -> bool:
    """Return whether the program defines a class and all its bases."""
    return all(map(_is_of_program, kind.__mro__[:-1]))


def _is_of_program(kind: type) -> bool:
    name = kind.__module__
    if name.partition(".")[0] in _LIBRARIES:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (file is not None and not file.startswith(_LIBRARY_FOLDERS))


# Wherever they are installed: what they keep about a training is theirs to keep.
_LIBRARIES = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_d9m")
_PATHS = sysconfig.get_paths()
_LIBRARY_FOLDERS = tuple(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _snapshot_tensor(tensor: Tensor) -> Restore:
    copy = tensor.detach().clone()

    def restore() -> None:
        # Through .data, so that autograd does not take it for a change of its own saved tensors.
        with torch.no_grad():
            tensor.data.copy_(copy)

    return restore


def _snapshot_array(array: np.ndarray) -> Restore:
    if not array.flags.writeable:  # a mapped file may be larger than the memory
        return lambda: None
    copy = array.copy()

    def restore() -> None:
        array[...] = copy

    return restore


def _snapshot_bits(bits: np.random.BitGenerator) -> Restore:
    return _restoring(lambda state: setattr(bits, "state", state), bits.state)


def _restoring(restore: Callable[[Any], object], state: Any) -> Restore:
    return lambda: restore(state)
