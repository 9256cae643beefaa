"""Register our strategies with Lightning by name; each class is loaded when it is first used."""

from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

_STRATEGIES = {
    "horovod_d9m": (
        "lightning_d9m.horovod.strategy:HorovodDeterministicStrategy",
        "Bit-exact data-parallel training with Horovod",
    ),
}


def register_strategies(package: str) -> None:
    """Add our strategies to the registry of one of Lightning's packages.

    Args:
        package: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
    """
    registry = import_module(f"{package}.strategies").StrategyRegistry
    for name, (path, description) in _STRATEGIES.items():
        if name not in registry:
            registry.register(name, partial(_make_strategy, path), description=description)


def _make_strategy(path: str, **options: Any) -> Any:
    return resolve_name(path)(**options)
