"""A model's modules, metrics and tensors by name, found again only when the model has others."""

from itertools import chain, compress
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_d9m.control.object_walk import MODULE_ATTRIBUTES, are_data
from lightning_d9m.hashing.model_tensors import ModelTensors


class ModelParts:
    """The modules, metrics and tensors of a model that a save and a validation read.

    ``tensors`` are those of the model, if they have been found already.
    """

    def __init__(self, model: nn.Module, tensors: ModelTensors | None = None) -> None:
        self._tensors = tensors or ModelTensors(model)
        self._modules: dict[str, nn.Module] = {}
        self._metrics: dict[str, Any] = {}
        # The attributes of the modules that hold data only, and which of them are not torch's.
        self._plain: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._are_own: list[bool] = []
        self._searched: dict[str, nn.Module] = {}

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules."""
        self._look()
        return self._modules

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics and collections of metrics."""
        self._look()
        return self._metrics

    @property
    def parameters(self) -> list[tuple[str, Tensor]]:
        """The names and tensors of all parameters."""
        return self._tensors.listed[0]

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The names and tensors of all parameters and buffers."""
        parameters, buffers = self._tensors.listed
        return [*parameters, *buffers]

    @property
    def searched(self) -> dict[str, nn.Module]:
        """The modules among whose own attributes may be generators."""
        self._look()
        # In C, for all attributes at once: most modules of a model hold only numbers and texts.
        same = list(chain.from_iterable(self._plain)) == self._names
        values = chain.from_iterable(map(dict.values, self._plain))
        if not same or not are_data(compress(values, self._are_own)):
            self._divide()
        return self._searched

    def _look(self) -> None:
        """Find the parts again if the model holds other modules or tensors."""
        modules = self._tensors.modules
        if modules is self._modules:
            return
        self._modules = modules
        self._metrics = find_metric_modules(modules)
        self._divide()

    def _divide(self) -> None:
        self._searched, self._plain = {}, []
        for name, module in self._modules.items():
            own = (value for key, value in vars(module).items() if key not in MODULE_ATTRIBUTES)
            if are_data(own):
                self._plain.append(vars(module))
            else:
                self._searched[name] = module
        self._names = list(chain.from_iterable(self._plain))
        self._are_own = [name not in MODULE_ATTRIBUTES for name in self._names]


def find_metric_modules(modules: dict[str, nn.Module]) -> dict[str, Any]:
    """Return the metrics and collections of metrics among modules."""
    # Each base, instead of isinstance: that asks all subclasses of Metric, which is abstract.
    kinds = {Metric, MetricCollection}
    of_metrics = {kind for kind in set(map(type, modules.values())) if kinds & {*kind.__mro__}}
    return {name: module for name, module in modules.items() if type(module) in of_metrics}
