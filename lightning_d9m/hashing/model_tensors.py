"""Tensors that are digested in every batch and mostly stay where they are: weights and buffers.

To walk a model takes longer than to hash small tensors. It is done again when the model has others.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

from torch import Tensor, nn

from lightning_d9m.hashing.address_cache import AddressCache, TensorAddresses

_TABLES = tuple(map(attrgetter, ("_parameters", "_buffers", "_modules")))


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix of ``torch.compile``.

    >>> plain_name("encoder._orig_mod.layers.0.weight")
    'encoder.layers.0.weight'
    """
    return name.replace("_orig_mod.", "")


class Standing(dict[str, Tensor]):
    """Tensors by name that are digested together again and again."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(tensors)
        self._tensors = list(self.values())
        self._whereabouts = AddressCache()

    def locate(self) -> TensorAddresses | None:
        """Return where the tensors lie; see :meth:`AddressCache.find`."""
        return self._whereabouts.find(self._tensors)


class ModelTensors:
    """A model's parameters and buffers, walked again only when it has others.

    Args:
        model: The model.
        takes: Says of a parameter's or buffer's name whether it is selected; None takes all.

    Attributes:
        whereabouts: Of what is digested together with them.
    """

    def __init__(self, model: nn.Module, takes: Callable[[str], bool] | None = None) -> None:
        self.whereabouts = AddressCache()
        self._model = model
        self._takes = lambda entry: takes is None or takes(entry[0])
        self._tables: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._filled: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._held: list[object] = []
        self._parameters = self._buffers = Standing(())
        self._names: dict[int, str] = {}

    def look(self) -> tuple[Standing, Standing, dict[int, str]]:
        """Return the parameters, the buffers and the names at once."""
        tables, filled = self._tables, self._filled
        # Whether modules hold the same under the same names: without a line of Python for each, and
        # without a new object, because it is asked in every batch.
        if not (
            tables
            and all(map(eq, map(len, tables), self._sizes))
            and all(map(is_, chain.from_iterable(filled), self._keys))
            and all(map(is_, chain.from_iterable(map(dict.values, filled)), self._held))
        ):
            self._walk()
        return self._parameters, self._buffers, self._names

    @property
    def parameters(self) -> Standing:
        """The selected parameters by name."""
        return self.look()[0]

    @property
    def buffers(self) -> Standing:
        """The selected buffers by name."""
        return self.look()[1]

    @property
    def names(self) -> dict[int, str]:
        """The name of every parameter by its id."""
        return self.look()[2]

    def _walk(self) -> None:
        modules = list(self._model.modules())
        tables = [table for own in _TABLES for table in map(own, modules)]
        # TorchScript keeps its own elsewhere and shows copies, so such a model is always walked.
        self._tables = tables if all(isinstance(table, dict) for table in tables) else []
        self._sizes = list(map(len, self._tables))
        self._filled = list(filter(None, self._tables))
        self._keys = list(chain.from_iterable(self._filled))
        self._held = list(chain.from_iterable(map(dict.values, self._filled)))
        parameters = [(plain_name(name), own) for name, own in self._model.named_parameters()]
        buffers = [(plain_name(name), own) for name, own in self._model.named_buffers()]
        self._names = {id(own): name for name, own in parameters}
        self._parameters = Standing(filter(self._takes, parameters))
        self._buffers = Standing(filter(self._takes, buffers))
