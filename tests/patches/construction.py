"""The aten ops that the replacements call, and the reason why each is deterministic."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_d9m.patches.catalog.catalog import Op
from lightning_d9m.patches.kernels import separable
from lightning_d9m.patches.registration import Update
from lightning_d9m.state.parts import equal_bits

ONE_THREAD_PER_OUTPUT = {
    *("arange", "empty.memory_format", "full", "full_like", "new_empty", "new_full", "new_zeros"),
    *("ones_like", "zeros", "zeros_like", "empty_like", "scalar_tensor", "lift_fresh", "detach_"),
    *("_unsafe_view", "_to_copy", "copy_", "clone", "cat", "stack", "flip", "floor_divide"),
    *("fill_.Scalar", "gather", "take", "scatter.value", "scatter_.value", "index.Tensor"),
    *("index_select", "searchsorted.Tensor", "_assert_async", "_local_scalar_dense"),
    "set_.source_Storage_storage_offset",  # memory that is not filled
    "complex",  # of a real and an imaginary part
    "_ctc_loss",  # forward: one thread for each state, one step after the other
    "index_fill_.int_Scalar",  # one number, by however many threads
    "kthvalue",  # its value; the index, which may vary, is not used
    "nll_loss2d_forward",  # without a reduction
}
"""No two threads meet: they read, copy, or go through their own elements in order."""

FIXED_TREES = {"sum", "sum.dim_IntList", "all", "any.dim", "amin", "argmax", "aminmax"}
FIXED_TREES |= {"segment_reduce"}
"""Reductions whose partial results are combined in an order that the shapes decide."""


def _sorts_stably(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("stable"))


def _adds_exactly(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Integers, and pieces of terms, whose sums are the same from first to last and back."""
    target, dim, index, values = args
    back = target.clone().index_add_(dim, index.flip(0), values.flip(dim))
    forth = target.clone().index_add_(dim, index, values)
    is_nan = (back != back) & (forth != forth)  # noqa: PLR0124 - of NaNs there is one
    return bool(((back == forth) | is_nan).all()) and not (
        target.is_floating_point() and target.dtype != torch.float64
    )


def _writes_each_place_once(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args[2].unique()) == len(args[2])


def _counts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Integers are added exactly, in any order."""
    return not args[0].is_floating_point()


def _has_no_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Integers are counted exactly."""
    return kwargs.get("weights", args[1] if len(args) > 1 else None) is None


def _takes_extremes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of numbers that are equal only if their bits are; NaNs become one later."""
    zeros = [part[part == 0] for part in (args[0], args[3])]
    plain = not any(part.signbit().any() for part in zeros)
    return plain and args[4] in {"amax", "amin"}


def _writes_alike_in_any_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """To accumulate, it sorts; else all values for one place must be the same."""
    target, indices, values, *rest = args
    if any(rest) or any(kwargs.values()):
        return True
    backwards = [index.flip(0) for index in indices]
    forth = target.clone().index_put_(tuple(indices), values)
    back = target.clone().index_put_(tuple(backwards), values.flip(0))
    return equal_bits(forth, back)


def _has_several_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """CUDA's kernel of one row takes partial results as they come."""
    return args[0].numel() != args[0].shape[args[1]] or args[0].numel() <= 1


ON_CONDITION: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {
    "sort.stable": _sorts_stably,
    "bincount": _has_no_weights,
    "cumsum": _counts,
    "cumprod": _has_several_rows,
    "logcumsumexp": _has_several_rows,
    "index_add_": _adds_exactly,
    "index_copy_": _writes_each_place_once,
    "scatter_reduce_.two": _takes_extremes,
    "index_put_": _writes_alike_in_any_order,
}


LEAVING = {
    *("cumprod", "logcumsumexp"),  # several rows, and integers
    *("nll_loss2d_forward", "embedding_bag_dense_backward"),  # other modes
    *("index_add", "index_reduce", "scatter", "scatter_add", "scatter_reduce"),  # integers, complex
    *("histc", "bincount"),  # integers and nothing
    "index_put_impl",  # without accumulate it sorts
}
"""Replacements that leave some arguments to torch's kernel, which is deterministic there."""


class Judge(TorchDispatchMode):
    """Records each aten op that is not known to be deterministic on CUDA.

    Attributes:
        refused: Their names.
        seen: The names of all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result  # composed of other ops, which were judged
        given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        moved = str(kwargs.get("device")) == "meta"
        if moved or (given and all(part.is_meta for part in given)):
            return func(*args, **kwargs)  # only shapes: no kernel runs on any device
        name = str(func).removeprefix("aten.").removesuffix(".default")
        self.seen.add(name)
        fine = (
            torch.Tag.pointwise in func.tags
            or func.is_view
            or name in ONE_THREAD_PER_OUTPUT | FIXED_TREES
            or (name in ON_CONDITION and ON_CONDITION[name](args, kwargs))
        )
        if not fine:
            self.refused.add(name)
        return func(*args, **kwargs)


@contextmanager
def judged(ops: tuple[Op, ...], monkeypatch: Any) -> Iterator[tuple[Judge, set[str]]]:
    """Run every replacement under a judge; yield it and the paths of the replacements that ran.

    Taps, which the host finds once for each set of sizes, are not judged.
    """
    judge, ran = Judge(), set()

    def observe(path: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(replacement)
        def run(*args: object, **kwargs: object) -> object:
            ran.add(path)
            with judge:
                result = replacement(*args, **kwargs)
            assert result is not NotImplemented or path.rpartition(":")[2] in LEAVING, path
            function = result.write if isinstance(result, Update) else result
            if not callable(function):
                return result

            def compute(*args: object, **kwargs: object) -> object:
                with judge:
                    return function(*args, **kwargs)

            return Update(compute) if isinstance(result, Update) else compute

        return run

    with monkeypatch.context() as patch:
        for path in {path for op in ops for path in op.kernels.values()}:
            module = import_module(path.split(":")[0])
            name = path.split(":")[1]
            patch.setattr(module, name, observe(path, getattr(module, name)))

        find = separable.cached_taps

        def prepare(*args: object) -> object:
            with _disable_current_modes():
                return find(*args)

        patch.setattr(separable, "cached_taps", prepare)
        yield judge, ran
