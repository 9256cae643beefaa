"""Evaluation of a single module on batches that are assembled from the inputs of single samples.

In the model, every module after the first one that depends on its batch gets inputs that depend on
it. Here each module gets the inputs that it got for each sample in a batch of one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lightning_d9m.audit.inference.fixed_batch import concatenate
from lightning_d9m.audit.inference.subject import Subject, list_batches
from lightning_d9m.audit.inference.trace import ModuleTrace


def find_breaking_sizes(subject: Subject, name: str, sizes: Sequence[int]) -> set[int] | None:
    """Return the batch sizes at which a module's own output for a sample differs.

    Returns:
        None if its inputs cannot be assembled from those of single samples.
    """
    module = subject.module.get_submodule(name)
    count = len(subject.samples)
    inputs = [_capture(subject, module, [sample]) for sample in range(count)]
    pair = _capture(subject, module, [0, 1])
    if pair is None or None in inputs:
        return None
    dims = _find_dims(inputs[0], inputs[1], pair)
    if dims is None:
        return None
    shapes: dict[Any, torch.Size] = {}
    alone = [_evaluate(module, single, 1, shapes) for single in inputs]
    breaking = set()
    for size in sizes:
        for indices in list_batches(count, size):
            batched = _evaluate(
                module, concatenate([inputs[i] for i in indices], dims), size, shapes
            )
            for place, rows in batched.rows.items():
                expected = [alone[index].rows.get(place) for index in indices]
                if rows is None or not all(expected):
                    return None
                if any(
                    one is not None and not batched.agrees(place, position, one[0][0])
                    for position, one in enumerate(expected)
                ):
                    breaking.add(size)
    return breaking


def _capture(subject: Subject, module: nn.Module, indices: Sequence[int]) -> Any:
    """Return the arguments of a module's first call, or None if it is not called."""
    seen: list[Any] = []

    def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not seen:
            seen.append(_copy((args, kwargs)))

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        subject.call(subject.collate(indices))
    finally:
        handle.remove()
    return seen[0] if seen else None


def _copy(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def _find_dims(first: Any, second: Any, pair: Any) -> list[int | None] | None:
    """Return the batch dimension of each argument, or None for an argument without one."""
    dims: list[int | None] = []
    for one, other, both in zip(*(tree_flatten(v)[0] for v in (first, second, pair)), strict=True):
        if not isinstance(one, Tensor):
            dims.append(None)
            continue
        longer = [d for d in range(one.dim()) if one.shape[d] != both.shape[d]]
        if (
            len(longer) == 1
            and one.shape == other.shape
            and both.shape[longer[0]] == 2 * one.shape[longer[0]]
        ):
            dims.append(longer[0])
        elif not longer and torch.equal(one, other):
            dims.append(None)
        else:
            return None
    return dims


def _evaluate(
    module: nn.Module, inputs: Any, size: int, shapes: dict[Any, torch.Size]
) -> ModuleTrace:
    args, kwargs = _copy(inputs)
    trace = ModuleTrace(size, shapes)
    with torch.no_grad():
        torch.manual_seed(0)
        trace.record("output", "", module(*args, **kwargs))
    return trace
