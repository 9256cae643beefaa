"""Is a model repeatable, and does a sample's output depend on what shares its batch?"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from lightning_d9m.audit.inference.batches import list_batches
from lightning_d9m.audit.inference.isolation import find_breaking_sizes
from lightning_d9m.audit.inference.subject import Subject
from lightning_d9m.audit.inference.trace import (
    ModuleTrace,
    ModuleValue,
    modules_traced,
    ops_traced,
)
from lightning_d9m.hashing.digest import digest_value


@dataclass
class ModuleFindings:
    """What was seen of one module.

    Attributes:
        kind: Name of its class.
        outputs: Number of distinct outputs over the repetitions, at most over its calls.
        varies: Whether it gave several outputs for equal inputs, and no module in it did.
        sizes: Batch sizes at which a sample had other bits than alone.
        breaks: Batch sizes at which it had, although its inputs had the bits of the sample alone,
            and no module in it did so.
        unknown: Whether its outputs could not be told apart by sample.
        holds: Whether a module in it breaks.
        cleared: Whether it gave a sample its own bits when its inputs had them.
    """

    kind: str
    outputs: int = 1
    varies: bool = False
    sizes: set[int] = field(default_factory=set)
    breaks: set[int] = field(default_factory=set)
    unknown: bool = False
    holds: bool = False
    cleared: bool = False

    @property
    def invariance(self) -> str:
        """In a word or two."""
        if self.breaks:
            return "not invariant"
        if self.holds:
            return "holds one that is not"
        if self.sizes and not self.cleared:
            return "inherits"
        return "unknown" if self.unknown else "invariant"

    @property
    def repeatability(self) -> str:
        """In a word."""
        if self.outputs == 1:
            return "repeatable"
        return "varies" if self.varies else "inherits"


@dataclass(frozen=True)
class FirstBreak:
    """The first place where a sample's bits depended on its batch.

    Attributes:
        module: Name of the module; ``""`` is the model itself.
        op: Name of the first op in it, if one was seen.
        size: The batch size.
        sample: Number of the sample.
    """

    module: str
    op: str | None
    size: int
    sample: int


def check_repeatability(
    subject: Subject, runs: int, size: int, modules: dict[str, ModuleFindings]
) -> int:
    """Evaluate one batch ``runs`` times; return the number of distinct outputs without hooks."""
    batch = subject.collate(range(size))
    bare = {digest_value(subject.call(batch)) for _ in range(runs)}
    traces = []
    for _ in range(runs):
        trace = ModuleTrace(1, {})  # as one sample: each value is digested whole
        with modules_traced(subject.module, trace):
            subject.call(batch)
        traces.append(trace)
    values: dict[ModuleValue, list[str]] = defaultdict(list)
    for trace in traces:
        for place, rows in trace.rows.items():
            values[place].append(rows[0] if rows else "")
    varied = {place for place, found in values.items() if len(set(found)) > 1 or len(found) < runs}
    causes: set[str] = set()
    for place, found in values.items():
        if place.kind == "output" and place in varied:
            findings = modules[place.name]
            findings.outputs = max(findings.outputs, len(set(found)))
            fed = any(p in varied for p in values if _feeds(p, place))
            if not fed and not _inner(place.name, causes):
                causes.add(place.name)
                findings.varies = True
    return len(bare)


class Invariance:
    """Holds every sample, in batches of several sizes and orders, against itself alone."""

    def __init__(self, subject: Subject, modules: dict[str, ModuleFindings]) -> None:
        self._subject = subject
        self._modules = modules
        self._shapes: dict[ModuleValue, torch.Size] = {}
        self.first: FirstBreak | None = None
        self._alone = [self._trace([sample]) for sample in range(len(subject.samples))]

    def check(self, size: int) -> None:
        """Evaluate batches of a size with hooks, and keep what breaks for the first time."""
        for indices in list_batches(len(self._subject.samples), size):
            trace = self._trace(indices)
            broken = self._compare(trace, indices)
            if broken and self.first is None:
                name, position = broken[0]
                op = self._find_op(name, indices, position)
                self.first = FirstBreak(name, op, size, indices[position])

    def isolate(self, sizes: Sequence[int]) -> None:
        """Give each module that only inherits inputs with the bits of alone, the inner ones first.

        Without this nothing could be said of what follows the first module that breaks.
        """
        for name, findings in reversed(self._modules.items()):
            breaking_modules = {other for other, found in self._modules.items() if found.breaks}
            findings.holds = _inner(name, breaking_modules)
            if findings.invariance == "inherits":
                breaking = find_breaking_sizes(self._subject, name, sizes)
                if breaking is not None:
                    findings.breaks |= breaking
                    findings.cleared = not breaking

    def _trace(self, indices: Sequence[int]) -> ModuleTrace:
        trace = ModuleTrace(len(indices), self._shapes)
        with modules_traced(self._subject.module, trace):
            self._subject.call(self._subject.collate(indices))
        return trace

    def _compare(self, trace: ModuleTrace, indices: Sequence[int]) -> list[tuple[str, int]]:
        """Return the modules that break in this batch, each with the place of a sample."""
        differing: dict[tuple[str, str, int], set[int]] = defaultdict(set)
        order: list[ModuleValue] = []
        for place, rows in trace.rows.items():
            known = [self._alone[sample].rows.get(place) for sample in indices]
            if rows is None or not all(known):
                if place.kind == "output":
                    self._modules[place.name].unknown = True
                # As a place of unknown inputs it excuses the module that it feeds.
                differing[place[:3]].update(range(trace.size) if place.kind == "input" else ())
                continue
            order.append(place)
            for position, one in enumerate(known):
                if one is not None and not trace.agrees(place, position, one[0]):
                    differing[place[:3]].add(position)
        causes: dict[str, int] = {}
        for place in order:
            wrong = differing[place[:3]]
            if place.kind != "output" or not wrong:
                continue
            findings = self._modules[place.name]
            findings.sizes.add(trace.size)
            breaking_modules = wrong - differing["input", place.name, place.call]
            if breaking_modules and not _inner(place.name, causes):
                causes.setdefault(place.name, min(breaking_modules))
                findings.breaks.add(trace.size)
        return list(causes.items())

    def _find_op(self, name: str, indices: Sequence[int], position: int) -> str | None:
        """Return the first op within a module whose result for the sample has other bits."""
        module = self._subject.module.get_submodule(name)
        shapes: dict[ModuleValue, torch.Size] = {}
        traces = []
        for chosen in ([indices[position]], indices):
            trace = ModuleTrace(len(chosen), shapes)
            with ops_traced(module, trace):
                self._subject.call(self._subject.collate(chosen))
            traces.append(trace)
        alone, together = traces
        for place in together.rows:
            expected = alone.rows.get(place)
            if expected and together.agrees(place, position, expected[0]) is False:
                return place.name
        return None


def _feeds(place: ModuleValue, output: ModuleValue) -> bool:
    return place.kind == "input" and (place.name, place.call) == (output.name, output.call)


def _inner(name: str, causes: Iterable[str]) -> bool:
    """Say whether one of the causes is a module within this one."""
    return any(cause != name and (not name or cause.startswith(name + ".")) for cause in causes)
