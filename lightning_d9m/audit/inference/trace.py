"""What each module, and each op in it, gave for each sample of a batch, as digests.

A tensor's batch dimension is the one that is longer than in the same place of a single sample's
evaluation. Where heads or steps are folded into it, both ways of folding are tried.
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
        call: How often it was called before, in this evaluation.
        leaf: Which tensor of the value.
    """

    kind: str
    name: str
    call: int
    leaf: int


@dataclass
class ModuleTrace:
    """What one evaluation gave at each place, in the order in which the values were ready.

    Attributes:
        size: Number of samples.
        shapes: Shape of each place in the evaluation of one sample; filled by that one.
        rows: One digest for each sample, or None where the place holds no samples.
        either: The same for the other way of folding, where there are two.
    """

    size: int
    shapes: dict[ModuleValue, torch.Size]
    rows: dict[ModuleValue, list[str] | None] = field(default_factory=dict)
    either: dict[ModuleValue, list[str]] = field(default_factory=dict)
    _calls: dict[tuple[str, str], int] = field(default_factory=dict)

    def note(self, kind: str, name: str, value: object) -> None:
        """Digest a value by sample."""
        call = self._calls.get((kind, name), 0)
        self._calls[kind, name] = call + 1
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for leaf, tensor in enumerate(tensors):
            self._note_tensor(ModuleValue(kind, name, call, leaf), tensor.detach())

    def _note_tensor(self, place: ModuleValue, tensor: Tensor) -> None:
        if self.size == 1:
            self.shapes[place] = tensor.shape
            self.rows[place] = digest_many([tensor])
            return
        parts = split_samples(tensor, self.shapes.get(place), self.size)
        if parts is None:
            self.rows[place] = None
            return
        digests = digest_many([part for folding in parts for part in folding])
        self.rows[place] = digests[: self.size]
        if len(parts) > 1:
            self.either[place] = digests[self.size :]

    def agrees(self, place: ModuleValue, sample: int, expected: str) -> bool | None:
        """Say whether a sample has the expected bits at a place; None where it has no part."""
        rows = self.rows.get(place)
        if rows is None:
            return None
        return rows[sample] == expected or (
            place in self.either and self.either[place][sample] == expected
        )


def split_samples(
    tensor: Tensor, single: torch.Size | None, size: int
) -> list[list[Tensor]] | None:
    """Return each sample's part of a tensor, for each way in which it may be folded.

    Args:
        tensor: What a batch of ``size`` samples gave.
        single: The shape that one sample gives.
        size: Number of samples.

    Returns:
        One list for each way of folding, or None when the samples cannot be told apart.
    """
    if single is None or len(single) != tensor.dim():
        return None
    longer = [
        d for d, (one, all_) in enumerate(zip(single, tensor.shape, strict=True)) if one != all_
    ]
    if not longer:  # the same for every sample, as a mask is
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
    """Note the inputs and outputs of every module within the body."""
    handles = []
    try:
        for name, part in module.named_modules():
            handles.append(part.register_forward_pre_hook(_before(trace, name), with_kwargs=True))
            handles.append(part.register_forward_hook(_after(trace, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(trace: ModuleTrace, name: str) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        trace.note("input", name, (args, kwargs))

    return hook


def _after(trace: ModuleTrace, name: str) -> Any:
    def hook(_: nn.Module, __: Any, outputs: Any) -> None:
        trace.note("output", name, outputs)

    return hook


class _Ops(TorchDispatchMode):
    def __init__(self, trace: ModuleTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = op(*args, **(kwargs or {}))
        # What an op returns holds its own arithmetic; a view's is that of what it shows.
        if not getattr(op, "is_view", False):
            self._trace.note("output", str(op), outputs)
        return outputs


@contextmanager
def ops_traced(module: nn.Module, trace: ModuleTrace) -> Iterator[None]:
    """Note the outputs of every op within the forward passes of one module."""
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
