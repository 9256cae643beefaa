"""The mode that computes each operation of torch with the same bits on every machine.

Every operation belongs to one class: torch's own kernel moves values or compares them (``MOVES``),
a rule computes it, torch takes it apart under the mode, or it takes only whole numbers. An
operation in no class raises an error.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_d9m.errors import D9mError, NotPortableError, SettingError
from lightning_d9m.ops import portability
from lightning_d9m.ops.patches.catalog.catalog import OPS
from lightning_d9m.ops.patches.kernels import updates
from lightning_d9m.ops.patches.registration import Kernel, RefusedError, put_flag, read_flag
from lightning_d9m.ops.portability import draws, normalizations, products
from lightning_d9m.ops.portability.library import count_threads
from lightning_d9m.ops.portability.optimizers import list_replacements
from lightning_d9m.ops.portability.registry import COMPOSED, RULES, Rule
from lightning_d9m.program import find_line

# Operations that torch's own kernels serve: they move values, compare them, or round them to whole
# numbers; and transfers between processes that compute nothing.
MOVES, _TRANSFERS = (
    frozenset(part.split())
    for part in Path(__file__).with_name("moves.txt").read_text().split("\n\n")
)
# Torch's kernels of these call other operations only.
_RULES = (draws, normalizations, products)  # loaded: they register their rules
_COMPOSITE = frozenset({
    *("_embedding_bag_backward", "_grouped_mm", "_trilinear", "allclose", "bernoulli", "copy"),
    *("blackman_window", "hamming_window", "masked_scatter_backward"),
})  # fmt: skip
_OF_WHOLE_NUMBERS = ("kthvalue", "sort", "topk")  # torch's order of equal ones varies
_PATCHES = {overload: path for op in OPS for overload, path in op.kernels.items()}
_SHARE = 2**15  # numbers for which torch takes another thread
# Calls of one operation within each other: a decomposition may call its own one, with simpler
# arguments, and one that is taken apart into itself would not end.
_MOST_NESTED = 8
_PLAIN = Tensor.__torch_dispatch__  # what a subclass that only has a name inherits
_KEYS = torch._C.DispatchKey  # noqa: SLF001 - torch has no public name
_CHOOSE = [sys.modules[f"torch.optim.{name}"] for name in ("optimizer", "swa_utils")]
_LISTS = "_get_foreach_kernels_supported_devices"


class PortableMode(TorchDispatchMode):
    """Computes each operation by its class."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[Any, Rule] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute an operation."""
        if types and any(one.__torch_dispatch__ is not _PLAIN for one in types):
            if any(issubclass(one, FakeTensor) for one in types):  # it has a shape and no numbers
                return func(*args, **(kwargs or {}))
            return NotImplemented  # a subclass of Tensor takes it apart first
        # Kept, because the choice depends on the operation alone, and torch dispatches thousands.
        found = self._found.get(func)
        if found is None:
            found = self._found[func] = self._find(func)
        return found(*args, **(kwargs or {}))

    def _find(self, func: Any) -> Rule:
        """Return what computes an operation."""
        space, _, name = func._schema.name.partition("::")  # noqa: SLF001 - its public name
        if space == "prims":
            return self._compose(func.impl_aten, func)
        if space in ("c10d", "_c10d_functional", "c10d_functional"):
            return func if name in _TRANSFERS else partial(_reduce, func)
        if space != "aten":
            return self._take_apart(func)
        base = name.removesuffix("_") if not name.startswith("__") else name
        # A rule for the in-place form goes first: it writes once, where the result of a functional
        # rule is copied.
        for one in (name, base):
            found = self._compose(COMPOSED[one]) if one in COMPOSED else RULES.get(one)
            if found is not None:
                writes = one != name or any(arg.is_out for arg in func._schema.arguments)  # noqa: SLF001
                found = partial(_write, func, found) if writes else found
                whole = not (_is_seeded(func) or one in _OF_WHOLE_NUMBERS)
                return partial(_checked, func, found, partial(self._take_apart, func), whole=whole)
        moves = base in MOVES and "reduce" not in func._overloadname  # noqa: SLF001 - a sum
        if moves or torch.Tag.view_copy in func.tags:
            return func  # type: ignore[no-any-return]
        is_view = any(_is_view(one) for one in (func, _find_functional(func)))
        return func if is_view else self._take_apart(func)

    def _take_apart(self, func: Any) -> Rule:
        """Return what computes an operation by others, or refuses it."""
        apart, functional = _find_composite(func), _find_functional(func)
        # Exact sums at places, which are written where they belong, take no copy.
        is_at_places = f"{updates.__name__}:" in (_find_patch(func) or "")
        # Those of torch that write convert a result to any type.
        if apart is None and functional is None and not is_at_places:
            apart = decomposition_table.get(func)
        if apart is None and func.has_kernel_for_dispatch_key(_KEYS.CompositeImplicitAutograd):
            apart = func.decompose
        if apart is not None:
            return self._compose(apart, func)
        if functional is not None and not is_at_places:
            return partial(_write, func, self._find(functional))
        rule: Rule = lambda *_, **__: NotImplemented  # noqa: E731
        path = _find_patch(func)
        if path is not None:
            kernel = Kernel(resolve_name(path), None, func._schema, switches=False)  # noqa: SLF001
            rule = self._compose(partial(_patch, kernel), func)
        whole = path is not None or not _is_seeded(func)
        return partial(_checked, func, rule, partial(refuse, func), whole=whole)

    def _compose(self, function: Rule, func: Any = None) -> Rule:
        """Run a function under the mode; refuse an operation that leads back to itself."""

        def run(*args: Any, **kwargs: Any) -> Any:
            running = vars(portability.active).setdefault("running", [])
            if func is not None and running.count(func) >= _MOST_NESTED:
                refuse(func)
            running.append(func)
            try:
                with self:
                    return function(*args, **kwargs)
            finally:
                running.pop()

        return run


def _find_patch(func: Any) -> str | None:
    """Return the path of the deterministic replacement of an operation."""
    name = func._schema.name.partition("::")[2]  # noqa: SLF001 - its public name
    same = [func, *(one for one in _list_overloads(func) if _find_functional(one) is func)]
    names = [one.name().partition("::")[2] for one in same]
    paths = (_PATCHES.get(one) for one in (*names, f"{name}_"))
    return next(filter(None, paths), None)


def _patch(kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Compute an operation by its deterministic replacement, under the mode."""
    result = kernel.replace(args, kwargs)
    if result is NotImplemented:
        raise RefusedError
    return result


def _is_seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_view(func: Any) -> bool:
    returns = func._schema.returns if func is not None else ()  # noqa: SLF001 - torch has no public form
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def _find_composite(func: Any) -> Rule | None:
    """Return torch's kernel of an operation if it only calls others: those then come to the mode.

    Torch's kernel for any device handles the tensors of ``_foreach_`` operations one by one, or
    makes a tensor and fills it with random numbers in place.
    """
    name = func._schema.name.partition("::")[2]  # noqa: SLF001 - its public name
    keys = [_KEYS.CompositeExplicitAutograd]
    if name.startswith("_foreach_") or name in _COMPOSITE:
        keys += [_KEYS.CompositeExplicitAutogradNonFunctional, _KEYS.CPU]
    elif not _is_seeded(func):
        return None
    found = [key for key in keys if func.has_kernel_for_dispatch_key(key)]
    return partial(func._op_dk, found[0]) if found else None  # noqa: SLF001 - as torch decomposes


def _list_overloads(func: Any, name: str = "") -> list[Any]:
    """Return the overloads of an operation, or of another one of its namespace."""
    name = name or func._schema.name.partition("::")[2]  # noqa: SLF001 - its public name
    packet = getattr(getattr(torch.ops, func.namespace), name, None)
    return [getattr(packet, one) for one in packet.overloads()] if packet else []


def _find_functional(func: Any) -> Any:
    """Return the overload without a side effect of one that writes; None if there is none."""
    schema = func._schema  # noqa: SLF001 - torch has no public form
    if not schema.is_mutable:
        return None
    packet, name = schema.name.partition("::")[2].removesuffix("_"), func._overloadname  # noqa: SLF001
    wanted = [(one.name, str(one.type)) for one in schema.arguments if not one.is_out]
    for candidate in _list_overloads(func, packet):
        if candidate._schema.is_mutable:  # noqa: SLF001
            continue
        given = [(one.name, str(one.type)) for one in candidate._schema.arguments]  # noqa: SLF001
        if given == wanted or (not schema.name.endswith("_") and candidate._overloadname == name):  # noqa: SLF001
            return candidate
    return None


def _write(func: Any, general: Rule, *args: Any, **kwargs: Any) -> Any:
    """Compute a functional form, and write the results where the operation writes them."""
    schema = func._schema  # noqa: SLF001 - torch has no public form
    outs = [one.name for one in schema.arguments if one.is_out]
    targets = [kwargs.pop(name) for name in outs] if outs else list(args[:1])
    results = general(*args, **kwargs)
    if results is NotImplemented:
        return NotImplemented
    for target, result in zip(
        targets, results if isinstance(results, tuple) else (results,), strict=True
    ):
        if not torch.can_cast(result.dtype, target.dtype):
            given, wanted = result.dtype, target.dtype  # torch's words
            raise RuntimeError(f"result type {given} can't be cast to the output type {wanted}")
        # As torch does with what `out=` names; in place, another shape is an error of `copy_`.
        if outs and target.shape != result.shape:
            target.resize_(result.shape)
        target.copy_(result)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _checked(
    func: Any,
    rule: Rule,
    take_apart: Callable[[], Rule],
    *args: Any,
    whole: bool,
    **kwargs: Any,
) -> Any:
    """Apply a rule to dense real numbers; leave whole numbers, and what has none, to torch."""
    count, tensors, fractions = 0, False, False
    for one in _tensors(args):
        if one.is_meta:  # it has a shape and no numbers
            return func(*args, **kwargs)
        if one.is_complex() or one.layout != torch.strided:
            refuse(func)
        count, tensors = count + one.numel(), True
        fractions = fractions or one.is_floating_point()
    # Without a number there is nothing to round, and torch knows its results and its errors.
    if tensors and not count:
        return func(*args, **kwargs)
    if whole and not fractions:
        found = func(*args, **kwargs)
        if not any(map(_has_fractions, _tensors([found]))):
            return found
    try:
        found = rule(*args, **kwargs)
    except (D9mError, torch.OutOfMemoryError):
        raise
    except (RefusedError, RuntimeError, IndexError, ValueError) as error:
        _explain(error, func, *args, **kwargs)
    return take_apart()(*args, **kwargs) if found is NotImplemented else found


def _explain(error: Exception, func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise torch's own error, with its words, if it does not take the arguments either."""
    if not func._schema.is_mutable:  # noqa: SLF001 - torch has no public form
        func(*args, **kwargs)
    if not isinstance(error, RefusedError):
        raise error
    refuse(func, f"{str(error) or 'Its deterministic replacement does not take them'}.")


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.layout != torch.strided


def _reduce(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Reduce over processes if the order of the additions cannot matter."""
    if torch.distributed.get_world_size() == 1 or not any(map(_has_fractions, _tensors(args))):
        return func(*args, **kwargs)
    operation = next((one for one in args if "ReduceOp" in type(one).__name__), None)
    if not any(name in str(operation) for name in ("MAX", "MIN")):
        refuse(func, "Sum in a fixed order: DDPDeterministicStrategy(logical_ranks=...).")
    return func(*args, **kwargs)


def refuse(func: Any, remedy: str = "") -> NoReturn:
    """Raise the error for an operation that cannot be computed portably."""
    line = find_line()
    source = f"{line.file}:{line.number}" if line else None
    remedy = remedy or "Replace it by operations that can, or switch portable off."
    where = f" at {source}" if source else ""
    raise NotPortableError(
        f"{func} cannot be computed with the same bits on every machine{where}: it is in none of "
        f"the classes of docs/portable.md. {remedy}",
        op=str(func),
        source=source,
    )


_MODE = PortableMode()
_FILL = "fill_uninitialized_memory"


def _refuse_flushing() -> NoReturn:
    raise SettingError(
        "A thread of torch flushes subnormal numbers to zero, on this machine and not on others. "
        "Call torch.set_flush_denormal(False) before the program's first operation, and do not "
        "switch it on while bits are portable."
    )


def _check_subnormals() -> None:
    # Enough numbers for all threads of torch: each keeps the state in which it began.
    smallest = torch.full((_SHARE * count_threads(),), 2.0**-126, dtype=torch.float32, device="cpu")
    if not smallest.mul_(0.5).all():
        _refuse_flushing()


def _list_switches() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """Yield what reads a switch of torch, what sets it, and its value in portable blocks."""
    cuda, flags, mha = torch.backends.cuda, torch._C, torch.backends.mha  # noqa: SLF001 - no public setters
    # oneDNN's recurrent layers are one operation; without it torch takes them apart.
    yield flags._get_mkldnn_enabled, flags._set_mkldnn_enabled, False  # noqa: SLF001
    # cuDNN chooses an order of additions.
    yield flags._get_cudnn_enabled, flags._set_cudnn_enabled, False  # noqa: SLF001
    # Fused kernels choose an order of additions; plain attention is products and softmax.
    yield cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False
    yield cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False
    yield cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False
    yield cuda.math_sdp_enabled, cuda.enable_math_sdp, True
    # Threads of torch write numbers to one place in any order without it. It only warns of what
    # has no such kernel, as that is mostly not torch's here.
    yield read_flag, put_flag, (True, read_flag() != (True, False))
    # The fast path of encoder layers is one operation.
    yield mha.get_fastpath_enabled, mha.set_fastpath_enabled, False
    uninitialized: Any = torch.utils.deterministic
    set_flush = torch.set_flush_denormal
    for own, name, value in (
        # On some devices optimizers and averages choose formulas for lists, which round otherwise.
        *((own, _LISTS, list) for own in _CHOOSE),
        # Which the flag would switch on, at the price of writing each new tensor.
        (uninitialized, _FILL, read_flag()[0] and getattr(uninitialized, _FILL)),
        (torch, "set_flush_denormal", lambda on: _refuse_flushing() if on else set_flush(False)),
        *list_replacements(),
    ):
        yield partial(getattr, own, name), partial(setattr, own, name), value


class _Switches:
    """Torch's switches, which all threads share: the first block sets them, the last restores."""

    def __init__(self) -> None:
        self._lock, self._blocks, self._stack = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock, ExitStack() as stack:
            if not self._blocks:
                for get, put, value in [*_list_switches()]:
                    stack.callback(put, get())
                    put(value)
                self._stack = stack.pop_all()
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._stack.close()


_SWITCHES = _Switches()


@contextmanager
def portable() -> Iterator[None]:
    """Compute every operation of the body with the same bits on every machine.

    It is up to about twice as slow as torch. An operation that cannot be computed so raises a
    ``NotPortableError``.

    Examples:
        >>> import torch
        >>> with portable():
        ...     torch.tensor([0.5, 0.25]).exp().tolist()
        [1.6487212181091309, 1.2840254306793213]
    """
    # The switches are on, and the mode is not entered twice: it would compute its own operations.
    if portability.is_portable():
        yield
        return
    _check_subnormals()
    with _SWITCHES, ExitStack() as stack:
        portability.active.count = 1
        stack.callback(setattr, portability.active, "count", 0)
        stack.enter_context(_MODE)
        yield
    _check_subnormals()  # not only torch switches it on, but also a library that is loaded
