"""Registration of all kernels under a backend's dispatch key, and their removal.

The dispatcher sends calls from C++ autograd, from compiled graphs and from any library through
the same table, so a kernel registered there serves them all, and the alert inside torch's own
kernel never fires. The tables of other keys (autograd, autocast, meta, vmap) stay as they are.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor
from torch._prims_common.wrappers import _maybe_resize_out
from torch.library import Library

from lightning_d9m.compatibility import describe_missing_patches, get_boxed_kernel
from lightning_d9m.errors import SettingError
from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.catalog.op import Op
from lightning_d9m.patches.decompositions import decompositions_bypassed
from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.segment_reduce import Update
from lightning_d9m.patches.reference_check import agrees_with_cpu
from lightning_d9m.patches.triton.launch import is_capturing, kernels_noted, withdraw

_MOST_ATTEMPTS = 3  # calls that the CPU cannot compute, after which nothing is compared
_OVERLAP = 1  # torch's MemOverlap::Yes
_active: set[str] = set()


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
    device_key: str = "CUDA", exclude: Iterable[str] = (), include: Iterable[str] = ()
) -> Iterator[AppliedPatches]:
    """Run the body with a deterministic kernel for each op that torch leaves nondeterministic.

    Args:
        device_key: The backend's dispatch key. Tests use ``"CPU"``.
        exclude: Names from the catalog of ops to leave to torch.
        include: Names of ops that are patched on request only.

    Raises:
        SettingError: A name is not in the catalog or has no kernel, or the patches are already
            applied under this key, or torch is too old for patches.
    """
    if problem := describe_missing_patches():
        raise SettingError(problem)
    excluded = tuple(sorted(set(exclude)))
    ops = [op for op in select_ops(torch.__version__, excluded, include) if _exists(op)]
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
            offered=op.status == "offered",
            check=device_key == "CUDA",
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

    One replacement serves all overloads of an op. It returns results, or an ``Update`` that this
    class applies to ``self`` in place, or to a copy of it.

    Args:
        replacement: The function of the catalog.
        call: Torch's kernel of this overload.
        schema: The overload's schema.
        offered: Whether torch has a deterministic version to fall back to.
        check: Whether the first results on each device are compared with the CPU's.
    """

    def __init__(
        self,
        replacement: Callable[..., Any],
        call: Callable[..., Any],
        schema: torch._C.FunctionSchema,
        *,
        offered: bool,
        check: bool,
    ) -> None:
        self._replacement = replacement
        self._call = call
        self._name = schema.name
        self._outputs = [argument.name for argument in schema.arguments if argument.is_out]
        alias = schema.arguments[0].alias_info
        self._in_place = alias is not None and alias.is_write
        self._offered = offered
        self._check, self._disagrees = check, False
        self._attempts: dict[torch.device, int] = {}

    def __call__(self, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement and return what torch's kernel would return."""
        targets = [kwargs.pop(name) for name in self._outputs]
        outputs = dict(zip(self._outputs, targets, strict=True))
        original = TorchKernel(self._call, keyset, outputs)
        overlaps = self._in_place and _shares_memory(args[0], args[1:])
        if overlaps and not self._offered:
            raise_as_original(original, *args, **kwargs)
        if overlaps or self._disagrees:
            return original(*args, **kwargs)
        device = args[0].device
        unchecked = self._check and self._attempts.get(device, 0) < _MOST_ATTEMPTS
        with kernels_noted() as used:
            returned = self._replacement(original, *args, **kwargs)
            if isinstance(returned, Update):
                if any(_shares_memory(target, args[1:]) for target in targets):
                    raise_as_original(original, *args, **kwargs)
                returned = self._write(returned, args[0], keep=unchecked)
        if original.was_called:
            return returned  # it has written into the targets, or in place
        if unchecked and not self._agrees(device, args, kwargs, returned, used):
            again = partial(self, keyset, **outputs) if used else original
            return again(*args, **kwargs)
        return self._store(returned, targets, partial(original, *args, **kwargs))

    def _store(self, returned: Any, targets: list[Tensor], original: partial[Any]) -> Any:
        if self._in_place:
            target = original.args[0]
            return returned if returned is target else target.copy_(returned)
        if not targets:
            return returned
        for target, result in zip(targets, _as_tuple(returned), strict=True):
            _fill(original, target, result)
        return tuple(targets) if isinstance(returned, tuple) else targets[0]

    def _write(self, update: Update, target: Tensor, *, keep: bool) -> Tensor:
        if not self._in_place or keep:
            target = target.clone(memory_format=torch.contiguous_format)
        update.write(target)
        return target

    def _agrees(
        self, device: torch.device, args: Any, kwargs: Any, returned: Any, used: list[str]
    ) -> bool:
        """Compare the first results on a device with those on the CPU.

        If Triton kernels were used and the results disagree, these are withdrawn: the next
        comparison is that of the torch ops.
        """
        if is_capturing():
            return True  # nothing may be copied to the host now
        agrees = agrees_with_cpu(self._replacement, args, kwargs, _as_tuple(returned))
        if used and agrees is False:
            for path in used:
                withdraw(path, f"{self._name} gave a different result with it than on the CPU")
            return False
        self._disagrees = agrees is False
        tried = self._attempts.get(device, 0) + 1
        self._attempts[device] = tried if agrees is None else _MOST_ATTEMPTS
        if self._disagrees:
            warnings.warn(
                f"The deterministic replacement of {self._name} gave a different result on this "
                "device than on the CPU, so torch's kernel runs instead. Please report the case.",
                stacklevel=3,
            )
        return not self._disagrees


class TorchKernel:
    """Torch's kernel with the dispatch keys and outputs of one call.

    Attributes:
        was_called: Whether the replacement left the call to it.
    """

    def __init__(
        self, call: Callable[..., Any], keyset: torch._C.DispatchKeySet, outputs: dict[str, Any]
    ) -> None:
        self._bound = partial(call, keyset, **outputs)
        self.was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel."""
        self.was_called = True
        return self._bound(*args, **kwargs)


def _as_tuple(returned: Any) -> tuple[Any, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def _shares_memory(target: Tensor, arguments: Iterable[Any]) -> bool:
    """Return whether elements of a written tensor share memory, with each other or with others.

    As in torch, only dense tensors without internal overlap are compared with each other.
    """
    if _internal_overlap(target) == _OVERLAP:
        return True
    given = [part for one in arguments for part in (one if isinstance(one, list) else [one])]
    return any(isinstance(part, Tensor) and _overlap(target, part) for part in given)


def _internal_overlap(tensor: Tensor) -> int:
    return torch._debug_has_internal_overlap(tensor)  # noqa: SLF001 - torch's kernels check the same


def _overlap(left: Tensor, right: Tensor) -> bool:
    """Return what torch's ``get_overlap_status`` returns, where its answer is known."""
    if not left.numel() or not right.numel() or left.device != right.device:
        return False
    if _internal_overlap(left) or _internal_overlap(right):
        return False
    (start, end), (other_start, other_end) = (
        (part.data_ptr(), part.data_ptr() + part.numel() * part.element_size())
        for part in (left, right)
    )
    return start < other_end and other_start < end


def _fill(original: Original, target: Tensor, result: Tensor) -> None:
    if target.dtype != result.dtype or target.device != result.device:
        raise_as_original(original)
    if target.shape != result.shape:
        # Warns, as torch does, if the output held something of a different shape.
        _maybe_resize_out(target, result.shape)
        target.as_strided_(result.shape, result.stride())
    target.copy_(result)
