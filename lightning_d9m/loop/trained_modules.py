"""The modules that the optimizers of a process train, as one module with stable names."""

import gc
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_d9m.loop.batches import unwrap_model


class _Combined(nn.Module):
    """Holds several modules of a program; not one of its modules itself."""


def list_parameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the tensors that optimizers change, in the order of their groups."""
    return [p for own in optimizers for group in own.param_groups for p in group["params"]]


def find_trained_module(optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
    """Return a module that holds every tensor that the optimizers change.

    It is the program's own module if one holds them all, without the wrappers of DDP and the like.
    Of several, each is a child that has the name of its class. A tensor that no module holds, such
    as a learned temperature, is called ``loose_0``, ``loose_1``, ....

    Names and order depend only on the order of the optimizers and their tensors, not on the order
    in which the garbage collector lists objects.
    """
    parameters = list_parameters(optimizers)
    places = {id(parameter): place for place, parameter in reversed([*enumerate(parameters)])}
    missing = set(places)
    chosen: list[nn.Module] = []
    for module, held in _list_holders(places):
        if missing & held:
            chosen.append(module)
            missing -= held
    if len(chosen) == 1 and not missing:
        return unwrap_model(chosen[0])
    combined = _Combined()
    for module in chosen:
        inner = unwrap_model(module)
        combined.add_module(_find_free_name(type(inner).__name__, combined), inner)
    loose = [p for place, p in enumerate(parameters) if id(p) in missing and places[id(p)] == place]
    for number, parameter in enumerate(loose):
        if isinstance(parameter, nn.Parameter):
            combined.register_parameter(f"loose_{number}", parameter)
        else:
            combined.register_buffer(f"loose_{number}", parameter)
    return combined


def _list_holders(places: dict[int, int]) -> list[tuple[nn.Module, set[int]]]:
    """Return the outermost modules that hold trained tensors, and the ids of these tensors.

    Those that hold the most come first, and of equal ones the one whose first tensor comes first.
    """
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    # A module whose constructor has not called that of nn.Module yet has no tables.
    modules = [m for m in modules if "_modules" in m.__dict__ and not isinstance(m, _Combined)]
    inner = {id(child) for module in modules for child in module.children()}
    found = []
    for module in modules:
        if id(module) in inner:
            continue
        held = {id(p) for p in _list_tensors(module)} & places.keys()
        if held:
            found.append((module, held))
    found.sort(key=lambda pair: (-len(pair[1]), min(map(places.__getitem__, pair[1])), _path(pair)))
    return found


def _list_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _path(pair: tuple[nn.Module, set[int]]) -> str:
    kind = type(pair[0])
    return f"{kind.__module__}.{kind.__qualname__}"


def _find_free_name(name: str, module: nn.Module) -> str:
    taken, number = name, 1
    while hasattr(module, taken):
        number += 1
        taken = f"{name}_{number}"
    return taken
