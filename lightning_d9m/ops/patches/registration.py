"""Registration of all kernels under a backend's dispatch key, and their removal.

The dispatcher sends calls from C++ autograd, from compiled graphs and from any library through
the same table, so a kernel registered there serves them all, and the alert inside torch's own
kernel never fires. The tables of other keys (autograd, autocast, meta, vmap) stay as they are.
"""

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch._decomp.decompositions as torch_decompositions
from torch import Tensor
from torch._prims_common.wrappers import _maybe_resize_out
from torch.library import Library

from lightning_d9m.attribute_patches import replace_method
from lightning_d9m.compatibility import describe_missing_patches, get_boxed_kernel
from lightning_d9m.errors import D9mError, SettingError
from lightning_d9m.ops.patches.catalog.catalog import FlagEffect, Op, find_op, select_ops

# A program whose shapes differ in each step would otherwise fill the memory.
_MOST_FUNCTIONS = 4096
_native = torch._C._nn  # noqa: SLF001 - what torch.nn.functional calls with the flag off
_OVERLAP = 1  # torch's MemOverlap::Yes
_active: set[str] = set()
_varying: set[tuple[str, str]] = set()  # operators and dispatch keys; a session may be in another
_thread = threading.local()


@contextmanager
def patches_applied(
    device_key: str = "CUDA", exclude: Iterable[str] = ()
) -> Iterator[frozenset[str]]:
    """Run the body with a deterministic kernel for each op that torch leaves nondeterministic.

    It gets the names of the ops that are patched.

    Args:
        device_key: The backend's dispatch key: ``"CUDA"`` in production. Tests use ``"CPU"``.
        exclude: Names from the catalog of ops to leave to torch.

    Raises:
        SettingError: A name is not in the catalog or has no kernel, or the patches are already
            applied under this key, or torch is too old for patches.
    """
    if problem := describe_missing_patches():
        raise SettingError(problem)
    ops = select_ops(torch.__version__, exclude)
    if device_key in _active:
        raise SettingError(
            f"The patches are already applied for the dispatch key {device_key!r}; applying them "
            "again would not change which ops are patched. Leave the first block first."
        )
    # All are registered or none: an op that fails takes the others back.
    names = frozenset(op.name for op in ops)
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # Overriding a kernel is the purpose; torch warns about the first one.
            warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered")
            for op in ops:
                _register(library, op, device_key)
        _active.add(device_key)
        with decompositions_bypassed(names, device_key.lower()):
            yield names
    finally:
        _active.discard(device_key)
        library._destroy()  # noqa: SLF001 - no public method removes a kernel at a known time


def _register(library: Library, op: Op, device_key: str) -> None:
    for overload, path in op.kernels.items():
        packet, _, name = overload.partition(".")
        key = (f"aten::{overload}", device_key)
        # get_kernel would also return a fallback, which is not a kernel of the backend; a build
        # without the backend has none.
        kernel = Kernel(
            resolve_name(path),
            get_boxed_kernel(*key) if _has_kernel(*key) else None,
            getattr(getattr(torch.ops.aten, packet), name or "default")._schema,  # noqa: SLF001 - it names the outputs
            switches=op.flag_effect is FlagEffect.SWITCHES,
        )
        library.impl(overload, kernel, device_key, with_keyset=True)


@contextmanager
def variation_allowed(names: Iterable[str], device_key: str) -> Iterator[None]:
    """Run the body with kernels that may vary, although torch's flag is on.

    The flag is off while one of their kernels runs. A kernel that does not ask for the flag runs
    as it is.

    Args:
        names: Names of the catalog, or of operators such as ``"torchvision::_roi_pool_backward"``.
        device_key: The backend's dispatch key.

    Raises:
        SettingError: An operator does not exist, or has no kernel for the backend.
    """
    with ExitStack() as stack:
        # A name of the catalog may have overloads that only some builds of torch have; an operator
        # that the user names must exist.
        given = [*names]
        for name in sorted({operator for one in given for operator in _list_operators(one)}):
            namespace, _, overload = name.partition("::")
            if not _has_kernel(name, device_key):
                with suppress(ImportError):  # an operator exists when its package is loaded
                    import_module(namespace)
            if not _has_kernel(name, device_key):
                if name not in given:  # one of several overloads
                    continue
                raise SettingError(
                    f"varying_ops names {name!r}, and no operator of that name has a kernel for "
                    f"{device_key}. Import the package that defines it first, or leave it out."
                )
            # A session within a session may allow it again; the outer one takes the kernel back.
            if (name, device_key) in _varying:
                continue
            _varying.add((name, device_key))
            stack.callback(_varying.discard, (name, device_key))
            library = Library(namespace, "IMPL")
            stack.callback(library._destroy)  # noqa: SLF001 - as in patches_applied
            kernel = partial(_run_varying, get_boxed_kernel(name, device_key))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously")
                library.impl(overload, kernel, device_key, with_keyset=True)
        yield


def _has_kernel(name: str, device_key: str) -> bool:
    with suppress(RuntimeError):  # the operator does not exist
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, device_key)  # noqa: SLF001 - torch has no public check
    return False


def _list_operators(name: str) -> Collection[str]:
    """Return the operators of a name of ``varying_ops``."""
    if "::" in name:
        return [name]
    op = find_op(name)
    return [*(f"aten::{one}" for one in op.kernels), *(one for one in op.operators if "::" in one)]


def is_patched(name: str) -> bool:
    """Return whether a name of ``varying_ops`` is that of an op with a replacement."""
    return "::" not in name and bool(find_op(name).kernels)


def read_flag() -> tuple[bool, bool]:
    """Return whether deterministic algorithms are on in torch, and whether others only warn."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def put_flag(flag: tuple[bool, bool]) -> None:
    """Set what ``read_flag`` returns."""
    torch._C._set_deterministic_algorithms(flag[0], warn_only=flag[1])  # noqa: SLF001 - the public one loads the compiler


def _run_varying(call: Any, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    # The kernel reads the flag when it is called, and so may other ops in other threads: it is off
    # for the call alone.
    before = read_flag()
    put_flag((False, False))
    try:
        return call(keyset, *args, **kwargs)
    finally:
        put_flag(before)


def has_torch() -> bool:
    """Return whether torch's deterministic kernel serves if a replacement leaves its op to it."""
    return getattr(_thread, "is_inside", False) and torch.are_deterministic_algorithms_enabled()


class RefusedError(Exception):
    """A replacement does not take its arguments."""


def require(*conditions: bool) -> None:
    """Refuse the arguments unless all conditions hold."""
    if not all(conditions):
        raise RefusedError


class Update(NamedTuple):
    """A change of the tensor ``self``, in place or of a copy; the op's arguments follow it."""

    write: Callable[..., None]

    def __call__(self, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return a changed copy, in contiguous memory, into which replacements write."""
        copy = target.clone(memory_format=torch.contiguous_format)
        self.write(copy, *args, **kwargs)
        return copy


# Kept, because it is needed in each call; each has one byte of memory.
@lru_cache(maxsize=4096)
def make_places(device: torch.device, *sizes: int) -> Tensor:
    """Return a tensor of a shape, in the memory of one element: reading a place outside fails."""
    return torch.zeros((), dtype=torch.uint8, device=device).expand(sizes)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add in: float32 for half and bfloat16, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Kernel:
    """A replacement as the dispatcher calls it: functional, in place, or with ``out=``.

    One replacement serves all overloads of an op. It returns results; a function of its arguments
    that returns them; an :class:`Update`; or ``NotImplemented`` where torch's kernel is
    deterministic. Functions are kept for the next call with tensors alike: of the same shapes,
    strides, dtypes and devices, which is all that they may depend on. Arguments that a replacement
    refuses, or at which one of its ops raises, are torch's. Ops that a replacement calls are
    torch's own: pieces of sums may be added by ops that have replacements.

    Args:
        replacement: The function of the catalog.
        call: Torch's kernel of this overload, if there is one.
        schema: The overload's schema.
        switches: Whether torch has a deterministic version, which takes what the replacement does
            not take. Without one, torch's kernel is expected to raise.
    """

    def __init__(
        self,
        replacement: Callable[..., Any],
        call: Any,
        schema: torch._C.FunctionSchema,
        *,
        switches: bool,
    ) -> None:
        self._replacement = replacement
        self._call = call
        self._outputs = [argument.name for argument in schema.arguments if argument.is_out]
        # The schema says so, and names like add_ only suggest it.
        alias = schema.arguments[0].alias_info
        self._in_place = alias is not None and alias.is_write
        self._switches = switches
        self._functions: dict[object, Any] = {}

    def __call__(self, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement and return what torch's kernel would return."""
        # Per thread, because autograd runs the backward pass of each device in a thread.
        if getattr(_thread, "is_inside", False):
            return self._call(keyset, *args, **kwargs)
        _thread.is_inside, refusal = True, None
        try:
            try:
                returned = self.replace(args, kwargs)
            except torch.OutOfMemoryError:
                raise
            # Wrong arguments must raise torch's own error, with its words: torch's kernel gets
            # them.
            except (RefusedError, RuntimeError, IndexError, ValueError) as error:
                # Frames of a traceback would keep the tensors alive until a garbage collection.
                refusal = error.with_traceback(None) if self._switches else error
                returned = NotImplemented
            if returned is NotImplemented:
                returned = self._call(keyset, *args, **kwargs)
        finally:
            _thread.is_inside = False
        # Without a deterministic version torch's kernel raises, for the arguments or by its alert.
        # It took them, so its result may vary.
        if refusal is not None and not self._switches:
            # Torch's kernel took the arguments; its result is discarded.
            given = [
                f"{one.dtype} of shape {tuple(one.shape)}" if isinstance(one, Tensor) else repr(one)
                for one in args
            ]
            raise D9mError(
                "The deterministic replacement does not take these arguments, although torch's own "
                f"kernel does: {given}. Exclude the op from the patches to run torch's "
                "nondeterministic kernel, and please report the case."
            ) from refusal
        return returned

    def replace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results, in the tensors that they go to, or ``NotImplemented``."""
        targets = [args[0]] if self._in_place else [kwargs[name] for name in self._outputs]
        if self._outputs:
            kwargs = {name: kwargs[name] for name in kwargs if name not in self._outputs}
        found = self._find_function(args, kwargs)
        # torch refuses such calls, in which a value is written before it is read.
        if self._in_place or isinstance(found, Update):
            for target in targets:
                require(not _shares_memory(target, args[1:]))
        if self._in_place and isinstance(found, Update):
            found.write(*args, **kwargs)
            found = args[0]
        elif callable(found):
            found = found(*args, **kwargs)
        if not targets or found is NotImplemented or found is targets[0]:
            return found
        results = found if isinstance(found, tuple) else (found,)
        for target, one in zip(targets, results, strict=False):
            require(target.dtype == one.dtype, target.device == one.device)
        for target, one in zip(targets, results, strict=False):
            _write(target, one)
        return tuple(targets) if len(targets) > 1 else targets[0]

    def _find_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the function for arguments like these, or what the replacement returns."""
        # Checks and plans in Python take longer than a small kernel runs; they depend on these
        # alone.
        alike = _describe((*args, *kwargs.values()))
        found = self._functions.get(alike)
        if found is None:
            found = self._replacement(*args, **kwargs)
            if callable(found):
                if len(self._functions) == _MOST_FUNCTIONS:
                    self._functions.clear()
                self._functions[alike] = found
        return found


def _describe(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what a function that a replacement returns may depend on."""
    return tuple(
        [
            # Not the values: a function must not depend on them.
            (one.shape, one.stride(), one.dtype, one.device)
            if isinstance(one, Tensor)
            else (_describe(one) if type(one) is list else one)
            for one in values
        ]
    )


def _write(target: Tensor, result: Tensor) -> None:
    if target.shape != result.shape:
        # Warns, as torch does, if the output held something of a different shape.
        _maybe_resize_out(target, result.shape)
        # The strides that torch's kernel would have given a new output.
        target.as_strided_(result.shape, result.stride())
    target.copy_(result)


def _shares_memory(target: Tensor, arguments: Iterable[Any]) -> bool:
    """Return whether elements of a written tensor share memory, with each other or with others.

    As in torch, only dense tensors without internal overlap are compared with each other.
    """
    # The check takes time, and a contiguous tensor has no overlap.
    if not target.is_contiguous() and torch._debug_has_internal_overlap(target) == _OVERLAP:  # noqa: SLF001 - torch's kernels check the same
        return True
    for one in arguments:
        if isinstance(one, Tensor):
            if (
                target.data_ptr() < one.data_ptr() + one.nbytes
                and one.data_ptr() < target.data_ptr() + target.nbytes
                and torch._C._overlaps(target, one)  # noqa: SLF001 - whether they have one storage
                and not any(map(torch._debug_has_internal_overlap, (target, one)))  # noqa: SLF001 - as above
            ):
                return True
        elif isinstance(one, list) and _shares_memory(target, one):
            return True
    return False


@contextmanager
def decompositions_bypassed(names: Collection[str], device: str) -> Iterator[None]:
    """Run the body with the ops of patched gradients in place of their decompositions.

    With the flag on in the forward pass, bilinear and trilinear ``F.interpolate``, replicating
    ``F.pad`` and ``F.max_pool3d`` with ``return_indices`` look a decomposition up on CUDA, whose
    gradient is an ``index_put`` with many times the memory traffic: the patched gradient would
    never run. The registered decompositions do not change.
    """

    def run(name: str, decompose: Callable[..., Any], image: Tensor, *args: Any, **kw: Any) -> Any:
        if name == "_upsample_linear_vec":
            op = f"upsample_{'trilinear3d' if image.dim() == 5 else 'bilinear2d'}"  # noqa: PLR2004 - dimensions
            native = getattr(_native, op)
        elif name == "_replication_pad":
            op = f"replication_pad{len(args[0]) // 2}d"
            native = partial(_native.pad, mode="replicate")
        else:  # from torch 2.13 on
            op, native = "max_pool3d", _native.max_pool3d_with_indices
        patched = f"{op}_backward" in names and image.device.type == device
        return (native if patched else decompose)(image, *args, **kw)

    with ExitStack() as stack:
        for name in ("_upsample_linear_vec", "_replication_pad", "max_pool3d_with_indices"):
            # A release may lack one, as hooks.py says.
            if decompose := getattr(torch_decompositions, name, None):
                replace_method(stack, torch_decompositions, name, partial(run, name, decompose))
        yield
