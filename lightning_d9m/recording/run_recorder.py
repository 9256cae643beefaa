"""The recorder of a training: writes its ledger, takes its probes, and compares its state.

Ranks communicate through ``Ranks``, so tests need no processes.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypedDict
from weakref import WeakSet

import torch

from lightning_d9m.control.env_settings import variable_of
from lightning_d9m.control.environment import control_is_on
from lightning_d9m.control.settings import Settings, read_path, validate_choice
from lightning_d9m.errors import D9mError, DriftError, LedgerError, SettingError
from lightning_d9m.hashing.digest import digest
from lightning_d9m.hashing.shards import (
    ShardParts,
    combine_shards,
    find_flat_layouts,
    read_shards,
    reshard,
)
from lightning_d9m.hashing.training_state import (
    PartialSnapshot,
    Snapshot,
    describe_model,
    take_partial_snapshot,
)
from lightning_d9m.ledger.folder import rank_path, read_ledger
from lightning_d9m.ledger.format.records import (
    Digests,
    End,
    Header,
    Json,
    LoaderFacts,
    Record,
    RunFacts,
    Scalar,
)
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.ledger.program import capture_program
from lightning_d9m.ledger.stack import (
    SHARDED_PARAMETERS,
    are_portable,
    capture_stack,
    check_stack,
)
from lightning_d9m.probes.batch_probes import BatchProbes, Training
from lightning_d9m.probes.settings import ProbeSettings
from lightning_d9m.probes.trace import StatePoint
from lightning_d9m.ranks.ranks import Ranks
from lightning_d9m.recording.rank_agreement import (
    RankAgreement,
    ReplicatedState,
    describe_division,
    find_replicated_state,
)
from lightning_d9m.recording.reference import Reference
from lightning_d9m.state.plain_data import decode_plain, encode_plain
from lightning_d9m.version import __version__

NO_SCALARS: Mapping[str, str] = MappingProxyType({})


class OptionArguments(TypedDict, total=False):
    """The fields of ``RunOptions`` as the arguments of a recorder or a callback give them."""

    reference: str | Path | None
    on_drift: Literal["raise", "warn"]
    on_stack_difference: Literal["raise", "warn", "ignore"]
    probes: str | Sequence[str]
    probe_modules: str | Sequence[str]
    probe_steps: str | None
    probe_ranks: int | Sequence[int] | None


@dataclass(frozen=True, kw_only=True)
class RunOptions(ProbeSettings):
    """The options of a recorded run: its reference, the effect of differences, and its probes.

    Attributes:
        reference: Ledger of an earlier run to compare this run with; None for none.
        on_drift: ``"raise"`` stops the training with a ``DriftError``; ``"warn"`` warns.
        on_stack_difference: What to do if the stack differs from the reference's: ``"raise"``,
            ``"warn"`` or ``"ignore"``.

    Raises:
        SettingError: If a value is not allowed.
    """

    reference: Path | None = None
    on_drift: Literal["raise", "warn"] = "raise"
    on_stack_difference: Literal["raise", "warn", "ignore"] = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reference", read_path("reference", self.reference))
        validate_choice("on_drift", self.on_drift, ("raise", "warn"))
        allowed = ("raise", "warn", "ignore")
        validate_choice("on_stack_difference", self.on_stack_difference, allowed)

    def check_reference(self) -> None:
        """Raise a ``LedgerError`` if the reference cannot be read."""
        if self.reference is not None:
            read_ledger(self.reference)

    def refuse_replays(self) -> None:
        """Raise a ``SettingError`` if steps should run twice, which only the callback can do."""
        if self.replay_every:
            raise SettingError(
                f"{variable_of('replay_every')} is {self.replay_every}, and a Recorder cannot run "
                "a step of your own loop twice. Unset it, or train with a Trainer of Lightning and "
                "DeterminismCallback(replay_every=...)."
            )


class RunRecorder:
    """Writes the ledger of a training, takes its probes, and compares its state as it is written.

    The callback of a Trainer, the recorder of a loop and the hooks around optimizer steps share
    it. An error on one rank is raised on all ranks, so that none waits for another.

    Attributes:
        options: The options.
        ranks: The ranks of the training.
        probes: The probes of the open ledger.
        loss: The last loss, on its device; None without one.
        digest: The digest of the weights that were digested last; None before the first.
        folder: The folder of the ledger that was opened last; None before.
        open_recorders: Those of this process with an open ledger.
    """

    open_recorders: ClassVar["WeakSet[RunRecorder]"] = WeakSet()

    def __init__(self, options: RunOptions) -> None:
        self.options = self._present_options = options
        self.digest: str | None = None
        self.folder: Path | None = None
        self._forget()

    def _forget(self) -> None:
        """Forget all that belongs to one ledger."""
        self._header: Header | None = None
        self._writer: LedgerWriter | None = None
        self._problem: LedgerError | None = None
        self._reference: Reference | None = None
        self._agreement: RankAgreement | None = None
        self._training = Training(torch.nn.Module())
        self.ranks = Ranks(0)
        self.loss: torch.Tensor | None = None
        self._start_probes(RunOptions())

    def _start_probes(self, options: RunOptions) -> None:
        self.probes = BatchProbes(options, self._training, self.ranks.rank, self.append)

    def __getstate__(self) -> dict[str, Any]:
        copied = RunRecorder(self.options)
        return vars(copied) | {"digest": self.digest, "folder": self.folder, "probes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    @property
    def is_open(self) -> bool:
        """True while a ledger is open."""
        return self._header is not None

    @property
    def compares(self) -> bool:
        """True if the recorder compares the training with a reference or across ranks."""
        return self._reference is not None or self._agreement is not None

    @property
    def ledger_position(self) -> dict[str, str] | None:
        """The ledger's folder, and the check of this rank's last record; None without one."""
        if self._writer is None or self.folder is None:
            return None
        return {"folder": str(self.folder.absolute()), "check": self._writer.chain_hash}

    @property
    def loss_text(self) -> str | None:
        """``float.hex()`` of the last loss; None without one."""
        return None if self.loss is None else float(self.loss).hex()

    def load_loss(self, text: str | None) -> None:
        """Restore a loss from what ``loss_text`` was."""
        number = None if text is None else float.fromhex(text)
        self.loss = None if number is None else torch.tensor(number, dtype=torch.float64)

    def begin(
        self,
        ranks: Ranks,
        training: Training,
        describe: Callable[[], tuple[Header, RunFacts, ReplicatedState | None]],
        make_folder: Callable[[], Path],
        *,
        resumed: Mapping[str, Json] | None = None,
        options: RunOptions | None = None,
    ) -> None:
        """Open a ledger, write its header and the facts, and accept or refuse the reference.

        ``describe`` returns the header, the facts, and what must be equal on all ranks;
        ``make_folder`` makes the ledger's folder, the same on all ranks. ``resumed`` is the record
        that names the continued ledger. Options take the place of the recorder's.

        Raises:
            LedgerError: If the ledger cannot be written, or the reference not be read.
            ReferenceRefusedError: If the reference comes from another experiment.
            StackDifferenceError: If the reference's stack differs, unless the options allow it.
        """
        self.ranks = ranks
        header, facts, replicated = ranks.raise_on_all(describe)
        self.folder = make_folder()
        self._header, self._present_options = header, options or self.options
        if not ranks.is_alone and replicated is not None:
            self._agreement = RankAgreement(ranks.gather_json, replicated)
        self._training = training
        self.open_recorders.add(self)
        ranks.raise_on_all(lambda: self._begin(header, facts, resumed))
        self._start_probes(self._present_options)

    def _begin(self, header: Header, facts: RunFacts, resumed: Mapping[str, Json] | None) -> None:
        assert self.folder is not None, "begin() has made it"
        options = self._present_options
        self._writer = LedgerWriter(rank_path(self.folder, header.rank))
        self._writer.write(header)
        if resumed is not None:
            self._writer.write(_name_parent(resumed, self.folder))
        self._writer.write(facts)
        if options.reference is None:
            return
        reference = self._reference = Reference(options.reference, header.rank, writing=self.folder)
        # The stack first: a different driver must not look like nondeterminism.
        portable = are_portable(reference.header.settings, header.settings)
        allowed = "ignore" if portable else options.on_stack_difference
        warning = check_stack(reference.header.stack, header.stack, allowed)
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
        reference.check_header(header)
        reference.check_run(facts)
        if resumed is not None:
            reference.skip_to(resumed["epoch"])

    def take(
        self,
        moment: str,
        *,
        epoch: int,
        step: int,
        scalars: Mapping[str, str] = NO_SCALARS,
        verify: Callable[[], None] | None = None,
    ) -> Digests:
        """Digest the state at a moment; every rank must call this.

        The moment is ``"initial"``, ``"epoch"`` or ``"final"``. Scalars are ``float.hex()``
        of numbers; ``verify`` raises a ``SettingError`` if a switch was changed.
        """
        self.probes.save_state(StatePoint(epoch, step, moment))
        (self.probes if moment == "final" else self.probes.collector).close()
        partial = self.ranks.raise_on_all(lambda: self._read(verify, sketches=moment == "epoch"))
        snapshot = complete_snapshot(partial, self.ranks)
        self.digest = snapshot.totals["weights"]
        return Digests(
            moment=moment,
            epoch=epoch,
            step=step,
            totals=snapshot.totals,
            groups=snapshot.groups,
            loss=self.loss_text,
            scalars=scalars,
            sketches=snapshot.sketches,
        )

    def _read(self, verify: Callable[[], None] | None, *, sketches: bool) -> PartialSnapshot:
        training = self._training
        if verify is not None:
            verify()
        wrapped = training.model if training.wrapped is None else training.wrapped
        reshard(wrapped)
        layouts = find_flat_layouts(wrapped)
        return take_partial_snapshot(
            training.model,
            training.list_optimizers(),
            training.list_schedulers(),
            layouts,
            sketches=sketches,
            # Portable runs of two versions of torch are comparable.
            switches=self._header is None or not self._header.settings.get("portable"),
        )

    def record(self, digests: Digests) -> int:
        """Write what ``take`` returned, and compare it.

        Returns:
            The number of entries that differ from the reference or across ranks.

        Raises:
            DriftError: If entries differ and ``on_drift`` is ``"raise"``.
            LedgerError: If the ledger cannot be written.
        """
        assert self._header is not None, "begin() comes first"
        found: list[DriftError] = []
        self.ranks.raise_on_all(lambda: found.extend(self._record(digests)))
        found += self._across_ranks(digests, found)
        if not found:
            return 0
        if self._present_options.on_drift == "raise":
            raise found[0]
        for error in found:
            if self._header.rank in (0, error.rank):
                warnings.warn(str(error), stacklevel=2)
        return max(error.count for error in found)

    def keep_step(self, step: int) -> None:
        """Keep this rank's digests of a step until the next record, if ranks are compared.

        An error is left to the next record, which all ranks see.
        """
        agreement, header = self._agreement, self._header
        if agreement is None or header is None or SHARDED_PARAMETERS in header.stack:
            return
        if agreement.wants_step(step):
            with suppress(D9mError):
                agreement.keep_step(step, self._read(None, sketches=False).groups)

    def append(self, record: Record | Mapping[str, Json]) -> None:
        """Write a record that is not compared during training, if a ledger is open.

        An error is raised by the next call of ``record``, on all ranks.
        """
        if self._writer is None or self._problem is not None:
            return
        try:
            self._writer.write(record)
        except LedgerError as error:
            self._problem = error

    def end(self, end: End) -> None:
        """Write the last record, close the ledger, and warn of records that were not compared.

        If the training failed, errors of this do not hide that error.
        """
        failed = end.status == "failed"
        try:
            with suppress(Exception) if failed else nullcontext():
                self.probes.close()
        finally:
            writer, reference = self._writer, self._reference
            self.open_recorders.discard(self)
            self._forget()
            if writer is not None:
                # If the ledger could not be written, its error was raised and failed the run.
                with suppress(LedgerError) if failed else nullcontext(), writer:
                    writer.write(end)
        if reference is None:
            return
        if end.status != "finished":
            reference.close()
            return
        unchecked = reference.finish()
        if unchecked is not None:
            warnings.warn(unchecked, stacklevel=2)

    def _record(self, digests: Digests) -> list[DriftError]:
        assert self._writer is not None, "begin() comes first"
        if self._problem is not None:
            raise self._problem
        self._writer.write(digests)
        difference = None if self._reference is None else self._reference.check(digests)
        if difference is None or self._reference is None:
            return []
        return [self._reference.drift_error(difference)]

    def _across_ranks(self, digests: Digests, found: list[DriftError]) -> list[DriftError]:
        """Return the errors that all ranks raise, the same on every rank."""
        if self.ranks.is_alone:
            return []
        agreement = self._agreement
        summary = [] if agreement is None else agreement.summarize(digests.groups)
        rows = self.ranks.gather_json([found[0].count if found else 0, *summary])
        counts = [row[0] for row in rows]
        drifted = [rank for rank, count in enumerate(counts) if count]
        errors: list[DriftError] = []
        if drifted and not found:
            errors.append(self._other_rank_error(digests, drifted[0], counts[drifted[0]]))
        if agreement is not None:
            errors += agreement.compare([row[1:] for row in rows], digests).values()
        return errors

    def _other_rank_error(self, digests: Digests, rank: int, count: int) -> DriftError:
        folder = self.folder
        assert folder is not None, "begin() comes first"
        return DriftError(
            f"Rank {rank} differs from its reference (epoch {digests.epoch}, step {digests.step}); "
            f"this rank {self.ranks.rank} does not. What differs is in the message of rank {rank} "
            f"and in its ledger, {rank_path(folder, rank)}.",
            moment=digests.moment,
            epoch=digests.epoch,
            step=digests.step,
            rank=rank,
            count=count,
        )


def _name_parent(resumed: Mapping[str, Json], folder: Path) -> Mapping[str, Json]:
    """Name the parent relative to the folder, so that both can be moved together."""
    parent = resumed.get("parent")
    with suppress(ValueError):  # on Windows, another drive
        if parent:
            return {**resumed, "parent": os.path.relpath(parent, folder)}
    return resumed


def describe_training(
    ranks: Ranks,
    settings: Settings,
    layout: Mapping[str, Any],
    training: Training,
    *,
    fit: int,
    further: Mapping[str, Scalar] = MappingProxyType({}),
    loaders: Iterable[object] = (),
    trainer: Mapping[str, Scalar] = MappingProxyType({}),
) -> tuple[Header, RunFacts, ReplicatedState | None]:
    """Return the header of this rank's ledger, the facts, and what must be equal on all ranks.

    ``layout`` is what the stack says of processes and devices, ``"world.size"`` their number;
    ``trainer`` has settings that two comparable trainings must share.
    """
    model = training.model
    layouts = find_flat_layouts(model if training.wrapped is None else training.wrapped)
    control = {} if control_is_on() else {"control": "off"}
    header = Header(
        rank=ranks.rank,
        world_size=layout["world.size"],
        fit=fit,
        seed=settings.seed,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        settings={**settings.as_record(), **control, **further},
        stack=capture_stack({**layout, **describe_division(model, layouts)}),
        package=__version__,
        program=capture_program() if ranks.rank == 0 else {},
    )
    described, parameters = describe_model(model, layouts)
    train = tuple(describe_loader(loader) for loader in loaders)
    facts = RunFacts(model=described, parameters=parameters, train=train, trainer=trainer)
    if layout["world.size"] == 1:
        return header, facts, None
    optimizers, schedulers = training.list_optimizers(), training.list_schedulers()
    return header, facts, find_replicated_state(model, optimizers, schedulers, layouts=layouts)


def describe_loader(loader: object) -> LoaderFacts:
    """Return how many samples and batches a loader has, and its batch size, where it can tell."""
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:  # a custom batch sampler, or no automatic batching
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return LoaderFacts(
        samples=_length(getattr(loader, "dataset", None)),
        batch_size=batch_size if isinstance(batch_size, int) else None,
        batches=_length(loader),
    )


def _length(sized: object) -> int | None:
    """Return a length, or None if there is none, as for an iterable dataset."""
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def share_new_folder(ranks: Ranks, create: Callable[[], Path] | None, advice: str = "") -> Path:
    """Create a folder on rank 0, and return its path on all ranks.

    ``create`` is None on a rank that does not create it. The advice, for the error's message,
    says what to do if it cannot be created.

    Raises:
        LedgerError: On all ranks, if the folder cannot be created.
    """
    folder, problem = "", ""
    if create is not None:
        try:
            folder = str(create())
        except LedgerError as error:
            problem = f"{error} {advice}".rstrip()
    folder, problem = ranks.gather_json([folder, problem])[0]
    if problem:
        raise LedgerError(problem)
    # Nodes need not share a file system: each keeps the ledgers of its own ranks. If this fails,
    # creating the file in it fails too, with a message that says why.
    with suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


# Tensors whose parts are gathered at a time. Every rank holds those of all ranks: up to 256 KiB of
# bytes for each tensor and rank, and the digests of chunks.
_ROUND = 32


def complete_snapshot(partial: PartialSnapshot, ranks: Ranks) -> Snapshot:
    """Return the snapshot with the digests of whole tensors; every rank calls this.

    Of a tensor that is divided along its first dimension, ranks gather the digests of chunks and
    the bytes of chunks that two of them share. A tensor that is divided otherwise is gathered on
    each rank, one after the other.

    Raises:
        DigestError: If a tensor has no digest, or its parts do not cover it.
    """
    if not (partial.shards or partial.owners or partial.scattered):
        return partial.finish()
    read = ranks.raise_on_all(lambda: read_shards(partial.shards.values()))
    own = dict(zip(partial.shards, map(tuple, read), strict=True))
    # By group and name: the ranks that hold the tensor once, its header and its size; of a value
    # that belongs to a tensor, its digest and None.
    held: dict[tuple[str, str], tuple[Any, ...]] = {
        place: (shard.ranks, shard.header, shard.size) for place, shard in partial.shards.items()
    }
    for (group, name), shard in partial.owners.items():
        held[group, name] = (shard.ranks, partial.groups[group][name], None)
    tables = _gather_plain(ranks, held)
    wanted = dict(held)
    for place, entry in (item for table in tables for item in table.items()):
        if ranks.rank in entry[0]:
            wanted.setdefault(place, entry)
    digests = {place: known for place, (_, known, size) in wanted.items() if size is None}
    divided = dict.fromkeys(
        p for table in tables for p, entry in table.items() if entry[2] is not None
    )
    for start in range(0, len(divided), _ROUND):
        places = [*divided][start : start + _ROUND]
        rows = _gather_plain(ranks, {place: own[place] for place in places if place in own})
        digests |= ranks.raise_on_all(lambda: _combine_parts(rows, places, wanted))  # noqa: B023 - called here
    for place, tensor in partial.scattered.items():
        with torch.no_grad():
            digests[place] = digest(tensor.full_tensor())  # type: ignore[attr-defined]
    return partial.finish(digests)


def _gather_plain(ranks: Ranks, value: object) -> list[Any]:
    return [decode_plain(row) for row in ranks.gather_bytes(encode_plain(value))]


def _combine_parts(
    rows: Sequence[Mapping[tuple[str, str], tuple[Any, ...]]],
    places: Iterable[tuple[str, str]],
    wanted: Mapping[tuple[str, str], tuple[Any, ...]],
) -> dict[tuple[str, str], str]:
    """Return the digests at places from the parts that each rank has sent."""
    found = {}
    for place in filter(wanted.__contains__, places):
        holders, header, size = wanted[place]
        parts = [ShardParts(*rows[rank][place]) for rank in holders if place in rows[rank]]
        found[place] = combine_shards(header, size, parts)
    return found
