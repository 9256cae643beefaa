"""Tensors that are digested in every batch and mostly stay where they are: weights and buffers.

To walk a model takes longer than to hash small tensors. It is done again when the model has others.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from lightning_d9m.evidence.snapshot import plain_name
from lightning_d9m.evidence.whereabouts import Located, Whereabouts

_TABLES = tuple(map(attrgetter, ("_parameters", "_buffers", "_modules")))


class Standing(dict[str, Tensor]):
    """Tensors by name that are digested together again and again."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(tensors)
        self._whereabouts = Whereabouts()

    def locate(self) -> Located | None:
        """Return where the tensors lie; see :meth:`Whereabouts.find`."""
        return self._whereabouts.find(list(self.values()))


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
        self._structure: tuple[list[Any], ...] = ()
        self._kept: list[object] = []
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
        if self._structure and _structure_of(self._tables) == self._structure:
            return
        modules = list(self._model.modules())
        self._tables = [table for own in _TABLES for table in map(own, modules)]
        self._structure = _structure_of(self._tables)
        # As long as they are kept, nothing else can have the id of one of them.
        self._kept = [held for table in self._tables for held in table.values()]
        parameters = [(plain_name(name), own) for name, own in self._model.named_parameters()]
        buffers = [(plain_name(name), own) for name, own in self._model.named_buffers()]
        self._names = {id(own): name for name, own in parameters}
        self._parameters = Standing(entry for entry in parameters if self._takes(entry[0]))
        self._buffers = Standing(entry for entry in buffers if self._takes(entry[0]))


def _structure_of(tables: list[dict[str, Any]]) -> tuple[list[Any], ...]:
    """Return the names and identities of what modules hold, without a line of Python for each."""
    held = chain.from_iterable(map(dict.values, tables))
    return list(map(len, tables)), list(chain.from_iterable(tables)), list(map(id, held))
