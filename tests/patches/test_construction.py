"""Replacements give torch's answer by ops that are deterministic on CUDA.

One edge case of each kind runs here. ``check_edge_cases.py`` runs all, by the Triton
kernels, too; its result is checked here. The kinds are: each of 12 dtypes, empty and 0-d tensors,
negative and out-of-range indices, indices of another length, shape and dtype, broadcast, strided,
expanded and overlapping tensors, channels_last, ``out=``, shared memory, infinities, NaN and -0.0,
torch's own samples of the ops, and the calls of its own that torch refuses.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from patches.check_edge_cases import find_differences
from patches.edge_cases import EdgeCase, list_cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_d9m.engine.control.environment import threads_pinned
from lightning_d9m.engine.state.parts import equal_bits
from lightning_d9m.ops.patches.catalog.catalog import select_ops
from lightning_d9m.ops.patches.kernels import separable
from lightning_d9m.ops.patches.registration import Update, patches_applied

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
REPLACED = select_ops(torch.__version__)
Arguments = tuple[Any, ...]

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
    "nll_loss2d_forward",  # without a reduction
}
"""No two threads meet: they read, copy, or go through their own elements in order."""

FIXED_TREES = {"sum", "sum.dim_IntList", "all", "any.dim", "amin", "argmax", "aminmax"}
FIXED_TREES |= {"segment_reduce", "max"}
"""Reductions whose partial results are combined in an order that the shapes decide."""


def adds_exactly(args: Arguments, _: object) -> bool:
    """Integers, and pieces of terms, whose sums are the same from first to last and back."""
    target, dim, index, values = args
    back = target.clone().index_add_(dim, index.flip(0), values.flip(dim))
    forth = target.clone().index_add_(dim, index, values)
    is_nan = (back != back) & (forth != forth)  # noqa: PLR0124 - of NaNs there is one
    return bool(((back == forth) | is_nan).all()) and not (
        target.is_floating_point() and target.dtype != torch.float64
    )


def takes_extremes(args: Arguments, _: object) -> bool:
    """Of numbers that are equal only if their bits are; NaNs become one later."""
    zeros = [part[part == 0] for part in (args[0], args[3])]
    return args[4] in {"amax", "amin"} and not any(part.signbit().any() for part in zeros)


def writes_alike_in_any_order(args: Arguments, kwargs: dict[str, Any]) -> bool:
    """To accumulate, it sorts; else all values for one place must be the same."""
    target, indices, values, *rest = args
    if any(rest) or any(kwargs.values()):
        return True
    forth = target.clone().index_put_(tuple(indices), values)
    back = target.clone().index_put_(tuple(index.flip(0) for index in indices), values.flip(0))
    return equal_bits(forth, back)


def has_several_rows(args: Arguments, _: object) -> bool:
    """CUDA's kernel of one row takes partial results as they come."""
    return args[0].numel() != args[0].shape[args[1]] or args[0].numel() <= 1


ON_CONDITION: dict[str, Callable[[Arguments, dict[str, Any]], bool]] = {
    "sort.stable": lambda _, kwargs: bool(kwargs.get("stable")),
    # Integers are counted and added exactly.
    "bincount": lambda args, kwargs: kwargs.get("weights", (*args, None)[1]) is None,
    "cumsum": lambda args, _: not args[0].is_floating_point(),
    "cumprod": has_several_rows,
    "logcumsumexp": has_several_rows,
    "index_add_": adds_exactly,
    "scatter_reduce_.two": takes_extremes,
    "index_put_": writes_alike_in_any_order,
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
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result  # composed of other ops, which were judged
        given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        # Of only shapes no kernel runs on any device.
        is_shape = given and all(part.is_meta for part in given)
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if not (
            is_shape
            or str(kwargs.get("device")) == "meta"
            or torch.Tag.pointwise in func.tags
            or func.is_view
            or name in ONE_THREAD_PER_OUTPUT | FIXED_TREES
            or (name in ON_CONDITION and ON_CONDITION[name](args, kwargs))
        ):
            self.refused.add(name)
        return func(*args, **kwargs)


@contextmanager
def judged(monkeypatch: Any) -> Iterator[tuple[Judge, set[str]]]:
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

    find = separable.cached_taps

    def prepare(*args: object) -> object:
        with _disable_current_modes():
            return find(*args)

    with monkeypatch.context() as patch:
        for path in {path for op in REPLACED for path in op.kernels.values()}:
            module, name = import_module(path.split(":")[0]), path.split(":")[1]
            patch.setattr(module, name, observe(path, getattr(module, name)))
        patch.setattr(separable, "cached_taps", prepare)
        yield judge, ran


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_answers_are_torchs_by_ops_that_are_deterministic_on_cuda(monkeypatch):
    """No replacement calls an op that may vary, on none of its paths."""
    # The first one of each kind.
    kinds = [*{(one.op, one.edge): one for one in reversed(list_cases())}.values()]
    with threads_pinned(1), judged(monkeypatch) as (judge, ran):
        differences = find_differences(kinds)
        with patches_applied("CPU"):
            torch.ops.aten.cudnn_grid_sampler_backward(
                torch.randn(2, 3, 5, 6), torch.randn(2, 4, 7, 2), torch.randn(2, 3, 4, 7)
            )
    assert [one for one in zip(kinds, differences, strict=True) if one[1]] == []
    assert len({case.op for case in kinds}) > 50
    assert judge.refused == set()
    assert ran == {path for op in REPLACED for path in op.kernels.values()}


def test_a_difference_is_found():
    """Of values, dtype, shape, strides and errors."""

    def alternate(*answers):
        turns = iter(answers * 2)

        def call():
            turn = next(turns)
            if isinstance(turn, Exception):
                raise turn
            return turn

        return find_differences([EdgeCase("op", "edge", call)])[0]

    one = torch.ones(2, 3)
    for other in (one + 1e-4, one.double(), one[:1], one.t().contiguous().t(), RuntimeError("no")):
        assert alternate(one, other)
        assert alternate(other, one)
        assert alternate(other, other) is None
    assert alternate(RuntimeError("no"), RuntimeError("yes"))


def test_the_results_are_those_of_the_cases():
    """As many of each kind as there are now, by torch ops and by kernels, without a difference."""
    record = json.loads((RESULTS / "edge-cases.json").read_text())
    if record["torch"] != torch.__version__:
        pytest.skip("another torch has other operations and dtypes")
    cases = list_cases()
    assert record["cases_by_edge"] == Counter(case.edge for case in cases)
    assert record["cases"] == len(cases)
    assert record["differences"] == []
    kernels = {f"kernels:{name}" for name in ("accumulate", "add_taps", "sample")}
    assert set(record["cases_by_kernel"]) == kernels


DUPLICATES = torch.tensor([1, 1, 0])
VARYING: dict[str, Callable[[], object]] = {
    "index_add": lambda: torch.zeros(2).index_add_(0, DUPLICATES, torch.ones(3)),
    "index_put": lambda: torch.zeros(2).index_put_((DUPLICATES,), torch.arange(3.0)),
    "cumsum": lambda: torch.ones(3).cumsum(0),
    "cumprod": lambda: torch.ones(5000).cumprod(0),
    "logcumsumexp": lambda: torch.ones(1, 5000).logcumsumexp(1),
    "sort": lambda: torch.ones(3).sort(),
    "bincount": lambda: DUPLICATES.bincount(torch.ones(3)),
    "maximum": lambda: torch.zeros(2).scatter_reduce_(0, DUPLICATES, -torch.zeros(3), "amax"),
    "matmul": lambda: torch.ones(2, 2) @ torch.ones(2, 2),
}


@pytest.mark.parametrize("call", VARYING.values(), ids=VARYING)
def test_what_varies_on_cuda_is_refused(call: Callable[[], object]) -> None:
    """The first test can fail: by an op that is unknown, and by each that is known to vary."""
    with Judge() as judge:
        call()
    assert judge.refused
