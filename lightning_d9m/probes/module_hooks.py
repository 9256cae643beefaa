"""Hooks on modules and parameters for inputs, outputs and gradients.

A hook only reads. Compiled regions get no hooks: a hook would change the compiled code.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lightning_d9m.hashing.pytree_leaves import list_pytree_leaves
from lightning_d9m.hashing.training_state import plain_name
from lightning_d9m.ledger.kinds import ROOT
from lightning_d9m.probes.settings import ProbeSettings
from lightning_d9m.probes.trace import Listener

# Attributes of modules that only call another one: FSDP1's, and those of activation checkpointing.
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# A call that is traced rather than run, by one of the two, gives nothing.
_get_tracing_state = torch._C._get_tracing_state  # noqa: SLF001 - the only way to it


def hook_model(
    model: nn.Module,
    settings: ProbeSettings,
    kinds: frozenset[str],
    listener: Listener,
    *,
    is_compiled: bool = False,
) -> ExitStack:
    """Pass the inputs, outputs and gradients of the selected modules to a listener.

    Of a module that is shared, the first name counts. ``is_compiled`` says that the steps of the
    model are compiled, so that no module of it is called from outside.

    Returns:
        A stack that removes the hooks when it is closed.
    """
    with ExitStack() as hooks:
        for name, module in () if is_compiled else eager_modules(model):
            if not settings.takes_module(name):
                continue
            if "input" in kinds:
                take = partial(_take_input, listener, name or ROOT)
                # Not through the module: TorchScript's takes hooks, but forbids to ask for them.
                handle = nn.Module.register_forward_pre_hook(module, take, with_kwargs=True)
                hooks.callback(handle.remove)
            wanted = ("output" in kinds, "grad_output" in kinds)
            if any(wanted):
                take = partial(_take_output, listener, name or ROOT, wanted)
                hooks.callback(nn.Module.register_forward_hook(module, take).remove)
        if "local_gradient" in kinds:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and settings.takes_parameter(plain_name(name)):
                    _hook_parameter(hooks, parameter, plain_name(name), listener)
        return hooks.pop_all()


def eager_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for each module whose call is not compiled together with its caller's.

    Of a compiled module only the call from outside is seen.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen or module._compiled_call_impl is not None:  # noqa: SLF001 - module.compile() leaves no other trace
            continue
        seen.add(id(module))
        if not any(hasattr(module, own) for own in _WRAPPED):
            yield plain_name(name), module
        if not hasattr(module, "_orig_mod") and not isinstance(module, torch.jit.ScriptModule):
            prefix = f"{name}." if name else ""
            children = [(prefix + child, inner) for child, inner in module.named_children()]
            waiting += reversed(children)


def _take_input(
    listener: Listener, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if is_compiling() or _get_tracing_state() is not None:
        return
    if len(args) == 1 and not kwargs:
        listener.add("input", name, args[0])
    else:
        listener.add("input", name, {str(key): value for key, value in enumerate(args)} | kwargs)


def _take_output(
    listener: Listener,
    name: str,
    wanted: tuple[bool, bool],
    _: nn.Module,
    __: object,
    output: object,
) -> None:
    """Take what comes out, and hook what flows back into it, as far as the two are wanted."""
    if is_compiling() or _get_tracing_state() is not None:
        return
    forward, backward = wanted
    if forward:
        listener.add("output", name, output)
    if not backward or not torch.is_grad_enabled():
        return
    leaves = [("", output)] if isinstance(output, Tensor) else list_pytree_leaves(output)
    for path, leaf in leaves:
        # A parameter that is handed on would keep the hook; its gradient is a kind of its own.
        if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter):
            place = f"{name}:{path}" if path else name
            leaf.register_hook(partial(listener.add, "grad_output", place))


def _hook_parameter(hooks: ExitStack, parameter: Tensor, name: str, listener: Listener) -> None:
    def take(parameter: Tensor) -> None:
        if parameter.grad is not None:
            listener.add("local_gradient", name, parameter.grad)

    handle = parameter.register_post_accumulate_grad_hook(take)
    # To the front, before the hook of a strategy that sends the gradient away. torch calls them in
    # the order in which a plain dict has them, which `move_to_end` of an ordered one leaves alone.
    own = cast(Any, parameter)._post_accumulate_grad_hooks  # noqa: SLF001 - torch has no public list
    others = {key: hook for key, hook in own.items() if key != handle.id}
    for key in others:
        del own[key]
    own.update(others)
    hooks.callback(handle.remove)
