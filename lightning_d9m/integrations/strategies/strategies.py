"""Strategies: which of Lightning's shard the model, and the registration of ours by name."""

import os
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from lightning_d9m.engine.control.settings import variable_of
from lightning_d9m.engine.hashing.shards import has_base
from lightning_d9m.errors import SettingError

_STRATEGIES = {
    "ddp_d9m": (
        "lightning_d9m.integrations.strategies.steps.strategy:DDPDeterministicStrategy",
        "Bit-exact data-parallel training on any number of processes",
    ),
    "horovod_d9m": (
        "lightning_d9m.integrations.strategies.horovod.strategy:HorovodDeterministicStrategy",
        "Bit-exact data-parallel training with Horovod",
    ),
}


# Each rank holds parts of parameters, which say what part it is, and saves its own files.
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")
# Those whose weights, optimizer states and checkpoints the tests record, and their subclasses.
_RECORDED = (*_SHARDED, "SingleDeviceStrategy", "DDPStrategy")
_VARIABLE = variable_of("logical_ranks")
_XLA = "the generators of XLA devices are neither seeded nor restored"
_REFUSED = {
    "DeepSpeedStrategy": "it keeps the states of optimizers, and with ZeRO stage 3 the weights, in "
    "partitions that the parameters do not show",
    "SingleDeviceXLAStrategy": _XLA,
    "XLAStrategy": _XLA,
}


def check_strategy(strategy: object) -> None:
    """Refuse a strategy of whose runs a ledger would not show every difference.

    Raises:
        SettingError: With the reason.
    """
    refused = [reason for name, reason in _REFUSED.items() if has_base(strategy, name)]
    if refused or not has_base(strategy, *_RECORDED):
        reason = (refused or ["it derives from no strategy whose runs were recorded in tests"])[0]
        raise SettingError(
            f"The strategy of the Trainer is {type(strategy).__name__}, and its ledger would "
            f"not show every difference: {reason}. Use one device, or a strategy of DDP, FSDP, "
            "ModelParallelStrategy or Horovod; or remove the DeterminismCallback."
        )


def refuse_unread_variable(strategy: Any) -> None:
    """Refuse a number of logical ranks in the environment that a strategy does not read.

    Raises:
        SettingError: If the variable is set, and the strategy is not one with logical ranks.
    """
    value = os.environ.get(_VARIABLE)
    if value and not hasattr(strategy, "logical_ranks"):
        raise SettingError(
            f"{_VARIABLE} is {value!r}, but the Trainer has the strategy "
            f"{type(strategy).__name__}, which trains without logical ranks: use "
            "strategy='ddp_d9m' or strategy='horovod_d9m', or unset the variable."
        )


def is_sharded(strategy: object) -> bool:
    """Return whether a strategy divides the model among the ranks."""
    return has_base(strategy, *_SHARDED)


def register_strategies(package: str) -> None:
    """Add our strategies to the registry of one Lightning package; a class loads on first use."""
    registry = import_module(f"{package}.strategies").StrategyRegistry

    # A function of the path, and not of the class: importing it would load Horovod's strategy, or
    # that of logical ranks, in every program.
    def make(path: str, **options: Any) -> Any:
        return resolve_name(path)(**options)

    for name, (path, description) in _STRATEGIES.items():
        # Each import of a strategy and each callback registers, and the registry refuses a name
        # that it has.
        if name not in registry:
            registry.register(name, partial(make, path), description=description)
