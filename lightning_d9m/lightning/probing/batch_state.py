"""The state at the start of a batch: generators, weights, buffers and optimizers."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.control.seeding import capture_rng
from lightning_d9m.hashing.training_state import ModelTensors, optimizer_state
from lightning_d9m.probes.settings import ProbeSettings
from lightning_d9m.probes.trace import Listener

# State of the model and its optimizers.
_MODEL_KINDS = ("weight", "buffer", "optimizer")


def take_states(
    model_tensors: ModelTensors,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: ProbeSettings,
    listener: Listener,
    scaler: Any = None,
) -> None:
    """Pass the state of the selected kinds to a listener.

    The settings select kinds and parameters. ``scaler`` is the ``torch.amp.GradScaler``, where
    the precision has one.
    """
    kinds = settings.kinds
    if "rng" in kinds:
        _take_rng(listener)
    if kinds.isdisjoint(_MODEL_KINDS):
        return
    parameters, buffers, names = model_tensors.look()
    if "weight" in kinds:
        listener.add_tensors("weight", parameters)
    if "buffer" in kinds:
        listener.add_tensors("buffer", buffers)
    if "optimizer" in kinds:
        _take_optimizers(names, optimizers, settings, listener)
        if scaler is not None:
            scale = scaler._get_scale_async()  # noqa: SLF001 - get_scale() waits for the device
            scale = scaler.get_scale() if scale is None else scale
            listener.add("optimizer", "scaler.scale", scale)


def take_step(
    model_tensors: ModelTensors,
    optimizer: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: ProbeSettings,
    listener: Listener,
) -> None:
    """Pass what an optimizer is about to use to a listener: gradients, and its state.

    The state was there when the batch began, too. What changed since would look like a change of
    the weights in the next batch.
    """
    if "gradient" in settings.kinds:
        take_gradients(model_tensors, optimizer, listener)
    if "optimizer" in settings.kinds:
        _, _, names = model_tensors.look()
        _take_optimizers(names, optimizers, settings, listener)


def take_gradients(model_tensors: ModelTensors, optimizer: Any, listener: Listener) -> None:
    """Pass the gradients of an optimizer's parameters to a listener."""
    parameters, _, _ = model_tensors.look()
    used = {id(p) for group in optimizer.param_groups for p in group["params"]}
    gradients = {
        name: parameter.grad
        for name, parameter in parameters.items()
        if id(parameter) in used and parameter.grad is not None
    }
    listener.add_tensors("gradient", gradients)


def _take_rng(listener: Listener) -> None:
    state = capture_rng()
    version, words, normal = state.python
    listener.add("rng", "python", f"{version} {array('Q', words).tobytes().hex()} {normal}")
    own = state.numpy["state"]
    rest = f"{own['pos']} {state.numpy['has_gauss']} {float(state.numpy['gauss']).hex()}"
    listener.add("rng", "numpy", f"{own['key'].tobytes().hex()} {rest}")
    listener.add("rng", "torch", state.torch_cpu)
    for device, states in state.devices.items():
        listener.add_tensors("rng", {f"{device}:{n}": own for n, own in states.items()})


def _take_optimizers(
    names: Mapping[int, str],
    optimizers: Sequence[torch.optim.Optimizer],
    settings: ProbeSettings,
    listener: Listener,
) -> None:
    tensors: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for name, value in optimizer_state(optimizer, names):
            key, _, parameter = name.partition(".")
            if key != "group" and not settings.takes_parameter(parameter):
                continue
            if isinstance(value, Tensor):
                tensors[f"{number}.{name}"] = value
            elif isinstance(value, Mapping):
                # One value for each setting of a group, so that a difference names it.
                for setting, own in value.items():
                    listener.add("optimizer", f"{number}.{name}:{setting}", own)
            else:
                listener.add("optimizer", f"{number}.{name}", value)
    listener.add_tensors("optimizer", tensors)
