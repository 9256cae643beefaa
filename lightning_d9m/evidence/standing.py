"""Tensors that are digested in every batch and mostly stay where they are: weights and buffers.

To walk a model takes longer than to hash small tensors. It is done again when the model has others.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

from torch import Tensor, nn

from lightning_d9m.evidence.snapshot import plain_name
from lightning_d9m.evidence.whereabouts import Located, Whereabouts

_TABLES = tuple(map(attrgetter, ("_parameters", "_buffers", "_modules")))


class Standing(dict[str, Tensor]):
    """Tensors by name that are digested together again and again."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(tensors)
        self._tensors = list(self.values())
        self._whereabouts = Whereabouts()

    def locate(self) -> Located | None:
        """Return where the tensors lie; see :meth:`Whereabouts.find`."""
        return self._whereabouts.find(self._tensors)


class Roster:
    """A model's parameters and buffers, walked again only when it has others.

    Args:
        model: The model.
        takes: Says of a parameter's or buffer's name whether it is selected.
    """

    def __init__(self, model: nn.Module, takes: Callable[[str], bool]) -> None:
        self._model = model
        self._takes = takes
        self._tables: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._keys: list[str] = []
        self._held: list[object] = []
        self._parameters = self._buffers = Standing(())
        self._names: dict[int, str] = {}

    @property
    def parameters(self) -> Standing:
        """The selected parameters by name."""
        self._walk()
        return self._parameters

    @property
    def buffers(self) -> Standing:
        """The selected buffers by name."""
        self._walk()
        return self._buffers

    @property
    def names(self) -> dict[int, str]:
        """The name of every parameter by its id."""
        self._walk()
        return self._names

    def _walk(self) -> None:
        if self._is_as_walked():
            return
        modules = list(self._model.modules())
        self._tables = [table for own in _TABLES for table in map(own, modules)]
        self._sizes = list(map(len, self._tables))
        self._keys = list(chain.from_iterable(self._tables))
        self._held = list(chain.from_iterable(map(dict.values, self._tables)))
        parameters = [(plain_name(name), own) for name, own in self._model.named_parameters()]
        buffers = [(plain_name(name), own) for name, own in self._model.named_buffers()]
        self._names = {id(own): name for name, own in parameters}
        self._parameters = Standing(entry for entry in parameters if self._takes(entry[0]))
        self._buffers = Standing(entry for entry in buffers if self._takes(entry[0]))

    def _is_as_walked(self) -> bool:
        """Return whether modules hold the same under the same names.

        Without a line of Python for each, and without a new object: it is asked in every batch.
        """
        tables = self._tables
        return (
            bool(tables)
            and all(map(eq, map(len, tables), self._sizes))
            and all(map(is_, chain.from_iterable(tables), self._keys))
            and all(map(is_, chain.from_iterable(map(dict.values, tables)), self._held))
        )
