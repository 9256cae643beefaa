"""Puts every replacement under a backend's dispatch key, all or none, and takes them back.

The dispatcher sends calls from C++ autograd, from compiled graphs and from any library through
the same table, so that a replacement catches them all, and the alert inside torch's kernel never
fires. The tables of other keys (autograd, autocast, meta, vmap) stay as they are.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch._prims_common.wrappers import _maybe_resize_out
from torch.library import Library, get_kernel

from lightning_d9m.errors import SettingError
from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.catalog.op import Op
from lightning_d9m.patches.primitives.fallback import Original, raise_as_original

_active: set[str] = set()


@dataclass(frozen=True)
class AppliedPatches:
    """What is in force, as a ledger records it.

    Attributes:
        device_key: The dispatch key, ``"CUDA"`` in production.
        names: The ops that are patched, sorted.
        excluded: The ops that were opted out of, sorted.
    """

    device_key: str
    names: tuple[str, ...]
    excluded: tuple[str, ...]


@contextmanager
def patches_applied(
    device_key: str = "CUDA", exclude: Iterable[str] = (), include: Iterable[str] = ()
) -> Iterator[AppliedPatches]:
    """Run the body with a deterministic kernel for each op that torch leaves nondeterministic.

    Args:
        device_key: The backend's dispatch key. Tests use ``"CPU"``.
        exclude: Names from the catalogue of ops to leave to torch.
        include: Names of ops whose replacement is offered, but not the default.

    Raises:
        SettingError: A name is not in the catalogue or has no replacement, or the patches are
            already applied under this key.
    """
    excluded = tuple(sorted(set(exclude)))
    ops = [op for op in select_ops(torch.__version__, excluded, include) if _exists(op)]
    if device_key in _active:
        raise SettingError(
            f"The patches are already applied for the dispatch key {device_key!r}; applying them "
            "again would not change which ops are patched. Leave the first block first."
        )
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # Overriding a kernel is what this is for; torch warns of the first one.
            warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered")
            for op in ops:
                _register(library, op, device_key)
        _active.add(device_key)
        yield AppliedPatches(device_key, tuple(sorted(op.name for op in ops)), excluded)
    finally:
        _active.discard(device_key)
        library._destroy()  # noqa: SLF001 - nothing public takes a kernel back at a known moment


def _register(library: Library, op: Op, device_key: str) -> None:
    for overload, path in op.kernels.items():
        replacement = resolve_name(path)
        outputs = [
            argument.name for argument in _find_schema(overload).arguments if argument.is_out
        ]
        make = _write_to if outputs else _return
        kernel = make(replacement, _find_original(overload, device_key), outputs)
        library.impl(overload, kernel, device_key, with_keyset=True)


def _exists(op: Op) -> bool:
    """Say whether this torch has the op at all: a newer op may not be in an older torch."""
    return any(hasattr(torch.ops.aten, overload.partition(".")[0]) for overload in op.kernels)


def _find_schema(overload: str) -> torch._C.FunctionSchema:
    packet, _, name = overload.partition(".")
    found = getattr(getattr(torch.ops.aten, packet), name or "default")
    return cast("torch._C.FunctionSchema", found._schema)  # noqa: SLF001 - it names the outputs


def _find_original(overload: str, device_key: str) -> Callable[..., Any]:
    name = f"aten::{overload}"
    # get_kernel would also answer with a fallback, which is no kernel of the backend.
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, device_key):  # noqa: SLF001
        return cast(Callable[..., Any], get_kernel(name, device_key).call_boxed)

    def call_nothing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"This build of torch has no {device_key} kernel for {name}.")

    return call_nothing


def _return(
    replacement: Callable[..., Any], call: Callable[..., Any], _outputs: list[str]
) -> Callable[..., Any]:
    def run(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return replacement(partial(call, keyset), *args, **kwargs)

    return run


def _write_to(
    replacement: Callable[..., Any], call: Callable[..., Any], outputs: list[str]
) -> Callable[..., Any]:
    """Make an ``out=`` kernel of one that returns its results."""

    def run(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in outputs]
        original = partial(call, keyset, **dict(zip(outputs, targets, strict=True)))
        returned = replacement(original, *args, **kwargs)
        results = returned if isinstance(returned, tuple) else (returned,)
        for target, result in zip(targets, results, strict=True):
            if target is not result:
                _fill(original, target, result, args)
        return tuple(targets) if isinstance(returned, tuple) else targets[0]

    return run


def _fill(original: Original, target: torch.Tensor, result: torch.Tensor, args: Any) -> None:
    if target.dtype != result.dtype or target.device != result.device:
        raise_as_original(original, *args)
    if target.shape != result.shape:
        # Warns, as torch does, when the output held something of another shape.
        _maybe_resize_out(target, result.shape)
        target.as_strided_(result.shape, result.stride())
    target.copy_(result)
