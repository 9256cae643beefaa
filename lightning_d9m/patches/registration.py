"""Registration of all kernels under a backend's dispatch key, and their removal.

The dispatcher sends calls from C++ autograd, from compiled graphs and from any library through
the same table, so a kernel registered there serves them all, and the alert inside torch's own
kernel never fires. The tables of other keys (autograd, autocast, meta, vmap) stay as they are.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor
from torch._prims_common.wrappers import _maybe_resize_out
from torch.library import Library

from lightning_d9m.compatibility import describe_missing_patches, get_boxed_kernel
from lightning_d9m.errors import D9mError, SettingError
from lightning_d9m.patches.arguments import RefusedError, require
from lightning_d9m.patches.catalog.catalog import FlagEffect, Op, select_ops
from lightning_d9m.patches.decompositions import decompositions_bypassed

_OVERLAP = 1  # torch's MemOverlap::Yes
_active: set[str] = set()
_thread = threading.local()


@dataclass(frozen=True)
class AppliedPatches:
    """The patches in force, as a ledger records them.

    Attributes:
        device_key: The dispatch key, ``"CUDA"`` in production.
        names: The ops that are patched, sorted.
        excluded: The ops that the user excluded, sorted.
    """

    device_key: str
    names: tuple[str, ...]
    excluded: tuple[str, ...]


@contextmanager
def patches_applied(
    device_key: str = "CUDA", exclude: Iterable[str] = ()
) -> Iterator[AppliedPatches]:
    """Run the body with a deterministic kernel for each op that torch leaves nondeterministic.

    Args:
        device_key: The backend's dispatch key. Tests use ``"CPU"``.
        exclude: Names from the catalog of ops to leave to torch.

    Raises:
        SettingError: A name is not in the catalog or has no kernel, or the patches are already
            applied under this key, or torch is too old for patches.
    """
    if problem := describe_missing_patches():
        raise SettingError(problem)
    excluded = tuple(sorted(set(exclude)))
    ops = [op for op in select_ops(torch.__version__, excluded) if _exists(op)]
    if device_key in _active:
        raise SettingError(
            f"The patches are already applied for the dispatch key {device_key!r}; applying them "
            "again would not change which ops are patched. Leave the first block first."
        )
    names = tuple(sorted(op.name for op in ops))
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # Overriding a kernel is the purpose; torch warns about the first one.
            warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered")
            for op in ops:
                _register(library, op, device_key)
        _active.add(device_key)
        with decompositions_bypassed(names, device_key.lower()):
            yield AppliedPatches(device_key, names, excluded)
    finally:
        _active.discard(device_key)
        library._destroy()  # noqa: SLF001 - no public method removes a kernel at a known time


def _register(library: Library, op: Op, device_key: str) -> None:
    for overload, path in op.kernels.items():
        kernel = Kernel(
            resolve_name(path),
            _find_original(overload, device_key),
            _find_schema(overload),
            switches=op.flag_effect is FlagEffect.SWITCHES,
        )
        library.impl(overload, kernel, device_key, with_keyset=True)


def _exists(op: Op) -> bool:
    """Return whether this torch has the op: a newer op may be missing in an older torch."""
    return any(hasattr(torch.ops.aten, overload.partition(".")[0]) for overload in op.kernels)


def _find_schema(overload: str) -> torch._C.FunctionSchema:
    packet, _, name = overload.partition(".")
    found = getattr(getattr(torch.ops.aten, packet), name or "default")
    return cast("torch._C.FunctionSchema", found._schema)  # noqa: SLF001 - it names the outputs


def _find_original(overload: str, device_key: str) -> Callable[..., Any]:
    name = f"aten::{overload}"
    # get_kernel would also return a fallback, which is not a kernel of the backend.
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, device_key):  # noqa: SLF001 - torch has no public check
        return get_boxed_kernel(name, device_key)

    def call_nothing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"This build of torch has no {device_key} kernel for {name}.")

    return call_nothing


class Kernel:
    """A replacement as the dispatcher calls it: functional, in place, or with ``out=``.

    One replacement serves all overloads of an op. It returns results; a function that writes them
    into ``self`` in place, or into a copy of it; or ``NotImplemented`` where torch's kernel is
    deterministic. Arguments that it refuses, or at which one of its ops raises, are torch's. Ops
    that a replacement calls are torch's own: pieces of sums may be added by ops that have
    replacements.

    Args:
        replacement: The function of the catalog.
        call: Torch's kernel of this overload.
        schema: The overload's schema.
        switches: Whether torch has a deterministic version, which takes what the replacement does
            not take. Without one, torch's kernel is expected to raise.
    """

    def __init__(
        self,
        replacement: Callable[..., Any],
        call: Callable[..., Any],
        schema: torch._C.FunctionSchema,
        *,
        switches: bool,
    ) -> None:
        self._replacement = replacement
        self._call = call
        self._outputs = [argument.name for argument in schema.arguments if argument.is_out]
        alias = schema.arguments[0].alias_info
        self._in_place = alias is not None and alias.is_write
        self._switches = switches

    def __call__(self, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement and return what torch's kernel would return."""
        if getattr(_thread, "is_inside", False):
            return self._call(keyset, *args, **kwargs)
        _thread.is_inside, refusal = True, None
        targets: list[Any] = []
        try:
            try:
                returned = self._compute(args, kwargs, targets)
            except torch.OutOfMemoryError:
                raise
            except (RefusedError, RuntimeError, IndexError, ValueError) as error:
                # Frames of a traceback would keep the tensors alive until a garbage collection.
                refusal = error.with_traceback(None) if self._switches else error
                returned = NotImplemented
            if returned is NotImplemented:
                returned = self._call(keyset, *args, **kwargs)
            elif targets:
                results = returned if isinstance(returned, tuple) else (returned,)
                for target, one in zip(targets, results, strict=False):
                    _write(target, one)
                returned = tuple(targets) if len(targets) > 1 else targets[0]
        finally:
            _thread.is_inside = False
        if refusal is not None and not self._switches:
            raise _make_refusal(args) from refusal
        return returned

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[Any]) -> Any:
        """Return the results, or ``NotImplemented``; list the tensors that they go to."""
        if self._outputs:
            targets += [kwargs[name] for name in self._outputs]
            kwargs = {name: kwargs[name] for name in kwargs if name not in self._outputs}
        if self._in_place:
            targets.append(args[0])
            require(not _shares_memory(args[0], args[1:]))
        result = self._replacement(*args, **kwargs)
        if callable(result):
            target = args[0]
            if not self._in_place:
                require(not any(_shares_memory(output, args[1:]) for output in targets))
                target = target.clone(memory_format=torch.contiguous_format)
            result(target)
            result = target
        if result is not NotImplemented and targets and result is not targets[0]:
            results = result if isinstance(result, tuple) else (result,)
            for target, one in zip(targets, results, strict=False):
                require(target.dtype == one.dtype, target.device == one.device)
        return result


def _write(target: Tensor, result: Tensor) -> None:
    if target is result:
        return
    if target.shape != result.shape:
        # Warns, as torch does, if the output held something of a different shape.
        _maybe_resize_out(target, result.shape)
        target.as_strided_(result.shape, result.stride())
    target.copy_(result)


def _make_refusal(arguments: Iterable[object]) -> D9mError:
    """Return the error for arguments that torch's kernel took; its result is discarded."""
    return D9mError(
        "The deterministic replacement does not take these arguments, although torch's own kernel "
        f"does: {[_describe_argument(argument) for argument in arguments]}. Exclude the op from "
        "the patches to run torch's nondeterministic kernel, and please report the case."
    )


def _describe_argument(argument: object) -> str:
    shape, dtype = getattr(argument, "shape", None), getattr(argument, "dtype", None)
    return repr(argument) if shape is None else f"{dtype} of shape {tuple(shape)}"


def _shares_memory(target: Tensor, arguments: Iterable[Any]) -> bool:
    """Return whether elements of a written tensor share memory, with each other or with others.

    As in torch, only dense tensors without internal overlap are compared with each other.
    """
    own = torch._debug_has_internal_overlap(target)  # noqa: SLF001 - torch's kernels check the same
    if own == _OVERLAP:
        return True
    for one in arguments:
        if isinstance(one, list):
            if _shares_memory(target, one):
                return True
        elif (
            isinstance(one, Tensor)
            and torch._C._overlaps(target, one)  # noqa: SLF001 - whether they have one storage
            and not (own or torch._debug_has_internal_overlap(one))  # noqa: SLF001 - as above
            and target.data_ptr() < one.data_ptr() + one.nbytes
            and one.data_ptr() < target.data_ptr() + target.nbytes
        ):
            return True
    return False
