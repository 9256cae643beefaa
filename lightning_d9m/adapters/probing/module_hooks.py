"""Hooks on modules and parameters: what goes in, what comes out, and what flows back.

A hook only reads. None is put inside a compiled region, where it would change what is compiled.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_d9m.evidence.leaves import list_leaves
from lightning_d9m.evidence.probe_settings import ROOT, ProbeSettings
from lightning_d9m.evidence.probes import Listener
from lightning_d9m.evidence.standing import plain_name


def hook_model(
    model: nn.Module, settings: ProbeSettings, kinds: frozenset[str], listener: Listener
) -> ExitStack:
    """Hand what the selected modules and parameters meet to a listener.

    Args:
        model: The model; of a module that is shared, the first name counts.
        settings: They select the modules.
        kinds: Kinds that are wanted.
        listener: Takes the values.

    Returns:
        What removes the hooks when it is closed.
    """
    with ExitStack() as hooks:
        for name, module in eager_modules(model):
            if not settings.takes_module(name):
                continue
            if "input" in kinds:
                take = partial(_take_input, listener, name or ROOT)
                hooks.callback(module.register_forward_pre_hook(take, with_kwargs=True).remove)
            # In this order: what comes out, then a hook for what flows back into it.
            for kind, taking in (("output", _take_output), ("grad_output", _await_gradient)):
                if kind in kinds:
                    taken = partial(taking, listener, name or ROOT)
                    hooks.callback(module.register_forward_hook(taken).remove)
        if "local_gradient" in kinds:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and settings.takes_parameter(plain_name(name)):
                    _hook_parameter(hooks, parameter, plain_name(name), listener)
        return hooks.pop_all()


def eager_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for each module whose call is not compiled together with its caller's.

    Of a compiled module only the call from outside is seen.
    """
    if getattr(model, "_compiler_ctx", None) is not None:
        return  # the whole LightningModule is compiled
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen or module._compiled_call_impl is not None:  # noqa: SLF001 - module.compile() leaves no other trace
            continue
        seen.add(id(module))
        yield plain_name(name), module
        if not hasattr(module, "_orig_mod") and not isinstance(module, torch.jit.ScriptModule):
            prefix = f"{name}." if name else ""
            children = [(prefix + child, inner) for child, inner in module.named_children()]
            waiting += reversed(children)


def _take_input(
    listener: Listener, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if _is_traced():
        return
    if len(args) == 1 and not kwargs:
        listener.add("input", name, args[0])
    else:
        listener.add("input", name, {str(key): value for key, value in enumerate(args)} | kwargs)


def _take_output(listener: Listener, name: str, _: nn.Module, __: object, output: object) -> None:
    if not _is_traced():
        listener.add("output", name, output)


def _await_gradient(
    listener: Listener, name: str, _: nn.Module, __: object, output: object
) -> None:
    if _is_traced() or not torch.is_grad_enabled():
        return
    for path, leaf in list_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            place = f"{name}:{path}" if path else name
            leaf.register_hook(partial(_take_gradient, listener, place))


def _take_gradient(listener: Listener, place: str, gradient: Tensor) -> None:
    listener.add("grad_output", place, gradient)


def _hook_parameter(hooks: ExitStack, parameter: Tensor, name: str, listener: Listener) -> None:
    def take(parameter: Tensor) -> None:
        if parameter.grad is not None:
            listener.add("local_gradient", name, parameter.grad)

    handle = parameter.register_post_accumulate_grad_hook(take)
    # To the front, before the hook of a strategy that sends the gradient away.
    own = cast(Any, parameter)._post_accumulate_grad_hooks  # noqa: SLF001
    own.move_to_end(handle.id, last=False)
    hooks.callback(handle.remove)


def _is_traced() -> bool:
    """Return whether this call is traced rather than run."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None  # noqa: SLF001
