"""A Trainer's logical ranks, schedulers, ranks, callbacks and metrics."""

import dis
import inspect
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.state.parts import is_of_lightning
from lightning_d9m.errors import SettingError

OPTIMIZERS = "optimizers["
"""The names of optimizers begin with it, see ``name_program``."""
KEY = "lightning_d9m"
"""The key of the state of our callback among those of the callbacks in a checkpoint."""

Trainer: TypeAlias = Any
"""A Trainer of Lightning, whose annotations lack half of the attributes that we read."""


def get_logical_ranks(trainer: Trainer) -> int | None:
    """Return the number of logical ranks, or None without them."""
    number: int | None = getattr(trainer.strategy, "logical_ranks", None)
    return number


def list_schedulers(trainer: Trainer) -> list[object]:
    """Return the schedulers of learning rates."""
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def ranks_of(trainer: Trainer) -> Ranks:
    """Return the Trainer's ranks, which communicate through its strategy.

    Raises:
        SettingError: From the gather, if the strategy does not gather from all ranks.
    """
    if trainer.world_size == 1:
        return Ranks(trainer.global_rank)

    def exchange(data: bytes) -> list[bytes]:
        local = torch.frombuffer(bytearray(data), dtype=torch.int64)
        # Through the strategy, which knows its ranks also where torch.distributed has no group.
        gathered = trainer.strategy.all_gather(local.to(trainer.strategy.root_device))
        if gathered.numel() != trainer.world_size * len(local):
            raise SettingError(
                f"The Trainer has {trainer.world_size} ranks, but all_gather of "
                f"{type(trainer.strategy).__name__} returned {gathered.numel()} values for "
                f"{len(local)} of each rank. Start one process for each rank and initialize "
                "their process group, or set the number of devices to 1."
            )
        return [row.numpy().tobytes() for row in gathered.cpu().reshape(trainer.world_size, -1)]

    return Ranks(trainer.global_rank, exchange)


def find_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return the metrics and collections of the module and of its callbacks, by path."""
    # Here, so that without Lightning, which brings it, the error is that Lightning is missing.
    from torchmetrics import Metric, MetricCollection

    kinds, owners = {Metric, MetricCollection}, {"model": trainer.lightning_module}
    for path, callback in name_callbacks(trainer.callbacks).items():
        for name, value in getattr(callback, "__dict__", {}).items():
            if isinstance(value, nn.Module) and value is not trainer.lightning_module:
                owners[f"{path}.{name}"] = value
    found: dict[str, Any] = {}
    for path, owner in owners.items():
        for name, module in owner.named_modules():
            # Each base, instead of isinstance: that asks all subclasses of Metric, an abstract one.
            if kinds & {*type(module).__mro__}:
                found[f"{path}.{name}" if name else path] = module
    return found


def name_callbacks(callbacks: Iterable[object]) -> dict[str, Any]:
    """Return the callbacks by names that do not depend on other callbacks."""
    named: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for callback in callbacks:
        # By class and not by place, so that a callback that is added or removed does not rename the
        # others.
        base = f"callbacks.{type(callback).__name__}"
        named[f"{base}#{counts[base]}" if counts[base] else base] = callback
        counts[base] += 1
    return named


def name_program(trainer: Trainer) -> dict[str, Any]:
    """Return the objects that a program may change in a fit, by name, besides the module."""
    callbacks = [each for each in trainer.callbacks if getattr(each, "state_key", None) != KEY]
    owners = {"datamodule": trainer.datamodule, "trainer": trainer} | name_callbacks(callbacks)
    owners |= {f"{OPTIMIZERS}{n}]": each for n, each in enumerate(trainer.optimizers)}
    owners |= {f"schedulers[{n}]": each for n, each in enumerate(list_schedulers(trainer))}
    return owners


@cache
def list_stored(kind: Any) -> frozenset[str]:
    """Return the attributes that Lightning and torch.optim set in objects of a class.

    Their other attributes are the program's.
    """
    # The code is read, because a new object has only what `__init__` sets, Lightning sets most
    # attributes later, in hooks and through properties, and a list of names would have holes with
    # each release.
    members = [
        part
        for base in kind.__mro__
        if is_of_lightning(base) or base.__module__.startswith("torch.optim.")
        for part in vars(base).values()
    ]
    members += [
        each for part in members if isinstance(part, property) for each in (part.fget, part.fset)
    ]
    functions = filter(inspect.isfunction, members)
    return frozenset[str]().union(*(find_attributes(each, "STORE_ATTR") for each in functions))


@cache
def find_attributes(function: Any, operation: str) -> frozenset[str]:
    """Return the attributes on which the code of a function, and of those in it, operates."""
    codes = [inspect.unwrap(function).__code__]
    for code in codes:
        codes += filter(inspect.iscode, code.co_consts)
    steps = (step for code in codes for step in dis.get_instructions(code))
    return frozenset(step.argval for step in steps if step.opname == operation)


def get_logical_steps(trainer: Trainer) -> Any:
    """Return the ``LogicalSteps`` of a run, which hold the state of its logical ranks, or None."""
    # Without an import of their module, which a training without logical ranks does not load.
    return getattr(trainer.strategy, "logical_steps", None)


def like_parameter(saved: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a saved gradient on the device of its parameter, and in its layout if it is dense.

    Of a parameter that is divided it is the shard of this rank.
    """
    if saved.layout is not torch.strided:
        return saved.to(parameter.device, copy=True)
    made = torch.empty_like(parameter, requires_grad=False)
    local_shard(made).copy_(saved)
    return made


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard that this rank holds of a ``DTensor``; of any other the tensor itself."""
    shard: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return shard
