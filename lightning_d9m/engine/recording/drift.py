"""Drift: the differences of a run from its reference, and of a rank from the other ranks."""

import gc
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace
from torch import distributed, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_d9m.engine.hashing.shards import FlatLayout, has_base, may_be_sharded
from lightning_d9m.engine.hashing.training_state import (
    Groups,
    count_sharded,
    plain_name,
    replicated_names,
)
from lightning_d9m.engine.ledger.differences import (
    Divergence,
    FieldDifference,
    describe_varying,
    header_differences,
    list_varying_ops,
    record_difference,
    run_refusals,
)
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.reader import RankReader
from lightning_d9m.engine.ledger.format.records import Digests, Header, Json, RunFacts, Scalar
from lightning_d9m.engine.ledger.keys import LEDGER_START, describe_record, record_key, record_place
from lightning_d9m.engine.ledger.kinds import EXCEPTION
from lightning_d9m.engine.ledger.stack import (
    PIPELINE_STAGES,
    SHARDED_PARAMETERS,
    same_logical_ranks,
)
from lightning_d9m.errors import DriftError, LedgerError, ReferenceRefusedError
from lightning_d9m.text import describe_names, describe_pair, escape, pluralize


def describe_groups(difference: Divergence) -> list[str]:
    """Return a line with the number of entries that differ in each group, if it is not one."""
    parts = [f"{escape(group)} {n} of {of}" for group, (n, of) in difference.by_kind.items()]
    return [f"In all: {', '.join(parts)}."] if parts[1:] else []


def list_facts(difference: Divergence) -> dict[str, Any]:
    """Return the facts of a difference that a ``DriftError`` has."""
    return {
        "moment": difference.moment,
        "epoch": difference.epoch,
        "step": difference.step,
        "group": difference.kind,
        "names": difference.names,
        "count": difference.count,
        "total": difference.compared,
        "expected": difference.expected,
        "actual": difference.actual,
    }


class Reference:
    """One rank's part of a reference ledger, read in step with the run.

    Call ``accept`` once, then ``check`` for each record of digests in the order in which the run
    takes them, and ``finish`` at the end.

    The reference may end before the run or after it: records that only one of them has are not
    compared, and ``finish`` reports them. Records that only the reference has in between are
    skipped. A record that only the run has in between is an error.

    ``writing`` is the folder that this run writes, which is not its own reference.

    Attributes:
        header: The reference's header.
        checked: Number of records that were compared.
        beyond: Number of this run's records without a counterpart in the reference.

    Raises:
        LedgerError: If ``path`` has no ledger, or the ledger cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int, *, writing: Path | None = None
    ) -> None:
        self.rank = rank
        self.checked = 0
        self.beyond = 0
        self._ledger = read_ledger(path, ignoring=writing)
        self.header = self._ledger.headers.get(rank, self._ledger.header)
        self._reader: RankReader | None = None
        self._records: Iterator[Digests] = iter(())
        self._next: Digests | None = None
        self._first_beyond: Digests | None = None
        self._varying_ops: tuple[str, ...] = ()
        self._agreed: str | None = None
        self._passed = 0

    def accept(self, header: Header, facts: RunFacts, resumed: int | None = None) -> None:
        """Open the records, unless the reference comes from another experiment.

        ``resumed`` is the epoch in which this run was resumed, whose earlier records are skipped.

        Raises:
            ReferenceRefusedError: With the first field that differs.
            LedgerError: When the reference has no file of this rank, or no facts of its run.
        """
        self._refuse(header_differences(self.header, header)[0])
        self._varying_ops = list_varying_ops(self.header, header)
        # With logical ranks, a reference of fewer processes has no file of this rank.
        rank = self.rank if self.rank in self._ledger.files else self.header.rank
        alike = same_logical_ranks(self.header.stack, header.stack)
        self._reader = reader = self._ledger.open(rank if alike else self.rank)
        records = reader.line_records()
        first = next(records, None)
        if not isinstance(first, RunFacts):
            raise LedgerError(
                f"The reference {reader.path} ends before its training began, so there is "
                "nothing to compare this run with. Name the ledger of a run that trained."
            )
        self._refuse(run_refusals(first, facts))
        self._records = (record for record in records if isinstance(record, Digests))
        self._next = next(self._records, None)
        if resumed is not None:
            while (own := self._next) and (own.moment == "initial" or own.epoch < resumed):
                self._next = next(self._records, None)

    def check(self, actual: Digests) -> Divergence | None:
        """Compare one record of this run with its counterpart.

        Returns:
            The difference; None when they agree, or when the reference has ended.

        Raises:
            ReferenceRefusedError: When the reference continues without this record.
            LedgerError: When the reference was edited or is malformed.
        """
        while (expected := self._next) is not None:
            if EXCEPTION in {actual.moment, expected.moment} and actual.moment != expected.moment:
                break  # an exception ended one of the two
            if record_key(expected) == record_key(actual):
                self._next = next(self._records, None)
                self.checked += 1
                difference = record_difference(expected, actual)
                if difference is None:
                    self._agreed = describe_record(actual)
                return difference
            if expected.moment == "final" and expected.epoch < actual.epoch:
                break
            if record_place(expected, LEDGER_START) > record_place(actual, LEDGER_START):
                lacking, following = describe_record(actual), describe_record(expected)
                raise ReferenceRefusedError(
                    f"The reference {self._ledger.path} has no record of {lacking}; the next that "
                    f"it has is {following}.\n  reference: {following}\n  this run:  {lacking}\n"
                    "It was recorded at other moments than this run; record a new reference with "
                    "the settings of this run.",
                    field="records",
                    expected=following,
                    actual=lacking,
                )
            self._passed += 1
            self._next = next(self._records, None)
        self.beyond += 1
        self._first_beyond = self._first_beyond or actual
        return None

    def drift_error(self, difference: Divergence) -> DriftError:
        """Build the error that names the record and entries that differ from the reference."""
        count = difference.by_kind.get(difference.kind, (difference.count, 0))[0]
        whole = difference.names == ("(total)",)
        named = "the digest of the group" if whole else describe_names(difference.names, count)
        headline = (
            f"This run differs from its reference in {difference.where} on rank {self.rank}: "
            f"{difference.count} of {difference.compared} entries differ, first in "
            f"{escape(difference.kind)}: {named}."
        )
        expected, actual = describe_pair(difference.expected, difference.actual)
        lines = [headline, f"  reference: {expected}", f"  this run:  {actual}"]
        lines += describe_groups(difference)
        if difference.moment == "initial":
            lines.append(
                "They differed before the first step, so no training caused it. Seed before the "
                "model is built: call lightning_d9m.enable(seed=...) or seed_everything(...) at "
                "the top of the program; or the weights were loaded from another checkpoint."
            )
        elif set(difference.by_kind) == {"scalars"}:
            lines.append(
                "Nothing but logged scalars differs. A scalar that differs by nature, such as a "
                'measured time, can be left out: DeterminismCallback(ignored_metrics=["..."]).'
            )
        elif self._agreed is None:
            lines.append("No earlier record was compared, so the cause may lie anywhere before.")
        else:
            lines.append(f"They last agreed in {self._agreed}, so the cause lies after it.")
        lines.append(f"Reference: {self._reader.path if self._reader else self._ledger.path}")
        return DriftError("\n".join(lines), **list_facts(difference), rank=self.rank)

    def finish(self) -> str | None:
        """Return sentences about records that were not compared, and ops that may vary, if any."""
        left = self._passed
        while self._next is not None:
            left += 1
            self._next = next(self._records, None)
        self.close()
        parts = []
        if self.beyond and self._first_beyond is not None:
            records = pluralize(self.beyond, "record")
            parts.append(
                f"{records} of this run, from {describe_record(self._first_beyond)} on, had no "
                "counterpart there and went unchecked"
            )
        if left:
            parts.append(f"{pluralize(left, 'record')} there had no counterpart in this run")
        if self._reader is not None and not self._reader.complete:
            parts.append("that run was itself ended before it could finish its ledger")
        varying = describe_varying(self._varying_ops)
        if not parts and not varying:
            return None
        checked = f"Compared with {self._ledger.path}: {pluralize(self.checked, 'record')}"
        return f"{'; '.join([checked, *parts])}. {varying}".rstrip()

    def close(self) -> None:
        """Close the reference's file."""
        if self._reader is not None:
            self._reader.close()

    def _refuse(self, refusals: list[FieldDifference]) -> None:
        if not refusals:
            return
        first = refusals[0]
        expected, actual = map(escape, first.shown)
        others = f" Also different: {', '.join(escape(r.field) for r in refusals[1:])}."
        raise ReferenceRefusedError(
            f"The reference {self._ledger.path} comes from another experiment: its "
            f"{escape(first.field)} differs.\n  reference: {expected}\n  this run:  {actual}\n"
            f"{first.reason}{others if refusals[1:] else ''} Run as the reference was run, or name "
            "a reference that was run as this is.",
            field=first.field,
            expected=first.expected,
            actual=first.actual,
        )


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

_MOST = 32  # steps that are kept
# Buffers that a training step may set from each rank's own data.
_FREE_BUFFERS = "free buffers"
_COMPARED = ("weights", "buffers", _FREE_BUFFERS, "optimizers", "schedulers")
_PAIR = 2


class RankAgreement:
    """Compares a training state across ranks, record by record.

    Ranks gather a hash of each group, and a group's entries only when these differ. To tell when
    ranks that differ began to, each keeps a hash of the state after every n-th step since the last
    record; n doubles as soon as there are too many, so that their number grows with the logarithm
    of the number of steps. Ranks keep the same steps, as these depend on nothing else.

    Attributes:
        kept: The hashes by step.
    """

    def __init__(self, gather: GatherJson, replicated: ReplicatedState) -> None:
        self._gather = gather
        self._replicated = replicated
        self._tables: dict[str, dict[str, str]] = {}
        self._agreed: dict[str, str] = {}  # what all ranks held, by name of a buffer
        self._every = 1
        self.kept: dict[int, str] = {}

    def wants(self, step: int) -> bool:
        """Return whether the state after a step should be kept."""
        return step % self._every == 0 and step not in self.kept

    def keep_step(self, step: int, groups: Mapping[str, Mapping[str, str]]) -> None:
        """Keep the hash of the state after a step."""
        self.kept[step] = _hash(self._replicated.select(groups).items())
        while len(self.kept) > _MOST:
            self._every *= 2
            self.kept = {at: own for at, own in self.kept.items() if at % self._every == 0}

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
                for groups, own in zip(found, tables, strict=True):
                    groups.setdefault(name, {}).update(own)
        if any(found):
            kept = [dict(row) for row in self._gather([*self.kept.items()])]
            return compare_ranks(found, digests, find_first_step(kept))
        self.kept.clear()
        return None

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


def find_first_step(kept: Sequence[Mapping[int, str]]) -> tuple[int | None, int] | None:
    """Return the last step after which the ranks were equal, and the first after which not.

    ``kept`` has what each rank kept. Steps that only some ranks have are not compared.
    """
    before = None
    for step in sorted(set.intersection(*map(set, kept))):
        if len({own[step] for own in kept}) > 1:
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
    differing = [rank for rank, own in enumerate(groups) if own != groups[0]]
    base = 0
    if 1 < len(groups) - 1 == len(differing) and all(own == groups[1] for own in groups[2:]):
        base, differing = 1, [0]
    rank = differing[0]
    one, other = (
        replace(digests, groups=groups[number], totals={}, scalars={}) for number in (base, rank)
    )
    difference = record_difference(one, other)
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
        *describe_groups(difference),
    ]
    if steps is not None:
        equal = "" if steps[0] is None else f" They were still equal after step {steps[0]}."
        lines.append(f"The ranks differed after step {steps[1]}.{equal}")
    lines.append(
        "All ranks must hold the same bits after each step. Look for what only one rank does: a "
        "change to its weights, a learning rate that follows its own metric (log the metric with "
        "sync_dist=True), a module that is not synchronized, a failing device."
    )
    return DriftError("\n".join(lines), **list_facts(difference), rank=rank, expected_rank=base)


def _hash(parts: Iterable[object]) -> str:
    return blake2b(repr([*parts]).encode(), digest_size=16).hexdigest()
