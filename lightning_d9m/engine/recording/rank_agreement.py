"""The agreement of ranks: their state is compared, and the rank that differs is named."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from msgspec.structs import replace
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_d9m.engine.hashing.shards import FlatLayout, count_stages, has_base
from lightning_d9m.engine.hashing.training_state import (
    Groups,
    plain_name,
    replicated_names,
)
from lightning_d9m.engine.ledger.differences import find_difference
from lightning_d9m.engine.ledger.format.records import Digests, Json
from lightning_d9m.errors import DriftError
from lightning_d9m.text import describe_names, describe_pair, escape

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
    # Buffers of batch norms follow each rank's own batches until DDP copies those of rank 0, unless
    # SyncBatchNorm computes them from all. DDP copies no buffer that the user has taken out.
    synchronized: set[str] = set()
    local: set[str] = {plain_name(name) for name, _ in model.named_buffers() if name in ignored}
    for path, module in model.named_modules():
        if not isinstance(module, _NormBase):
            continue
        names = (f"{path}.{name}" if path else name for name, _ in module.named_buffers())
        buffers = synchronized if isinstance(module, SyncBatchNorm) else local
        buffers.update(map(plain_name, names))
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

_MOST = 32  # steps that are kept
# Buffers that a training step may set from each rank's own data.
_FREE_BUFFERS = "free buffers"
_COMPARED = ("weights", "buffers", _FREE_BUFFERS, "optimizers", "schedulers")
_PAIR = 2


class RankAgreement:
    """Compares a training state across ranks, record by record.

    Ranks gather a hash of each group, and a group's entries only when these differ.

    Attributes:
        kept: The hashes by step.
    """

    def __init__(self, gather: GatherJson, replicated: ReplicatedState) -> None:
        self._gather = gather
        self._replicated = replicated
        self._tables: dict[str, dict[str, str]] = {}
        # What all ranks have held since the first record, by name of a buffer.
        self._agreed: dict[str, str] | None = None
        self._every = 1
        self.kept: dict[int, str] = {}

    # To tell when ranks that differ began to, each keeps a hash of the state after every n-th step
    # since the last record; n doubles as soon as there are too many. Ranks keep the same steps, as
    # these depend on nothing else, so they need not communicate about them.
    def wants(self, step: int) -> bool:
        """Return whether the state after a step should be kept."""
        return step % self._every == 0 and step not in self.kept

    def keep_step(self, step: int, groups: Mapping[str, Mapping[str, str]]) -> None:
        """Keep the hash of the state after a step."""
        self.kept[step] = _hash(self._replicated.select(groups).items())
        while len(self.kept) > _MOST:
            self._every *= 2
            self.kept = {at: text for at, text in self.kept.items() if at % self._every == 0}

    def summarize(self, groups: Mapping[str, Mapping[str, str]]) -> list[str]:
        """Return the hash of each group, which ``compare`` needs of every rank."""
        selected = self._replicated.select(groups)
        selected[_FREE_BUFFERS] = self._replicated.select_buffers(groups)
        self._tables = {group: selected.get(group, {}) for group in _COMPARED}
        return [_hash(table.items()) for table in self._tables.values()]

    def compare(self, rows: Sequence[Sequence[str]], digests: Digests) -> DriftError | None:
        """Return the error that tells what differs, the same on every rank; None if all agree.

        ``rows`` has what ``summarize`` returned on each rank of the groups of ``digests``.
        """
        found: list[Groups] = [{} for _ in rows]
        for (group, table), hashes in zip(
            self._tables.items(), zip(*rows, strict=True), strict=True
        ):
            tables = [table] if len(set(hashes)) == 1 else self._gather(table)
            if group == _FREE_BUFFERS:
                tables = self._select_shared(tables)
            if any(other != tables[0] for other in tables):
                name = "buffers" if group == _FREE_BUFFERS else group
                for groups, entries in zip(found, tables, strict=True):
                    groups.setdefault(name, {}).update(entries)
        if any(found):
            kept = [dict(row) for row in self._gather([*self.kept.items()])]
            return compare_ranks(found, digests, find_first_step(kept))
        self.kept.clear()
        return None

    def _select_shared(self, tables: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the entries of buffers that must be equal."""
        # Nothing says whether a buffer is computed from a rank's own data. One that is changes in
        # the first epoch on every rank, and later on some: a maximum that only one rank's last
        # batch exceeds. One that all ranks have held unchanged so far, and that only some ranks
        # have changed now, differs by mistake.
        if any(table.keys() != tables[0].keys() for table in tables):
            self._agreed = {}
            return [{} for _ in tables]
        held = {name: {table[name] for table in tables} for name in tables[0]}
        if self._agreed is None:
            self._agreed = {name: min(found) for name, found in held.items() if len(found) == 1}
        else:
            self._agreed = {n: own for n, own in self._agreed.items() if own in held.get(n, ())}
        return [{name: table[name] for name in self._agreed} for table in tables]


def find_first_step(kept: Sequence[Mapping[int, str]]) -> tuple[int | None, int] | None:
    """Return the last step after which the ranks were equal, and the first after which not.

    ``kept`` has what each rank kept. Steps that only some ranks have are not compared.
    """
    before = None
    for step in sorted(set.intersection(*map(set, kept))):
        if len({hashes[step] for hashes in kept}) > 1:
            return before, step
        before = step
    return None


def compare_ranks(
    groups: Sequence[Groups], digests: Digests, steps: tuple[int | None, int] | None = None
) -> DriftError:
    """Compare the groups of each rank, of which some differ, in a record.

    The other ranks are compared with rank 0. If they differ from it and agree with each other, rank
    0 is the one that differs. Two ranks differ from each other; ``rank`` is then 1. ``steps`` is
    what ``find_first_step`` returned.

    Returns:
        The error that names the rank that differs, and what differs on it, the same on all ranks.
    """
    # The majority decides only where all others agree: of ranks that all differ, none is right.
    differing = [rank for rank, held in enumerate(groups) if held != groups[0]]
    base = 0
    if 1 < len(groups) - 1 == len(differing) and all(held == groups[1] for held in groups[2:]):
        base, differing = 1, [0]
    rank = differing[0]
    one, other = (
        replace(digests, groups=groups[number], totals={}, scalars={}) for number in (base, rank)
    )
    difference = find_difference(one, other)
    assert difference is not None, "some entry differs"
    count, total = difference.by_kind[difference.kind]
    entries = {"optimizers": "optimizer entries"}.get(difference.kind, escape(difference.kind))
    who, reference = f"Rank {rank} differs from rank {base}", " (reference)"
    if len(groups) == _PAIR:  # nothing tells which of two is wrong
        who, reference = "Ranks 0 and 1 differ from each other", ""
    elif len(differing) > 1:
        listed = ", ".join(map(str, differing[:8])) + (", ..." if differing[8:] else "")
        who = f"Ranks {listed} differ from rank {base}"
    label = f"rank {base}{reference}:"
    expected, actual = describe_pair(difference.expected, difference.actual)
    named = describe_names(difference.names, count)
    lines = [
        f"{who} in {difference.where}: {count} of {total} {entries} differ, first {named}.",
        f"  {label} {expected}",
        f"  {f'rank {rank}:':<{len(label)}} {actual}",
        *difference.describe_kinds(),
    ]
    if steps is not None:
        equal = "" if steps[0] is None else f" They were still equal after step {steps[0]}."
        lines.append(f"The ranks differed after step {steps[1]}.{equal}")
    lines.append(
        "All ranks must hold the same bits after each step. Look for what only one rank does: a "
        "change to its weights, a learning rate that follows its own metric (log the metric with "
        "sync_dist=True), a module that is not synchronized, a failing device."
    )
    return DriftError("\n".join(lines), **difference.facts, rank=rank, expected_rank=base)


def _hash(parts: Iterable[object]) -> str:
    return blake2b(repr([*parts]).encode(), digest_size=16).hexdigest()
