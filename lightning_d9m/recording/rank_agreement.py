"""The state that must be equal on all ranks: ranks gather a hash of each group, and compare it."""

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from torch import distributed, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_d9m.comparison.differences import NAMES_KEPT
from lightning_d9m.errors import DriftError
from lightning_d9m.hashing.shards import FlatLayout, has_base, may_be_sharded
from lightning_d9m.hashing.training_state import Groups, count_sharded, plain_name, replicated_names
from lightning_d9m.ledger.format.records import Digests, Json, Scalar
from lightning_d9m.ledger.stack import PIPELINE_STAGES, SHARDED_PARAMETERS
from lightning_d9m.text import describe_moment, describe_names, describe_pair, escape


def count_stages(model: nn.Module) -> int:
    """Return the number of stages of the pipeline that runs modules of a model; 0 without one.

    A stage holds its module, and a module does not know its stage, so that this looks through the
    objects of the process, if the program has imported pipelines and opened a process group, from
    which a stage takes its rank.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None or not distributed.is_initialized():
        return 0
    base = stages._PipelineStageBase  # noqa: SLF001 - of both kinds
    modules = set(map(id, model.modules()))
    found = (stage for stage in gc.get_objects() if base in type(stage).__mro__)
    own = (stage for stage in found if not modules.isdisjoint(map(id, stage.submod.modules())))
    return max((stage.num_stages for stage in own), default=0)


# Each rank holds the state of a part of the parameters.
_SHARDED_OPTIMIZERS = ("ZeroRedundancyOptimizer", "OSS")
# LBFGS keeps the loss of each rank's own batch.
_LOCAL_STATE = frozenset({"prev_loss"})


@dataclass(frozen=True, kw_only=True)
class ReplicatedState:
    """Names of the state that must be equal on all ranks.

    Attributes:
        weights: Parameters whose digest is that of the whole parameter.
        synchronized: Buffers that every rank computes from the data of all ranks.
        local: Buffers that each rank computes from its own data.
        sharded_optimizers: Numbers of optimizers whose per-parameter state is not compared.
        metric_schedulers: Numbers of schedulers that follow a metric, which may be a rank's own.
    """

    weights: Collection[str] = ()
    synchronized: Collection[str] = ()
    local: Collection[str] = ()
    sharded_optimizers: Collection[int] = ()
    metric_schedulers: Collection[int] = ()

    def select(self, groups: Mapping[str, Mapping[str, str]]) -> Groups:
        """Return the digests that must be equal, by group, names sorted."""
        takes = {
            "weights": frozenset(self.weights).__contains__,
            "buffers": frozenset(self.synchronized).__contains__,
            "optimizers": self._is_replicated,
            "schedulers": lambda name: int(name) not in self.metric_schedulers,
        }
        return {
            group: {name: groups[group][name] for name in sorted(filter(take, groups[group]))}
            for group, take in takes.items()
            if group in groups
        }

    def select_buffers(self, groups: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Return the digests of the buffers that may be equal: ``RankAgreement`` decides."""
        excluded = {*self.synchronized, *self.local}
        buffers = groups.get("buffers", {})
        return {name: buffers[name] for name in sorted(buffers.keys() - excluded)}

    def _is_replicated(self, entry: str) -> bool:
        """Return whether an entry ``0.group.1`` or ``0.exp_avg.layer.weight`` must be equal."""
        number, key, name = entry.split(".", 2)
        if key == "group":
            return True
        sharded = int(number) in self.sharded_optimizers
        return not sharded and key not in _LOCAL_STATE and name in self.weights


def describe_division(model: nn.Module, layouts: Mapping[int, FlatLayout]) -> dict[str, Scalar]:
    """Return what the stack says of a model of which ranks hold different parts."""
    if not may_be_sharded():
        return {}
    counts = {
        SHARDED_PARAMETERS: count_sharded(model, layouts),
        PIPELINE_STAGES: count_stages(model),
    }
    return {name: count for name, count in counts.items() if count}


def find_replicated_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    schedulers: Sequence[object] = (),
    *,
    layouts: Mapping[int, FlatLayout] | None = None,
) -> ReplicatedState | None:
    """Return what must be equal on all ranks; None if each trains another stage of a pipeline.

    The model is as the user's optimizers see it; optimizers and schedulers are in the order of
    the snapshot.
    """
    if count_stages(model):
        return None
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    synchronized: set[str] = set()
    local: set[str] = {plain_name(name) for name, _ in model.named_buffers() if name in ignored}
    for path, module in model.named_modules():
        if not isinstance(module, _NormBase):
            continue
        names = (f"{path}.{name}" if path else name for name, _ in module.named_buffers())
        own = synchronized if isinstance(module, SyncBatchNorm) else local
        own.update(map(plain_name, names))
    weights = [name for name in replicated_names(model, layouts) if name not in ignored]
    return ReplicatedState(
        weights=frozenset(weights),
        synchronized=synchronized - local,
        local=local,
        sharded_optimizers=frozenset(
            number
            for number, optimizer in enumerate(optimizers)
            if has_base(optimizer, *_SHARDED_OPTIMIZERS)
        ),
        metric_schedulers=frozenset(
            number
            for number, scheduler in enumerate(schedulers)
            if isinstance(scheduler, ReduceLROnPlateau)
        ),
    )


GatherJson: TypeAlias = Callable[[Json], list[Any]]
"""Gathers JSON values of all ranks, in order of ranks; each rank calls this."""

GROUPS = ("weights", "buffers", "optimizers", "schedulers")
_MOST = 32  # steps that are kept
# Buffers that a training step may set from each rank's own data.
_FREE_BUFFERS = "free buffers"
_COMPARED = (*GROUPS[:2], _FREE_BUFFERS, *GROUPS[2:])
_NAMES = "names of the entries"
_PAIR = 2
# The words for a group's entries in messages.
_ENTRIES = {"optimizers": "optimizer entries"}


class StepDigests:
    """Keeps a hash of each group after every n-th step; n doubles as soon as there are too many.

    So the number of digests grows with the logarithm of the number of steps. Ranks keep the same
    steps, as these depend on nothing else.
    """

    def __init__(self) -> None:
        self._every = 1
        self.kept: dict[int, list[str]] = {}

    def wants(self, step: int) -> bool:
        """Return whether the state after a step should be added."""
        return step % self._every == 0 and step not in self.kept

    def add(self, step: int, groups: Mapping[str, Mapping[str, str]]) -> None:
        """Add the digests of the state that must be equal on all ranks."""
        self.kept[step] = [_hash(groups.get(group, {}).items()) for group in GROUPS]
        while len(self.kept) > _MOST:
            self._every *= 2
            self.kept = {at: row for at, row in self.kept.items() if at % self._every == 0}

    def find_first(self, gather: GatherJson) -> dict[str, tuple[int | None, int]]:
        """Return by group the last step that was equal on all ranks and the first that was not.

        Every rank calls this and gets the same.
        """
        tables = [dict(rows) for rows in gather([*self.kept.items()])]
        found: dict[str, tuple[int | None, int]] = {}
        before: dict[str, int] = {}
        for step in sorted(set.intersection(*map(set, tables))):
            for group, *values in zip(GROUPS, *(table[step] for table in tables), strict=True):
                if len(set(values)) == 1:
                    before[group] = step
                elif group not in found:
                    found[group] = (before.get(group), step)
        return found


def compare_ranks(
    tables: Sequence[Mapping[str, str]],
    digests: Digests,
    group: str = "weights",
    steps: tuple[int | None, int] | None = None,
) -> DriftError | None:
    """Compare the digests by name of each rank in a group of a record.

    The other ranks are compared with rank 0. If they differ from it and agree with each other, rank
    0 is the one that differs. Two ranks differ from each other; ``rank`` is then 1. Ranks that list
    different names are not compared entry by entry. ``steps`` are the last step after which the
    ranks were equal in this, if it is known, and the first after which they were not.

    Returns:
        The error that names the rank that differs, and what differs on it, the same on all ranks;
        None when all agree.
    """
    entries, what = _ENTRIES.get(group, escape(group)), ""
    total = len(tables[0])
    lists = [_hash(table) for table in tables]
    if len(set(lists)) > 1:
        tables, total = [{_NAMES: own} for own in lists], 0
        what = f"they do not list the same {entries}"
    differing = [rank for rank, table in enumerate(tables) if table != tables[0]]
    if not differing:
        return None
    base = 0
    if 1 < len(tables) - 1 == len(differing) and all(own == tables[1] for own in tables[2:]):
        base, differing = 1, [0]
    rank = differing[0]
    names = [name for name in tables[base] if tables[base][name] != tables[rank][name]]
    expected, actual = tables[base][names[0]], tables[rank][names[0]]
    if total:
        named = describe_names(names[:NAMES_KEPT], len(names))
        what = f"{len(names)} of {total} {entries} differ, first {named}"
    who, reference = f"Rank {rank} differs from rank {base}", " (reference)"
    if len(tables) == _PAIR:  # nothing tells which of two is wrong
        who, reference = "Ranks 0 and 1 differ from each other", ""
    elif len(differing) > 1:
        listed = ", ".join(map(str, differing[:8])) + (", ..." if differing[8:] else "")
        who = f"Ranks {listed} differ from rank {base}"
    place = {"moment": digests.moment, "epoch": digests.epoch, "step": digests.step}
    label, sides = f"rank {base}{reference}:", describe_pair(expected, actual)
    when = ""
    if steps is not None:
        equal = "" if steps[0] is None else f" They were still equal after step {steps[0]}."
        when = f"The ranks differed in this after step {steps[1]}.{equal}\n"
    return DriftError(
        f"{who} in {describe_moment(digests.moment, digests.epoch, digests.step)}: {what}.\n"
        f"  {label} {sides[0]}\n  {f'rank {rank}:':<{len(label)}} {sides[1]}\n{when}"
        "All ranks must hold the same bits after each step. Look for what only one rank does: a "
        "change to its weights, a learning rate that follows its own metric (log the metric with "
        "sync_dist=True), a module that is not synchronized, a failing device.",
        **place,
        rank=rank,
        group=group,
        names=names[:NAMES_KEPT],
        count=len(names),
        total=total,
        expected=expected,
        actual=actual,
        expected_rank=base,
    )


class RankAgreement:
    """Compares a training state across ranks, record by record.

    Ranks gather a hash of each group, and a group's entries only when these differ.

    Attributes:
        steps: Digests of steps since the last record, which tell when ranks that differ began to.
    """

    def __init__(self, gather: GatherJson, replicated: ReplicatedState) -> None:
        self._gather = gather
        self._replicated = replicated
        self._tables: dict[str, dict[str, str]] = {}
        self._agreed: dict[str, str] = {}  # what all ranks held, by name of a buffer
        self.steps = StepDigests()

    def keep_step(self, step: int, groups: Mapping[str, Mapping[str, str]]) -> None:
        """Keep the digests of a step."""
        self.steps.add(step, self._replicated.select(groups))

    def summarize(self, groups: Mapping[str, Mapping[str, str]]) -> list[str]:
        """Return the hash of each group, which ``compare`` needs of every rank."""
        selected = self._replicated.select(groups)
        selected[_FREE_BUFFERS] = self._replicated.select_buffers(groups)
        self._tables = {group: selected.get(group, {}) for group in _COMPARED}
        return [_hash(table.items()) for table in self._tables.values()]

    def compare(self, rows: Sequence[Sequence[str]], digests: Digests) -> dict[str, DriftError]:
        """Return the errors by group, the same on every rank.

        ``rows`` has what ``summarize`` returned on each rank of the groups of ``digests``.
        """
        found: dict[str, list[dict[str, str]]] = {}
        for (group, table), hashes in zip(
            self._tables.items(), zip(*rows, strict=True), strict=True
        ):
            tables = [table] if len(set(hashes)) == 1 else self._gather(table)
            if group == _FREE_BUFFERS:
                tables, group = self._select_shared(tables), "buffers"  # noqa: PLW2901 - compared alike
            if any(other != tables[0] for other in tables):
                found.setdefault(group, tables)
        if not found:
            self.steps.kept.clear()
            return {}
        steps = self.steps.find_first(self._gather)
        errors = {
            group: compare_ranks(tables, digests, group, steps.get(group))
            for group, tables in found.items()
        }
        return {group: error for group, error in errors.items() if error is not None}

    def _select_shared(self, tables: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the entries of buffers that must be equal.

        Such a buffer changes on every rank. One that all ranks held alike in the last record, and
        that only some ranks have changed since, differs by mistake.
        """
        before, self._agreed = self._agreed, {}
        if any(table.keys() != tables[0].keys() for table in tables):
            return [{} for _ in tables]
        for name in tables[0]:
            held = {table[name] for table in tables}
            if len(held) == 1:
                self._agreed[name] = held.pop()
            elif before.get(name) in held:
                self._agreed[name] = before[name]
        return [{name: table[name] for name in self._agreed} for table in tables]


def _hash(parts: Iterable[object]) -> str:
    return blake2b(repr([*parts]).encode(), digest_size=16).hexdigest()
