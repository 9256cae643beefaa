"""Strategies: which of Lightning's shard the model, and the registration of ours by name."""

from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

_STRATEGIES = {
    "ddp_d9m": (
        "lightning_d9m.lightning.logical_ranks.ddp:DDPDeterministicStrategy",
        "Bit-exact data-parallel training on any number of processes",
    ),
    "horovod_d9m": (
        "lightning_d9m.horovod.strategy:HorovodDeterministicStrategy",
        "Bit-exact data-parallel training with Horovod",
    ),
}


# Each rank holds a part of every parameter, and the parameters do not say which.
_SHARD_EVERY_PARAMETER = ("DeepSpeedStrategy",)
# Each rank holds parts of parameters, and saves its own files. FSDP's flat parameters and the
# DTensors of ModelParallelStrategy say which part a rank holds.
_SHARDED = (*_SHARD_EVERY_PARAMETER, "FSDPStrategy", "ModelParallelStrategy")


def is_sharded(strategy: object) -> bool:
    """Return whether a strategy divides the model among the ranks."""
    return _is_any_of(strategy, _SHARDED)


def shards_every_parameter(strategy: object) -> bool:
    """Return whether no parameter is the same on two ranks under a strategy."""
    return _is_any_of(strategy, _SHARD_EVERY_PARAMETER)


def find_hybrid_sharding(strategy: object) -> str | None:
    """Return how FSDP1 divides the model within groups of ranks; None if it does not."""
    if not _is_any_of(strategy, ("FSDPStrategy",)):
        return None
    name = str(getattr(getattr(strategy, "sharding_strategy", None), "name", ""))
    return name if "HYBRID" in name else None


def _is_any_of(strategy: object, names: tuple[str, ...]) -> bool:
    # By name: importing the classes would load both of Lightning's packages.
    return any(base.__name__ in names for base in type(strategy).__mro__)


def register_strategies(package: str) -> None:
    """Add our strategies to the registry of one Lightning package; a class loads on first use.

    Args:
        package: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
    """
    registry = import_module(f"{package}.strategies").StrategyRegistry
    for name, (path, description) in _STRATEGIES.items():
        if name not in registry:
            registry.register(name, partial(_make_strategy, path), description=description)


def _make_strategy(path: str, **options: Any) -> Any:
    return resolve_name(path)(**options)
