"""Hooks on modules and parameters for inputs, outputs and gradients, and a mode that probes ops.

A hook only reads. Compiled regions get no hooks: a hook would change the compiled code. The mode
takes every op of the selected modules, forward and backward. Views, and ops that leave memory
undefined (``empty``), are not recorded. Triton kernels are recorded where torch dispatches them: as
``torch.library.triton_op``, and in higher-order operators.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial, partialmethod, wraps
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import ClassType, Tensor, nn
from torch._ops import OpOverload
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_d9m.attribute_patches import replace_method
from lightning_d9m.engine.hashing.training_state import plain_name
from lightning_d9m.engine.ledger.kinds import ROOT
from lightning_d9m.engine.probes.evidence import Evidence
from lightning_d9m.engine.probes.op_values import access_rng, keep, written_arguments
from lightning_d9m.engine.probes.settings import ProbeSettings
from lightning_d9m.engine.probes.trace import ProbeCollector, Take, name_leaves
from lightning_d9m.program import find_line

# Attributes of modules that only call another one: FSDP1's, and those of activation checkpointing.
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# A call that is traced rather than run, by one of the two, gives nothing.
_get_tracing_state = torch._C._get_tracing_state  # noqa: SLF001 - the only way to it
# Names of ops whose results hold whatever the memory held before.
UNDEFINED = ("empty", "new_empty", "_empty", "resize", "set_")
# Their results are not ready when they return: the transfer continues in the background.
_COLLECTIVES = ("c10d", "_c10d_functional")
# The function of torch from which a backward pass runs.
_ENGINE = "_engine_run_backward"


def hook_model(
    model: nn.Module,
    settings: ProbeSettings,
    kinds: frozenset[str],
    take: Take,
    *,
    ops: "OpMode | None",
    is_compiled: bool,
) -> ExitStack:
    """Pass the inputs, outputs and gradients of the selected modules to a function.

    ``ops`` records which module runs; None where no operation is taken. Of a module that is shared,
    the first name counts.
    ``is_compiled`` says that the steps of the model are compiled, so that no module of it is called
    from outside.

    Returns:
        A stack that removes the hooks when it is closed.
    """
    with ExitStack() as hooks:
        # Not through the module: TorchScript's takes hooks, but forbids to ask for them.
        before, after = nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook
        for name, module in () if is_compiled else eager_modules(model):
            if ops is not None and name:  # the model itself is around everything
                # First in and last out, so that operations of the program's own hooks belong to the
                # module; also if it raises, because a program may catch that and continue.
                hooks.callback(before(module, partial(ops.enter, name), prepend=True).remove)
                hooks.callback(after(module, ops.leave, always_call=True).remove)
            if not settings.takes_module(name):
                continue
            if "input" in kinds:
                hook = partial(_take_input, take, name or ROOT)
                hooks.callback(before(module, hook, with_kwargs=True).remove)
            if not kinds.isdisjoint({"output", "grad_output"}):
                hooks.callback(
                    after(module, partial(_take_output, take, name or ROOT, kinds)).remove
                )
        if "local_gradient" in kinds:
            for name, parameter in model.named_parameters():
                takes = parameter.requires_grad and settings.takes_parameter(plain_name(name))
                if takes and not is_lazy(parameter):
                    _hook_parameter(hooks, parameter, plain_name(name), take)
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
    take: Take, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if is_compiling() or _get_tracing_state() is not None:
        return
    alone = len(args) == 1 and not kwargs
    given = args[0] if alone else {str(key): own for key, own in enumerate(args)} | kwargs
    take("input", name_leaves(name, given))


def _take_output(
    take: Take, name: str, kinds: frozenset[str], _: nn.Module, __: object, output: object
) -> None:
    """Take what comes out, and hook what flows back into it, as far as the two are wanted."""
    if is_compiling() or _get_tracing_state() is not None:
        return
    leaves = name_leaves(name, output)
    if "output" in kinds:
        take("output", leaves)
    if "grad_output" not in kinds or not torch.is_grad_enabled():
        return
    for place, leaf in leaves:
        # A leaf that is handed on, as a parameter, would keep the hook after this batch.
        if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
            leaf.register_hook(partial(_take_gradient, take, place))


def _take_gradient(take: Take, place: str, gradient: Tensor) -> None:
    take("grad_output", [(place, gradient)])


def _hook_parameter(hooks: ExitStack, parameter: Tensor, name: str, take: Take) -> None:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            take("local_gradient", [(name, parameter.grad)])

    handle = parameter.register_post_accumulate_grad_hook(hook)
    # To the front, before the hook of a strategy that sends the gradient away. torch calls them in
    # the order in which a plain dict has them, which `move_to_end` of an ordered one leaves alone.
    own = cast(Any, parameter)._post_accumulate_grad_hooks  # noqa: SLF001 - torch has no public list
    others = {key: hook for key, hook in own.items() if key != handle.id}
    for key in others:
        del own[key]
    own.update(others)
    hooks.callback(handle.remove)


class _Origin(NamedTuple):
    """The origin of an op.

    The modules are those around it, innermost last; ``backward`` says whether it computes the
    gradient of what the line called.
    """

    modules: tuple[str, ...]
    source: str | None
    backward: bool = False


class OpMode(TorchDispatchMode):
    """Passes the outputs of ops to probes.

    An op of the backward pass belongs to the module of the forward op whose gradient it computes:
    torch numbers the nodes of its graph, and this class records the numbers as torch assigns them.

    The settings select modules; an op belongs to all modules around it.
    """

    # torch raises for an operator of a higher order under a mode that does not say so.
    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        settings: ProbeSettings,
        probes: ProbeCollector,
        evidence: Evidence | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._takes_module = cache(settings.takes_module)  # called for every op
        self._probes, self._evidence = probes, evidence
        self._has_places = "op" in settings.kinds
        self._is_on = False
        self._around: list[str] = []
        self._origins: dict[int, _Origin] = {}
        named = model.named_parameters()
        self._owners = {id(own): plain_name(name).rpartition(".")[0] for name, own in named}

    @property
    def finds_sources(self) -> bool:
        """True if the line that called each operation is wanted."""
        return self._evidence is not None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled regions compiled; torch would run them eagerly otherwise."""
        return True

    def begin(self) -> None:
        """Start a batch: forget the nodes of earlier graphs."""
        self._around.clear()
        self._origins.clear()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Record the ops of the body; a backward pass inside a manual step is recorded already."""
        if self._is_on:
            yield
            return
        self._is_on = True
        try:
            with _callbacks_unseen(), self:
                yield
        finally:
            self._is_on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and take its outputs."""
        kwargs = kwargs or {}
        evidence, probes = self._evidence, self._probes
        if not probes.listens and (evidence is None or probes.is_paused):
            return func(*args, **kwargs)
        origin = self._find_origin()
        if not any(map(self._takes_module, origin.modules)) or not _defines(func):
            return func(*args, **kwargs)
        content = None if evidence is None else copy_inputs(func, args, kwargs)
        outputs = func(*args, **kwargs)
        taken = outputs
        if outputs is None:  # what it has written
            is_op = isinstance(func, OpOverload)
            taken = written_arguments(func, args, kwargs) if is_op else [args, dict(kwargs)]
        name = f"{origin.modules[-1] or ROOT}::{func}"
        if evidence is not None and content is not None:
            leaves = taken if isinstance(taken, list | tuple) else [taken]
            content |= {"outputs": keep(leaves), "source": origin.source}
            writes = not isinstance(func, OpOverload) or func._schema.is_mutable  # noqa: SLF001 - as in op_values.py
            evidence.take_op(name, content | {"backward": origin.backward, "writes": writes})
        if self._has_places:
            probes.add("op", name, taken)
        return outputs

    def enter(self, name: str, *_: object) -> None:
        """Note that a module runs."""
        if not is_compiling():
            self._around.append(name)

    def leave(self, *_: object) -> None:
        """Note that the innermost module has run."""
        if not is_compiling() and self._around:
            self._around.pop()

    def _find_origin(self) -> _Origin:
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001 - the only way to it
        if node is None or self._around:  # inside a backward pass: a checkpoint's second forward
            source = _find_source() if self.finds_sources else None
            origin = _Origin(("", *self._around), source)
            if node is None:
                # The operation's own node has just been made and has taken the last number.
                number = torch._C._autograd._get_sequence_nr() - 1  # noqa: SLF001 - as above
                self._origins.setdefault(number, origin)
            return origin
        variable = getattr(node, "variable", None)
        if variable is not None:
            parts = self._owners.get(id(variable), "").split(".")
            origin = _Origin(("", *accumulate(parts, "{}.{}".format)), None)
        else:
            origin = self._origins.get(node._sequence_nr(), _Origin(("",), None))  # noqa: SLF001 - as above
        # A hook has its own line, and so has the backward pass of a function of the program.
        own = _find_source(_ENGINE) if self.finds_sources else None
        return _Origin(origin.modules, own or origin.source, backward=own is None)


def copy_inputs(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the inputs of an op before it runs: it may write into them."""
    content: dict[str, Any] = {"op": str(func), "args": keep(args), "kwargs": keep(kwargs)}
    leaves = tree_leaves([args, dict(kwargs)]) if torch.is_grad_enabled() else ()
    content["requires_grad"] = any(getattr(leaf, "requires_grad", False) for leaf in leaves)
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return content
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    device = next(tensors, torch.empty(0, device=kwargs.get("device"))).device
    read, _ = access_rng(device)
    return content | {"rng": read(), "rng_device": str(device)}


@contextmanager
def _callbacks_unseen() -> Iterator[None]:
    """Call the callbacks of futures, as of DDP's communication hooks, outside dispatch modes.

    A callback runs in the thread that completes the future, or in this one if it is complete, so
    that time would decide whether a mode sees its operations.
    """
    future: Any = torch._C.Future  # noqa: SLF001 - torch.futures.Future calls its methods
    with ExitStack() as stack:
        for name in ("then", "add_done_callback"):
            unseen: Any = partialmethod(_add_unseen, getattr(future, name))
            replace_method(stack, future, name, unseen)
        yield


def _add_unseen(future: Any, add: Callable[..., Any], callback: Callable[..., Any]) -> Any:
    @wraps(callback)
    def unseen(*args: Any) -> Any:
        with _disable_current_modes():
            return callback(*args)

    return add(future, unseen)


def _defines(func: Any) -> bool:
    """Return whether an op computes new values that are ready when it returns."""
    if not isinstance(func, OpOverload):
        return True  # a higher-order operator
    if func.namespace in _COLLECTIVES or func.is_view:
        return False
    schema = func._schema  # noqa: SLF001 - as above
    # The marks of a profiler, which FSDP sets also when a checkpoint is saved, have no data.
    if not schema.is_mutable and all(isinstance(one.type, ClassType) for one in schema.returns):
        return False
    return not schema.name.partition("::")[2].startswith(UNDEFINED)


def _find_source(end: str | None = None) -> str | None:
    """Return the line of ``find_line``, as ``file:line in f: text``."""
    line = find_line(end)
    return line and "{}:{} in {}: {}".format(*line)
