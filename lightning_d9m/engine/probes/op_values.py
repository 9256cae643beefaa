"""Copies of the values of operations, with which they run again.

A copy is in torch's own format without any code: tensors, numbers, texts, lists and dicts.
``torch.load`` reads it with ``weights_only=True``.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from lightning_d9m.errors import LedgerError

# The key of a dict that stands for a value of another type.
TAG = "__d9m__"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr)
# Torch has no function from a name to such a value, and no memory format can be pickled.
_NAMED = {str(value): value for value in (*_FORMATS, torch.preserve_format, *_LAYOUTS)}


def keep(value: Any) -> Any:  # noqa: PLR0911 - one case for each type
    """Return a copy of a value that can be saved and passed to an operation again.

    Tensors keep dtype, shape and strides. A value without a plain form is kept as its text.
    """
    if isinstance(value, Tensor):
        with suppress(RuntimeError, TypeError):  # of a subclass that holds no storage
            return _keep_tensor(value)
        return {TAG: "text", "text": type(value).__qualname__}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(key): keep(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [keep(entry) for entry in value]
    if isinstance(value, torch.memory_format | torch.layout):
        return {TAG: type(value).__name__, "name": str(value)}
    if isinstance(value, torch.Generator):
        device = str(value.device)
        return {TAG: "generator", "device": device, "state": value.get_state()}
    return {TAG: "text", "text": repr(value)}


def revive(value: Any) -> Any:
    """Return the value that ``keep`` was given; tensors and generators are copies.

    Raises:
        LedgerError: When only the text of a value was kept.
    """
    return tree_map(_revive_leaf, value, is_leaf=is_tagged)


def is_tagged(value: Any) -> bool:
    """Return whether a dict stands for a value of another type."""
    return isinstance(value, dict) and TAG in value


def _revive_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _keep_tensor(leaf)
    if not is_tagged(leaf):
        return leaf
    match leaf[TAG]:
        # No `eval`, and no `getattr(torch, name)`: only names that `keep` writes are looked up.
        case "memory_format" | "layout":
            return _NAMED[leaf["name"]]
        case "generator":
            return torch.Generator(leaf["device"]).set_state(leaf["state"])
        case _:
            text = leaf.get("text")
            raise LedgerError(
                f"Only the text of {text} was kept, so the operation cannot run again."
            )


def take_generators(value: Any, states: list[Any]) -> Any:
    """Return what ``keep`` gave with None for each generator; append their states to ``states``."""

    def take(leaf: Any) -> Any:
        if is_tagged(leaf) and leaf[TAG] == "generator":
            states.append(leaf["state"])
            return None
        return leaf

    return tree_map(take, value, is_leaf=is_tagged)


def replay_op(kept: Mapping[str, Any]) -> Any:
    """Return the outputs of ``run_op``, or the arguments that it writes, if it has none."""
    op, outputs, args, kwargs = run_op(kept)
    return written_arguments(op, args, kwargs) if outputs is None else outputs


def run_op(kept: Mapping[str, Any]) -> tuple[OpOverload, Any, Any, Any]:
    """Run an operation alone on copies of the inputs that were kept.

    The default generator has the kept state meanwhile, and its own state afterwards.

    Returns:
        The operation, its outputs, and its arguments and named arguments after it.

    Raises:
        LedgerError: When this torch does not have the operation, or an input was not kept.
    """
    space, _, rest = str(kept["op"]).partition(".")
    packet, _, overload = rest.partition(".")
    op = getattr(getattr(torch.ops, space, None), packet, None)
    op = getattr(op, overload or "default", None)
    # A name from a file must not reach anything else that an attribute of `torch.ops` may be.
    if not isinstance(op, OpOverload):
        raise LedgerError(
            f"The operation {kept['op']!r} is not one that this torch has. Import what registers "
            "it first."
        )
    args, kwargs = revive(kept["args"]), revive(kept["kwargs"])
    # Some kernels depend on it, as what an LSTM of oneDNN keeps for its backward pass does.
    differentiates = bool(kept.get("requires_grad"))
    with (
        ExitStack() as stack,
        torch.set_grad_enabled(differentiates),
        torch._C._AutoDispatchBelowAutograd(),  # noqa: SLF001 - the recorded call was below autograd, and torch has no public guard
    ):
        for leaf in tree_leaves([args, kwargs]) if differentiates else ():
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                leaf.requires_grad_()
        if (rng := kept.get("rng")) is not None:
            read, write = access_rng(torch.device(kept["rng_device"]))
            # Before the state is set: the exit of the stack restores what was there, even if the
            # operation raises.
            stack.callback(write, read())
            write(rng)
        return op, op(*args, **kwargs), args, kwargs


def access_rng(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return what reads and what writes the state of a device's default generator.

    Without a device, torch's functions take that of the current device.
    """
    # The generator of the CPU has its functions in `torch` itself, and they do not take a device.
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    more = {} if device.type in {"cpu", "mps"} else {"device": device}
    return partial(module.get_rng_state, **more), partial(module.set_rng_state, **more)


def written_arguments(op: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation's schema says it writes to."""
    written = []
    for position, argument in enumerate(op._schema.arguments):  # noqa: SLF001 - a schema has no public home
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.name in kwargs:
            written.append(kwargs[argument.name])
        elif position < len(args):
            written.append(args[position])
    return written


@torch.no_grad()
def _keep_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides, even if elements overlap, and no more of its storage.

    Of a DTensor this rank's shard: only processes that have its mesh could read the DTensor. Of any
    other subclass a plain tensor, which can be read where the class is not known.
    """
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
        tensor = tensor.detach()
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if type(tensor) is not Tensor:
            tensor = tensor.as_subclass(Tensor)
    if not is_plain(tensor):
        return tensor.clone()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    # `clone` alone would make a tensor contiguous that has gaps or overlaps, and a kernel may be
    # chosen by strides. From the first element to the last; `as_strided` keeps the offset in the
    # storage.
    span = 0 if tensor.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in sizes)
    flat = tensor.as_strided((span,), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


def is_plain(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor's storage and its strides say what it holds."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return plain and not tensor.is_conj() and not tensor.is_neg()
