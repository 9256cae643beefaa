"""Digests of the output of each module, and of each op in it, for each sample of a batch.

A tensor's batch dimension is the one that is longer than in the same value of a single sample's
evaluation. If heads or steps are folded into it, both ways of folding are tried.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_d9m.hashing.digest import digest_many


class ModuleValue(NamedTuple):
    """A value in one evaluation.

    Attributes:
        kind: ``"input"`` or ``"output"``.
        name: The module's name; ``""`` is the model.
        call: Number of its earlier calls in this evaluation.
        leaf: Index of the tensor in the value.
    """

    kind: str
    name: str
    call: int
    leaf: int


@dataclass
class ModuleTrace:
    """The digests of one evaluation, in the order in which the values were computed.

    Attributes:
        size: Number of samples.
        shapes: Shape of each value in the evaluation of one sample, which fills it.
        rows: For each sample one digest, or two if there are two ways of folding; None if the value
            has no batch dimension.
    """

    size: int
    shapes: dict[ModuleValue, torch.Size]
    rows: dict[ModuleValue, list[tuple[str, ...]] | None] = field(default_factory=dict)
    _calls: dict[tuple[str, str], int] = field(default_factory=dict)

    def record(self, kind: str, name: str, value: object) -> None:
        """Digest a value by sample."""
        call = self._calls.get((kind, name), 0)
        self._calls[kind, name] = call + 1
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for leaf, tensor in enumerate(tensors):
            self._record_tensor(ModuleValue(kind, name, call, leaf), tensor.detach())

    def _record_tensor(self, place: ModuleValue, tensor: Tensor) -> None:
        if self.size == 1:
            self.shapes[place] = tensor.shape
        parts = split_samples(tensor, self.shapes.get(place), self.size)
        if parts is None:
            self.rows[place] = None
            return
        digests = [digest_many(folding) for folding in parts]
        self.rows[place] = list(zip(*digests, strict=True))

    def agrees(self, place: ModuleValue, sample: int, expected: str) -> bool | None:
        """Return whether a sample's part of a value has the expected digest; None without parts."""
        rows = self.rows.get(place)
        return None if rows is None else expected in rows[sample]


def split_samples(
    tensor: Tensor, single: torch.Size | None, size: int
) -> list[list[Tensor]] | None:
    """Return each sample's part of a tensor, for each possible way of folding.

    Args:
        tensor: The value for a batch of ``size`` samples.
        single: The shape of the value for one sample.
        size: Number of samples.

    Returns:
        One list for each way of folding, or None if the samples cannot be separated.
    """
    if single is None or len(single) != tensor.dim():
        return None
    longer = [
        d for d, (one, all_) in enumerate(zip(single, tensor.shape, strict=True)) if one != all_
    ]
    if not longer:  # shared by all samples, such as a mask
        return [[tensor] * size]
    if len(longer) > 1 or tensor.shape[longer[0]] != size * single[longer[0]]:
        return None
    (dim,), width = longer, single[longer[0]]
    together = [tensor.narrow(dim, sample * width, width) for sample in range(size)]
    if width == 1:
        return [together]
    places = torch.arange(width, device=tensor.device) * size
    return [together, [tensor.index_select(dim, places + sample) for sample in range(size)]]


@contextmanager
def modules_traced(module: nn.Module, trace: ModuleTrace) -> Iterator[None]:
    """Record the inputs and outputs of every module while the body runs."""
    handles = []
    try:
        for name, part in module.named_modules():

            def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                trace.record("input", name, (args, kwargs))

            def after(_: nn.Module, __: Any, outputs: Any, name: str = name) -> None:
                trace.record("output", name, outputs)

            handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(part.register_forward_hook(after))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Ops(TorchDispatchMode):
    def __init__(self, trace: ModuleTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = op(*args, **(kwargs or {}))
        # A view computes nothing.
        if not getattr(op, "is_view", False):
            self._trace.record("output", str(op), outputs)
        return outputs


@contextmanager
def ops_traced(module: nn.Module, trace: ModuleTrace) -> Iterator[None]:
    """Record the outputs of every op in the forward passes of one module."""
    modes: list[_Ops] = []

    def enter(*_: object) -> None:
        modes.append(_Ops(trace))
        modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: object) -> None:
        modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    handles = [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
