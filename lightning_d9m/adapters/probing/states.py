"""What a batch starts from: generators, weights, buffers, the state of optimizers."""

from array import array
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_d9m.control.seeding import capture_rng
from lightning_d9m.evidence.probe_settings import ProbeSettings
from lightning_d9m.evidence.probes import Listener
from lightning_d9m.evidence.snapshot import optimizer_state, plain_name


def take_states(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: ProbeSettings,
    listener: Listener,
) -> None:
    """Hand the state that the selected kinds name to a listener."""
    kinds = settings.kinds
    if "rng" in kinds:
        _take_rng(listener)
    if "weight" in kinds:
        listener.add_tensors("weight", _selected(model.named_parameters(), settings))
    if "buffer" in kinds:
        listener.add_tensors("buffer", _selected(model.named_buffers(), settings))
    if "optimizer" in kinds:
        _take_optimizers(model, optimizers, settings, listener)


def _selected(entries: Iterable[tuple[str, Tensor]], settings: ProbeSettings) -> dict[str, Tensor]:
    named = {plain_name(name): tensor for name, tensor in entries}
    if "*" in settings.probe_modules:
        return named
    return {name: tensor for name, tensor in named.items() if settings.takes_parameter(name)}


def _take_rng(listener: Listener) -> None:
    state = capture_rng()
    version, words, normal = state.python
    listener.add("rng", "python", f"{version} {array('Q', words).tobytes().hex()} {normal}")
    own = state.numpy["state"]
    rest = f"{own['pos']} {state.numpy['has_gauss']} {float(state.numpy['gauss']).hex()}"
    listener.add("rng", "numpy", f"{own['key'].tobytes().hex()} {rest}")
    listener.add("rng", "torch", state.torch_cpu)
    for device, states in state.devices.items():
        listener.add_tensors("rng", {f"{device}:{n}": own for n, own in enumerate(states)})


def _take_optimizers(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: ProbeSettings,
    listener: Listener,
) -> None:
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for name, value in optimizer_state(optimizer, names):
            key, _, parameter = name.partition(".")
            if key != "group" and not settings.takes_parameter(parameter):
                continue
            if isinstance(value, Tensor):
                tensors[f"{number}.{name}"] = value
            elif isinstance(value, Mapping):  # each setting of a group by itself: which one differs
                for setting, own in value.items():
                    listener.add("optimizer", f"{number}.{name}:{setting}", own)
            else:
                listener.add("optimizer", f"{number}.{name}", value)
    listener.add_tensors("optimizer", tensors)
