"""Digests of a training's weights, buffers, optimizer and scheduler state.

Names are those of the user's model, without the prefix that ``torch.compile`` adds.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_128_hexdigest

from lightning_d9m.errors import DigestError
from lightning_d9m.hashing.address_cache import digest_located
from lightning_d9m.hashing.digest import digest_many, digest_value
from lightning_d9m.hashing.model_tensors import ModelTensors, plain_name
from lightning_d9m.hashing.value_bytes import encode

Groups = dict[str, dict[str, str]]

# Made once: `json.dumps` makes one in each call.
_to_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Snapshot:
    """Digests of one moment.

    Attributes:
        groups: Digest (32 hex digits) by name, by group: ``"weights"``, ``"buffers"``,
            ``"optimizers"``, ``"schedulers"``.
        totals: One digest for each group, over its names and digests.
    """

    groups: Groups
    totals: dict[str, str]


def take_snapshot(
    model: nn.Module | ModelTensors,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    schedulers: Sequence[Any] = (),
) -> Snapshot:
    """Digest all state that a training carries from step to step.

    An accelerator is synchronized once for all tensors.

    Args:
        model: Its parameters and buffers are digested; non-persistent buffers too, because they
            take part in the computation. Pass ``ModelTensors`` to cache them between snapshots.
        optimizers: Their state by parameter, and the settings of their parameter groups.
        schedulers: Objects with ``state_dict()``. Of an object in it without defined bytes, the
            type is digested: its effect shows in the learning rates.

    Raises:
        DigestError: When a weight or a buffer has no defined bytes.
    """
    model_tensors = model if isinstance(model, ModelTensors) else ModelTensors(model)
    parameters, buffers, names = model_tensors.look()
    tensors: dict[tuple[str, str], Tensor] = {}
    groups: Groups = {"weights": {}, "buffers": {}, "optimizers": {}, "schedulers": {}}
    for group, entries in (("weights", parameters), ("buffers", buffers)):
        for name, tensor in entries.items():
            if _is_lazy(tensor):
                groups[group][name] = digest_value(type(tensor))
            else:
                tensors[group, name] = tensor
    for number, optimizer in enumerate(optimizers):
        for name, value in optimizer_state(optimizer, names):
            if isinstance(value, Tensor):
                tensors["optimizers", f"{number}.{name}"] = value
            else:
                groups["optimizers"][f"{number}.{name}"] = _digest_state(value)
    for number, scheduler in enumerate(schedulers):
        groups["schedulers"][str(number)] = _digest_state(scheduler.state_dict())
    values = list(tensors.values())
    located = model_tensors.addresses.find(values)
    digests = digest_many(values) if located is None else digest_located(located)
    for (group, name), value in zip(tensors, digests, strict=True):
        groups[group][name] = value
    return Snapshot(groups, {group: _sum_up(entries) for group, entries in groups.items()})


def _is_lazy(tensor: Tensor) -> bool:
    """Return whether a parameter or buffer has no shape before its module's first input."""
    return bool(is_lazy(tensor))


def _digest_state(value: object) -> str:
    """Digest a value; of an object in it without defined bytes, digest the type."""
    try:
        return digest_value(value)
    except DigestError:
        return digest_value(_digestible(value))


def _digestible(value: object) -> object:
    try:
        encode(value)
    except DigestError:
        if isinstance(value, Mapping):
            return {key: _digestible(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [_digestible(entry) for entry in value]
        return type(value)
    return value


def _sum_up(entries: Mapping[str, str]) -> str:
    """Return one digest for a group: XXH3-128 of the JSON list of its sorted [name, digest]."""
    return xxh3_128_hexdigest(_to_json(sorted(entries.items())).encode())


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterable[tuple[str, object]]:
    """Yield (name, value) for each group's settings and each parameter's state."""
    position = 0
    for number, group in enumerate(optimizer.param_groups):
        yield f"group.{number}", {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names.get(id(parameter), f"parameter {position}")
            position += 1
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{key}.{name}", value


def describe_model(model: nn.Module) -> tuple[str, int]:
    """Return a digest of the model's names, shapes and dtypes, and its number of parameters.

    Two models with equal descriptions can be compared, whatever their weights.
    """
    description = {
        plain_name(name): [
            None if _is_lazy(tensor) else list(tensor.shape),
            str(tensor.dtype),
            kind,
        ]
        for kind, entries in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        )
        for name, tensor in entries
    }
    numbers = [0 if _is_lazy(p) else p.numel() for p in model.parameters()]
    return digest_value(description), sum(numbers)


def replicated_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that must be equal on all ranks.

    A parameter that is sharded over ranks (a DTensor with a placement other than ``Replicate``, a
    partition of DeepSpeed's ZeRO-3) differs from rank to rank by design.
    """
    return sorted(
        plain_name(name)
        for name, parameter in model.named_parameters()
        if all(placement.is_replicate() for placement in getattr(parameter, "placements", ()))
        and not hasattr(parameter, "ds_id")
    )
