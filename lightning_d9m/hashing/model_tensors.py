"""A model's parameters and buffers, cached between digests.

Walking a model takes longer than hashing its small tensors. The model is walked again only when it
has other tensors.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

from torch import Tensor, nn

from lightning_d9m.hashing.address_cache import AddressCache, TensorAddresses

_TABLES = tuple(map(attrgetter, ("_parameters", "_buffers", "_modules")))


# What wrappers of modules add: torch.compile, FSDP1, and activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without what wrappers of modules add.

    >>> plain_name("encoder._orig_mod.layers.0.weight")
    'encoder.layers.0.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class NamedTensors(dict[str, Tensor]):
    """Tensors by name that are digested together, with a cache of their addresses.

    Args:
        tensors: Names and tensors.
        addresses: The cache, if it must outlive this object; by default a new one.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, Tensor]], addresses: AddressCache | None = None
    ) -> None:
        super().__init__(tensors)
        self._tensors = list(self.values())
        self._places: dict[str, list[tuple[str, str]]] = {}
        self._addresses = AddressCache() if addresses is None else addresses

    def locate(self) -> TensorAddresses | None:
        """Return the addresses of the tensors; see :meth:`AddressCache.find`."""
        return self._addresses.find(self._tensors)

    def list_places(self, kind: str) -> list[tuple[str, str]]:
        """Return (kind, name) of each tensor, the same objects in every call."""
        places = self._places.get(kind)
        if places is None:
            places = self._places[kind] = [(kind, name) for name in self]
        return places


class ModelTensors:
    """A model's parameters and buffers; the model is walked again only when it has others.

    Args:
        model: The model.
        takes: Returns whether the parameter or buffer of a name is selected; None selects all.

    Attributes:
        addresses: Cache for the tensors that are digested together with them.
    """

    def __init__(self, model: nn.Module, takes: Callable[[str], bool] | None = None) -> None:
        self.addresses = AddressCache()
        self._model = model
        self._takes = lambda entry: takes is None or takes(entry[0])
        self._tables: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._filled: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._held: list[object] = []
        self._parameters = self._buffers = NamedTensors(())
        self._names: dict[int, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._listed: tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]] = ([], [])

    def look(self) -> tuple[NamedTensors, NamedTensors, dict[int, str]]:
        """Return the parameters, the buffers and the names."""
        tables, filled = self._tables, self._filled
        # Checks in C, without creating objects, that the modules hold the same objects under the
        # same names: this runs in every batch.
        if not (
            tables
            and all(map(eq, map(len, tables), self._sizes))
            and all(map(is_, chain.from_iterable(filled), self._keys))
            and all(map(is_, chain.from_iterable(map(dict.values, filled)), self._held))
        ):
            self._walk()
        return self._parameters, self._buffers, self._names

    @property
    def parameters(self) -> NamedTensors:
        """The selected parameters by name."""
        return self.look()[0]

    @property
    def buffers(self) -> NamedTensors:
        """The selected buffers by name."""
        return self.look()[1]

    @property
    def names(self) -> dict[int, str]:
        """The name of every parameter by its id."""
        return self.look()[2]

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by name, the same object while the model holds the same tensors."""
        self.look()
        return self._modules

    @property
    def listed(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """All parameters and all buffers, with torch's names."""
        self.look()
        return self._listed

    def list_saved(self) -> list[tuple[str, Tensor]]:
        """Return the names and tensors of all parameters, and of the buffers in a state dict."""
        parameters, buffers = self.listed
        fleeting = {
            f"{path}.{name}" if path else name
            for path, module in self.modules.items()
            for name in module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public list
        }
        return [*parameters, *((name, own) for name, own in buffers if name not in fleeting)]

    def _walk(self) -> None:
        self._modules = dict(self._model.named_modules())
        modules = self._modules.values()
        tables = [table for own in _TABLES for table in map(own, modules)]
        # TorchScript modules return copies of their tables, so such a model is always walked.
        self._tables = tables if all(isinstance(table, dict) for table in tables) else []
        self._sizes = list(map(len, self._tables))
        self._filled = list(filter(None, self._tables))
        self._keys = list(chain.from_iterable(self._filled))
        self._held = list(chain.from_iterable(map(dict.values, self._filled)))
        self._listed = list(self._model.named_parameters()), list(self._model.named_buffers())
        parameters, buffers = (
            [(plain_name(name), own) for name, own in part] for part in self._listed
        )
        self._names = {id(own): name for name, own in parameters}
        self._parameters = NamedTensors(filter(self._takes, parameters))
        self._buffers = NamedTensors(filter(self._takes, buffers))
