"""Digests of a training's weights, buffers, optimizer and scheduler state.

Names are those of the user's model, without the prefix that ``torch.compile`` adds.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_128_hexdigest

from lightning_d9m.engine.hashing.digest import DigestQueue, digest_value
from lightning_d9m.engine.hashing.shards import (
    FlatLayout,
    Shard,
    find_dtensor_shard,
    is_sharded_dtensor,
)

Groups = dict[str, dict[str, str]]
_EXTRA = "_extra_state"  # torch's name for it in a state dict
_GROUPS = ("weights", "buffers", "optimizers", "schedulers")


# What wrappers of modules add: torch.compile, FSDP1, and activation checkpointing.
# Without them a run that is compiled or wrapped differently has the same names, so its weights can
# be compared.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without what wrappers of modules add.

    >>> plain_name("encoder._orig_mod.layers.0.weight")
    'encoder.layers.0.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class ModelTensors:
    """A model's parameters and buffers as they are now, by name.

    ``takes`` returns whether the parameter or buffer of a name is selected; None selects all.
    """

    def __init__(self, model: nn.Module, takes: Callable[[str], bool] | None = None) -> None:
        self._model = model
        self._takes = takes

    def look(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[int, str]]:
        """Return the selected parameters and buffers, and the name of every parameter by its id."""
        takes = self._takes or bool  # a name is not empty
        found = [[(plain_name(name), tensor) for name, tensor in part] for part in self.listed]
        parameters, buffers = ({n: tensor for n, tensor in part if takes(n)} for part in found)
        return parameters, buffers, {id(tensor): name for name, tensor in found[0]}

    @property
    def listed(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """All parameters and all buffers, with torch's names."""
        return list(self._model.named_parameters()), list(self._model.named_buffers())

    def list_saved(self) -> list[tuple[str, Tensor]]:
        """Return the names and tensors of all parameters, and of the buffers in a state dict."""
        return [
            (f"{path}.{name}" if path else name, tensor)
            for path, module in self._model.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())  # noqa: SLF001 - torch's own lists walk through the model once each
            if tensor is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public list
        ]


@dataclass
class Snapshot:
    """Digests of one moment on one rank; those of tensors that ranks share out are added last.

    Attributes:
        groups: Digest (32 hex digits) by name, by group: ``"weights"``, ``"buffers"``,
            ``"optimizers"``, ``"schedulers"``.
        shards: The parts of tensors that this rank holds, by group and name.
        owners: By group and name, the shard of the parameter to which a value belongs of which
            only the ranks know that hold a part of the parameter.
        scattered: Tensors whose elements are not in order on any rank, by group and name.
        undigested: What counts by its type alone, because it cannot be read, and why.
    """

    groups: Groups = field(default_factory=lambda: {group: {} for group in _GROUPS})
    shards: dict[tuple[str, str], Shard] = field(default_factory=dict)
    owners: dict[tuple[str, str], Shard] = field(default_factory=dict)
    scattered: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    undigested: list[str] = field(default_factory=list)

    def total(self) -> dict[str, str]:
        """Return for each group the XXH3-128 of the JSON list of its sorted [name, digest]."""
        texts = {
            # As JSON, so that a reader in another language can compute it from the names.
            group: json.dumps(sorted(entries.items()), separators=(",", ":"))
            for group, entries in self.groups.items()
        }
        return {group: xxh3_128_hexdigest(text.encode()) for group, text in texts.items()}

    def divide(self, place: tuple[str, str], value: object, layout: FlatLayout | None) -> bool:
        """Take a value if ranks hold parts of it; return whether it need not be digested here.

        Args:
            place: Its group and name.
            value: The parameter, the buffer, or the state of an optimizer.
            layout: That of its parameter, if FSDP1 divides it.
        """
        if layout is not None:
            part = layout.data if place[0] == "weights" else value
            shard = layout.find_shard(part) if isinstance(part, Tensor) else None
            if shard is None:
                # Only these ranks have the entry, as the number of steps: the others hold nothing
                # of the parameter.
                holder = layout.find_shard(layout.data)
                if holder is not None:
                    self.owners[place] = holder
                return False
        elif isinstance(value, Tensor) and is_sharded_dtensor(value):
            shard = find_dtensor_shard(value)
            if shard is None:
                self.scattered[place] = value
                return True
        else:
            return False
        self.shards[place] = shard
        return True


def take_partial_snapshot(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    schedulers: Sequence[Any] = (),
    layouts: Mapping[int, FlatLayout] | None = None,
    *,
    switches: bool = True,
) -> Snapshot:
    """Digest all state that a training carries from step to step, as far as this rank holds it.

    An accelerator is synchronized once. An object without defined bytes, in the state of an
    optimizer or a scheduler or the extra state of a module, counts by its type, and is named in
    ``undigested``.

    Args:
        model: Its parameters and buffers are digested; non-persistent buffers too, because they
            take part in the computation. What ``get_extra_state`` of a module returns counts as a
            buffer.
        optimizers: Their state by parameter, and the settings of their parameter groups.
        schedulers: Objects with ``state_dict()``.
        layouts: What ``find_flat_layouts`` returns; None to digest shards as if they were tensors.
        switches: Whether settings of optimizers and schedulers count that are True, False or None
            by default. Versions of torch have different ones.

    Raises:
        DigestError: When a weight or a buffer has no defined bytes.
    """
    # Only FSDP1 has layouts: without it the model is not searched twice.
    names = ModelTensors(model).look()[2] if layouts else {}
    divided = {names[key]: layout for key, layout in (layouts or {}).items() if key in names}
    taken = Snapshot()
    whole: dict[tuple[str, str], Tensor] = {}
    others: dict[tuple[str, str], object] = {}
    for group, name, value in list_state(model, optimizers, schedulers, switches=switches):
        if layouts is not None and group != "schedulers":
            parameter = name.split(".", 2)[2] if group == "optimizers" else name
            layout = None if group == "buffers" else divided.get(parameter)
            if taken.divide((group, name), value, layout):
                continue
        # A lazy parameter has no shape before its module's first input.
        if isinstance(value, Tensor) and not is_lazy(value):
            whole[group, name] = value
        else:
            others[group, name] = type(value) if isinstance(value, Tensor) else value
    queue = DigestQueue()
    for (group, name), value in others.items():
        reasons: list[str] = []
        queue.add_value(value, reasons.append)
        taken.undigested += [f"{group} {name}: {reason}" for reason in reasons]
    queue.add(whole.values())
    for (group, name), found in zip([*others, *whole], queue.fetch(), strict=True):
        taken.groups[group][name] = found
    return taken


def list_state(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    *,
    switches: bool = True,
) -> Iterable[tuple[str, str, object]]:
    """Yield (group, name, value) of all state; see ``take_partial_snapshot``."""
    parameters, buffers, names = ModelTensors(model).look()
    for group, named in (("weights", parameters), ("buffers", buffers)):
        yield from ((group, name, tensor) for name, tensor in named.items())
    for path, module in model.named_modules():
        # What a module keeps beside its tensors, and saves with them.
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name = plain_name(f"{path}.{_EXTRA}" if path else _EXTRA)
            yield "buffers", name, module.get_extra_state()
    for number, optimizer in enumerate(optimizers):
        for name, value in optimizer_state(optimizer, names, f"{number}."):
            yield "optimizers", name, _choose_settings(value, optimizer, switches=switches)
    for number, scheduler in enumerate(schedulers):
        settings = _choose_settings(scheduler.state_dict(), scheduler, switches=switches)
        yield "schedulers", str(number), settings


def _choose_settings(value: object, owner: object, *, switches: bool) -> object:
    """Leave out the entries of a mapping that are True, False or None, unless these count.

    Those always count that the owner's constructor takes and that differ from its defaults.
    """
    if switches or not isinstance(value, Mapping):
        return value
    # A release of torch that adds an option to an optimizer adds its default to the settings, where
    # an older release has no entry. Both compute the same.
    options = signature(type(owner)).parameters
    return {
        key: entry
        for key, entry in value.items()
        if not isinstance(entry, bool | None)
        or entry is not getattr(options.get(key), "default", entry)
    }


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], prefix: str = ""
) -> Iterable[tuple[str, Any]]:
    """Yield (name, value) for each group's settings and each parameter's state."""
    position = 0
    # Settings by group and state by parameter, because a difference in each has another cause.
    for number, group in enumerate(optimizer.param_groups):
        # Loading a full checkpoint into sharded optimizers turns tuples (betas) into lists.
        yield (
            f"{prefix}group.{number}",
            {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in group.items()
                if key != "params"
            },
        )
        for parameter in group["params"]:
            # The optimizer knows no names, and may hold parameters that are not of the model.
            name = names.get(id(parameter), f"parameter {position}")
            position += 1
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{prefix}{key}.{name}", value


def describe_model(
    model: nn.Module, layouts: Mapping[int, FlatLayout] | None = None
) -> tuple[str, int]:
    """Return a digest of the model's names, shapes and dtypes, and its number of parameters.

    Two models with equal descriptions can be compared, whatever their weights.
    """
    description: dict[str, list[object]] = {}
    count = 0
    for kind, entries in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in entries:
            divided: Any = (layouts or {}).get(id(tensor), tensor)
            sizes = None if is_lazy(tensor) else list(divided.shape)
            description[plain_name(name)] = [sizes, str(tensor.dtype), kind]
            count += prod(sizes) if kind == "parameter" and sizes is not None else 0
    return digest_value(description), count


def replicated_names(
    model: nn.Module, layouts: Mapping[int, FlatLayout] | None = None
) -> list[str]:
    """Return the names of the parameters that must have equal digests on all ranks.

    A sharded parameter counts if its digest is that of the whole parameter: DTensors and those with
    a layout. A flat parameter of FSDP1 differs from rank to rank by design.
    """
    return sorted(
        plain_name(name)
        for name, parameter in model.named_parameters()
        if id(parameter) in (layouts or {}) or not hasattr(parameter, "_is_flat_param")
    )


def count_sharded(model: nn.Module, layouts: Mapping[int, FlatLayout]) -> int:
    """Return the number of parameters of which ranks hold different parts."""
    return sum(
        id(parameter) in layouts
        or is_sharded_dtensor(parameter)
        or hasattr(parameter, "_is_flat_param")
        for parameter in model.parameters()
    )
