"""Checks of repeatability, and of a sample's independence from the other samples of its batch."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lightning_d9m.audit.inference.fixed_batch import concatenate
from lightning_d9m.audit.inference.subject import Subject, list_batches
from lightning_d9m.audit.inference.trace import (
    ModuleTrace,
    ModuleValue,
    modules_traced,
    ops_traced,
)
from lightning_d9m.hashing.digest import digest_value

_Differing: TypeAlias = dict[tuple[str, str, int], set[int]]


@dataclass
class ModuleFindings:
    """The findings about one module.

    Attributes:
        kind: Name of its class.
        outputs: Number of distinct outputs over the repetitions: the maximum over its calls.
        varies: Whether it gave several outputs for equal inputs, and no module inside it did.
        sizes: Batch sizes at which the output of a sample differs from that of a batch of one.
        breaks: Batch sizes at which it differs although the module's inputs are equal, and no
            module inside it does so.
        unknown: Whether its outputs cannot be assigned to samples.
        contains_break: Whether a module inside it breaks.
        is_ruled_out: Whether its outputs are equal when its inputs are.
    """

    kind: str
    outputs: int = 1
    varies: bool = False
    sizes: set[int] = field(default_factory=set)
    breaks: set[int] = field(default_factory=set)
    unknown: bool = False
    contains_break: bool = False
    is_ruled_out: bool = False

    @property
    def invariance(self) -> str:
        """The result of the batch check, in a word or two."""
        if self.breaks:
            return "not invariant"
        if self.contains_break:
            return "contains one that is not"
        if self.sizes and not self.is_ruled_out:
            return "inherits"
        return "unknown" if self.unknown else "invariant"

    @property
    def repeatability(self) -> str:
        """The result of the repeatability check, in a word."""
        if self.outputs == 1:
            return "repeatable"
        return "varies" if self.varies else "inherits"


@dataclass(frozen=True)
class FirstBreak:
    """The first module whose output for a sample depended on the batch.

    Attributes:
        module: Name of the module; ``""`` is the model itself.
        op: Name of the first such op in it, if one was found.
        size: The batch size.
        sample: Index of the sample.
    """

    module: str
    op: str | None
    size: int
    sample: int


def check_repeatability(
    subject: Subject, runs: int, size: int, modules: dict[str, ModuleFindings]
) -> int:
    """Evaluate a batch ``runs`` times; return the number of distinct outputs without hooks."""
    batch = subject.collate(range(size))
    bare = {digest_value(subject.call(batch)) for _ in range(runs)}
    traces = []
    for _ in range(runs):
        trace = ModuleTrace(1, {})  # size 1: each value has one digest
        with modules_traced(subject.module, trace):
            subject.call(batch)
        traces.append(trace)
    values: dict[ModuleValue, list[str]] = defaultdict(list)
    for trace in traces:
        for place, rows in trace.rows.items():
            values[place].append(rows[0][0] if rows else "")
    differing: _Differing = defaultdict(set)
    for place, found in values.items():
        if len(set(found)) > 1 or len(found) < runs:
            differing[place[:3]].add(0)
            if place.kind == "output":
                findings = modules[place.name]
                findings.outputs = max(findings.outputs, len(set(found)))
    for name in _find_causes(values, differing):
        modules[name].varies = True
    return len(bare)


def _find_causes(places: Iterable[ModuleValue], differing: _Differing) -> dict[str, int]:
    """Return the modules whose outputs alone differ, and those of no module inside them.

    Args:
        places: The values in the order in which they are computed.
        differing: The positions of samples that differ, by kind, module and call.

    Returns:
        The least position that differs, by the name of the module.
    """
    causes: dict[str, int] = {}
    for place in places:
        alone = differing[place[:3]] - differing["input", place.name, place.call]
        if place.kind == "output" and alone and not _contains_any(place.name, causes):
            causes.setdefault(place.name, min(alone))
    return causes


class Invariance:
    """Compares every sample, in batches of several sizes and orders, with its batch of one."""

    def __init__(self, subject: Subject, modules: dict[str, ModuleFindings]) -> None:
        self._subject = subject
        self._modules = modules
        self._shapes: dict[ModuleValue, torch.Size] = {}
        self.first: FirstBreak | None = None
        self._single = [self._trace([sample]) for sample in range(len(subject.samples))]

    def check(self, size: int) -> None:
        """Evaluate batches of one size with hooks, and remember the first break."""
        for indices in list_batches(len(self._subject.samples), size):
            trace = self._trace(indices)
            broken = self._compare(trace, indices)
            if broken and self.first is None:
                name, position = broken[0]
                op = self._find_op(name, indices, position)
                self.first = FirstBreak(name, op, size, indices[position])

    def attribute_breaks(self, sizes: Sequence[int]) -> None:
        """Attribute differing outputs to the modules that cause them.

        Re-run each module whose inputs already differed with the inputs from the batches of one,
        innermost modules first. Otherwise nothing is known about the modules after the first break.
        """
        for name, findings in reversed(self._modules.items()):
            breaking_modules = {other for other, found in self._modules.items() if found.breaks}
            findings.contains_break = _contains_any(name, breaking_modules)
            if findings.invariance == "inherits":
                breaking = find_breaking_sizes(self._subject, name, sizes)
                if breaking is not None:
                    findings.breaks |= breaking
                    findings.is_ruled_out = not breaking

    def _trace(self, indices: Sequence[int]) -> ModuleTrace:
        trace = ModuleTrace(len(indices), self._shapes)
        with modules_traced(self._subject.module, trace):
            self._subject.call(self._subject.collate(indices))
        return trace

    def _compare(self, trace: ModuleTrace, indices: Sequence[int]) -> list[tuple[str, int]]:
        """Return the modules that break in this batch, each with the position of a sample."""
        differing: _Differing = defaultdict(set)
        order: list[ModuleValue] = []
        for place, rows in trace.rows.items():
            known = [self._single[sample].rows.get(place) for sample in indices]
            if rows is None or not all(known):
                if place.kind == "output":
                    self._modules[place.name].unknown = True
                # These inputs cannot be compared, so do not blame the module that reads them.
                differing[place[:3]].update(range(trace.size) if place.kind == "input" else ())
                continue
            order.append(place)
            for position, one in enumerate(known):
                if one is not None and not trace.agrees(place, position, one[0][0]):
                    differing[place[:3]].add(position)
            if place.kind == "output" and differing[place[:3]]:
                self._modules[place.name].sizes.add(trace.size)
        causes = _find_causes(order, differing)
        for name in causes:
            self._modules[name].breaks.add(trace.size)
        return list(causes.items())

    def _find_op(self, name: str, indices: Sequence[int], position: int) -> str | None:
        """Return the first op in a module whose result for the sample differs."""
        module = self._subject.module.get_submodule(name)
        shapes: dict[ModuleValue, torch.Size] = {}
        traces = []
        for chosen in ([indices[position]], indices):
            trace = ModuleTrace(len(chosen), shapes)
            with ops_traced(module, trace):
                self._subject.call(self._subject.collate(chosen))
            traces.append(trace)
        alone, batched = traces
        for place in batched.rows:
            expected = alone.rows.get(place)
            if expected and batched.agrees(place, position, expected[0][0]) is False:
                return place.name
        return None


def _contains_any(name: str, causes: Iterable[str]) -> bool:
    """Return whether one of the causes is a module inside this one."""
    return any(cause != name and (not name or cause.startswith(name + ".")) for cause in causes)


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
