"""One run of a training: its ledger, its probes, and the comparison of its state.

Ranks communicate through ``Ranks``, so tests need no processes.
"""

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from importlib import import_module
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict
from weakref import WeakSet

import torch
from msgspec.structs import replace

from lightning_d9m.engine.control.ddp_buckets import settle_buckets
from lightning_d9m.engine.control.environment import control_is_on
from lightning_d9m.engine.control.seeding import digest_generators
from lightning_d9m.engine.control.settings import (
    read_path,
    read_variable,
    validate_choices,
    variable_of,
)
from lightning_d9m.engine.hashing.digest import digest, digest_value
from lightning_d9m.engine.hashing.shards import (
    ShardParts,
    combine_shards,
    find_flat_layouts,
    read_shards,
    reshard,
)
from lightning_d9m.engine.hashing.training_state import (
    Snapshot,
    plain_name,
    take_partial_snapshot,
)
from lightning_d9m.engine.ledger.command import SEGMENT
from lightning_d9m.engine.ledger.folder import rank_path, read_ledger
from lightning_d9m.engine.ledger.format.records import (
    Checkpoint,
    Digests,
    End,
    Header,
    Record,
    Resume,
    RunFacts,
)
from lightning_d9m.engine.ledger.format.writer import LedgerWriter
from lightning_d9m.engine.ledger.kinds import EXCEPTION, FINAL, FOLLOWED_STEPS
from lightning_d9m.engine.ledger.stack import (
    LOGICAL_RANKS,
    SHARDED_PARAMETERS,
    are_portable,
    check_stack,
)
from lightning_d9m.engine.probes.settings import ProbeSettings
from lightning_d9m.engine.probes.training import Probes, StatePoint, Training, Watched
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.resume_check import GENERATORS, ResumeCheck, digest_step
from lightning_d9m.engine.state.plain_data import decode_plain, encode_plain
from lightning_d9m.errors import D9mError, DriftError, InexactResumeError, LedgerError

if TYPE_CHECKING:  # loaded by runs that compare with a reference, or across ranks
    from typing_extensions import Self

    from lightning_d9m.engine.recording.rank_agreement import RankAgreement, ReplicatedState
    from lightning_d9m.engine.recording.reference import Reference

_log = logging.getLogger("lightning_d9m")


class OptionArguments(TypedDict, total=False):
    """The fields of ``RunOptions`` as the arguments of a recorder or a callback give them."""

    reference: str | Path | None
    on_drift: Literal["raise", "warn"]
    on_stack_difference: Literal["raise", "warn", "ignore"]
    probes: str | Sequence[str]
    probe_modules: str | Sequence[str]
    probe_steps: str | None
    on_inexact_resume: Literal["raise", "warn"]
    provable: bool


@dataclass(frozen=True, kw_only=True)
class RunOptions(ProbeSettings):
    """The options of a recorded run: its reference, the effect of differences, and its probes.

    Attributes:
        reference: Ledger of an earlier run to compare this run with; None for none.
        on_drift: ``"raise"`` stops the training with a ``DriftError``; ``"warn"`` warns.
        on_stack_difference: What to do if the stack differs from the reference's: ``"raise"``,
            ``"warn"`` or ``"ignore"``.
        on_inexact_resume: What to do if a resumed run does not continue the one that saved the
            checkpoint: ``"raise"`` or ``"warn"``.
        provable: Record SHA-256 of the data, the state and the program, which ``d9m prove`` needs.

    Raises:
        SettingError: If a value is not allowed.
    """

    reference: Path | None = None
    on_drift: Literal["raise", "warn"] = "raise"
    on_stack_difference: Literal["raise", "warn", "ignore"] = "raise"
    on_inexact_resume: Literal["raise", "warn"] = "raise"
    provable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reference", read_path("reference", self.reference))
        validate_choices(self)

    def overridden(self, environment: Mapping[str, str]) -> "Self":
        """Return the options with the values of variables, which take precedence.

        Raises:
            SettingError: If a variable's value is not allowed.
        """
        given: dict[str, Any] = {
            name: read_variable(variable_of(name), environment, kind)
            for name, kind in (("on_inexact_resume", Literal["raise", "warn"]), ("provable", bool))
        }
        given = {name: value for name, value in given.items() if value is not None}
        return dataclass_replace(super().overridden(environment), **given)


class Run:
    """One run of a training: writes its ledger, takes its probes, and compares its state.

    The callback of a Trainer, the recorder of a loop and the hooks around optimizer steps share
    it. An error on one rank is raised on all ranks, so that none waits for another.

    Attributes:
        options: The options.
        ranks: The ranks of the training.
        probes: The probes of the open ledger.
        loss: The last loss, on its device; None without one.
        data: The hash of all batches so far, if the run commits to them; see ``commitment``.
        digest: The digest of the weights that were digested last; None before the first.
        folder: The folder of the ledger that was opened last; None before.
        stop: The global step at which the run stops, if it is a segment; else None. The states
            after it and before its last step are digested.
        open_runs: Those of this process with an open ledger.
    """

    open_runs: ClassVar["WeakSet[Run]"] = WeakSet()

    def __init__(self, options: RunOptions) -> None:
        self.options = self._given = options
        self.digest: str | None = None
        self.folder: Path | None = None
        self.stop: int | None = None
        self._reached = (0, 0)  # the epoch and step of the last state, which the end has, too
        self._parent: Resume | None = None
        self._report: Callable[[str], None] = warnings.warn
        self._forget()

    def _forget(self) -> None:
        """Forget all that belongs to one ledger."""
        self._header: Header | None = None
        self._writer: LedgerWriter | None = None
        self._problem: LedgerError | None = None
        self._reference: Reference | None = None
        self._agreement: RankAgreement | None = None
        # How many steps are still digested since the last save or resume, which was after a step.
        self._due = self._saved_step = 0
        # In a resumed run, until a difference was reported or no rank has more to compare.
        self._check: ResumeCheck | None = None
        self._checked = 0  # steps
        self._problem_since = ""  # a difference that the other ranks do not know yet
        self._training = Training(torch.nn.Module())
        self.ranks = Ranks(0)
        self.loss: torch.Tensor | None = None
        self.data = ""
        self._commitment: Any = None  # the module, if the run commits to what it does
        self._sources: Any = None  # the program as the run began
        self._unhashed = set[str]()  # types of which it has not read all
        self.probes = Probes()

    # A callback is copied (by a tuner) and pickled (by a launcher that spawns). A copy has no open
    # ledger: two processes must not write one file.
    def __reduce__(self) -> tuple[type["Run"], tuple[RunOptions], dict[str, Any]]:
        return Run, (self._given,), {"folder": self.folder, "digest": self.digest}

    @property
    def is_open(self) -> bool:
        """True while a ledger is open."""
        return self._header is not None

    @property
    def compares(self) -> bool:
        """True if the training is compared with a reference or across ranks."""
        return self._reference is not None or self._agreement is not None

    @property
    def digests_steps(self) -> bool:
        """True if ``end_step`` may have something to digest."""
        return self._due > 0 or self._agreement is not None or self.stop is not None

    @property
    def ledger_position(self) -> dict[str, str] | None:
        """The ledger's folder, and the check of this rank's last record; None without one."""
        if self._writer is None or self.folder is None:
            return None
        return {"folder": str(self.folder.absolute()), "check": self._writer.chain_hash}

    def log_return(self, step: int | None = None) -> None:
        """Log on rank 0 the command that returns to a step; without one, to a value not finite."""
        header, folder = self._header, self.folder
        command = "" if header is None else header.program.get("command", "")
        # Variables reach the first fit of a program; a segment is a return itself.
        if not command or header is None or folder is None or header.fit or self.stop is not None:
            return
        what = "the first value that is not finite" if step is None else f"step {step}"
        where = "--first-nonfinite" if step is None else step
        path = quote(shorten_path(folder))
        _log.warning("To return to %s: d9m goto %s %s -- %s", what, where, path, command)

    @property
    def loss_text(self) -> str | None:
        """``float.hex()`` of the last loss; None without one."""
        return None if self.loss is None else float(self.loss).hex()

    def prepare(self) -> None:
        """Let variables override the options, and check these.

        Raises:
            LedgerError: If the reference cannot be read.
            SettingError: If a value is not allowed.
        """
        options = self.options = self._given.overridden(os.environ)
        if options.reference is not None:
            read_ledger(options.reference)

    def resume(
        self,
        parent: Resume,
        loss: str | None,
        report: Callable[[str], None],
        data: str = "",
    ) -> None:
        """Let the ledger that ``begin`` opens next continue another one.

        ``loss`` and ``data`` are the ``loss_text`` and the ``data`` of that run. ``report`` is
        called with the difference, the same on all ranks, if this run does not continue it.
        """
        self._parent, self._report, self.data = parent, report, data
        if loss is not None:
            self.loss = torch.tensor(float.fromhex(loss), dtype=torch.float64, device="cpu")

    def begin(
        self,
        ranks: Ranks,
        training: Training,
        describe: "Callable[[], tuple[Header, RunFacts, ReplicatedState | None]]",
        make_folder: Callable[[], Path],
    ) -> bool:
        """Open a ledger, write its header and the facts, and accept or refuse the reference.

        ``describe`` returns the header, the facts, and what must be equal on all ranks;
        ``make_folder`` makes the ledger's folder, the same on all ranks.

        Returns:
            Whether the ledger is a new one, whose initial state should be recorded, and continues
            none.

        Raises:
            LedgerError: If the ledger cannot be written, or the reference not be read.
            ReferenceRefusedError: If the reference comes from another experiment.
            StackDifferenceError: If the reference's stack differs, unless the options allow it.
        """
        parent, self._parent = self._parent, None
        self._reached = (0, 0) if parent is None else (parent.epoch, parent.step)
        if parent is None:
            self.loss, self.data = None, ""
        self.ranks, self._training = ranks, training
        header, facts, replicated = ranks.raise_on_all(describe)
        if self.stop is not None:
            header = replace(header, program={**header.program, SEGMENT: f"until {self.stop}"})
        self.folder, self.digest = make_folder(), None
        self._header = header
        if not ranks.is_alone and replicated is not None:
            from lightning_d9m.engine.recording.rank_agreement import RankAgreement

            self._agreement = RankAgreement(ranks.gather_json, replicated)
        # From here on the hooks around optimizer steps leave the training to this run.
        self.open_runs.add(self)
        if Watched.watch is not None:
            Watched.watch.begin(self.folder, ranks.rank)
        ranks.raise_on_all(lambda: self._open(header, facts, parent))
        # Before the probes hook the model: its backward pass is not one of the training.
        # Without optimizers nothing is trained, and rank 0 alone records the last model.
        if control_is_on() and training.list_optimizers is not tuple:
            settle_buckets(training.model if training.wrapped is None else training.wrapped)
        self._open_probes()
        return parent is None

    def _open_probes(self) -> None:
        options, rank = self.options, self.ranks.rank
        if options.kinds:
            # Their 1,300 lines are loaded by runs that take values.
            from lightning_d9m.engine.probes.batch_probes import BatchProbes

            assert self.folder is not None, "begin() has made it"
            self.probes = BatchProbes(options, self._training, self.folder, rank, self.append)

    def _open(self, header: Header, facts: RunFacts, parent: Resume | None) -> None:
        assert self.folder is not None, "begin() has made it"
        options = self.options
        if options.provable:  # loaded by runs that commit
            self._commitment = import_module("lightning_d9m.engine.recording.commitment")
            # Rank 0 writes them. Its error, as of a file that cannot be read, is raised on all.
            if header.rank == 0:
                self._sources = self._commitment.find_sources()
        # The header is written before the reference is opened: the ledger of a run that is refused
        # says what was refused.
        self._writer = LedgerWriter(rank_path(self.folder, header.rank))
        self._writer.write(header)
        if parent is not None:
            unchecked = self._open_check(header, parent)
            named = parent.parent
            with suppress(ValueError):  # on Windows, another drive
                # Relative, so that both folders can be moved together.
                named = named and os.path.relpath(named, self.folder)
            self._writer.write(replace(parent, parent=named, unchecked=unchecked or None))
        self._writer.write(facts)
        if self._sources is not None:  # also of a run that is killed
            self._writer.write(self._sources)
        if options.reference is None:
            return
        from lightning_d9m.engine.recording.reference import Reference

        reference = self._reference = Reference(options.reference, header.rank, writing=self.folder)
        # The stack first: a different driver must not look like nondeterminism.
        portable = are_portable(reference.header.settings, header.settings)
        allowed = "ignore" if portable else options.on_stack_difference
        check_stack(reference.header.stack, header.stack, allowed)
        reference.accept(header, facts, None if parent is None else parent.epoch)

    def _open_check(self, header: Header, parent: Resume) -> str:
        """Find what the run that saved the checkpoint did next; return why that is not known."""
        self.note_save(parent.step)
        if parent.inexact:  # and that is accepted
            return "the resume is inexact"
        if os.environ.get(variable_of("resume")):
            return "d9m repeat compares the whole run"
        assert self.folder is not None, "begin() has made it"
        file = rank_path(self.folder, header.rank)
        self._check = ResumeCheck(file, parent.parent, parent.parent_check)
        problem = self._check.problem
        if problem and header.rank == 0:
            _log.warning(
                "This resume cannot be compared with the run that saved the checkpoint: %s.",
                problem,
            )
        return problem

    def note_save(self, step: int) -> None:
        """Digest the state after the steps that follow a checkpoint saved after this one."""
        self._due, self._saved_step = FOLLOWED_STEPS, step

    def note_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record a checkpoint that is complete, whose path is made relative to the ledger."""
        if self.folder is not None:
            path = os.path.abspath(checkpoint.path)  # noqa: PTH100 - also of a URL's text
            with suppress(ValueError):  # on Windows, another drive
                path = os.path.relpath(path, self.folder)
            self.append(replace(checkpoint, path=path))

    def record(
        self,
        moment: str,
        *,
        epoch: int,
        step: int,
        scalars: Mapping[str, str] = MappingProxyType({}),
        verify: Callable[[], None] | None = None,
    ) -> int:
        """Record the state at a moment, and compare it; every rank must call this.

        The moment is ``"initial"``, ``"epoch"`` or ``"final"``. Scalars are ``float.hex()``
        of numbers; ``verify`` raises a ``SettingError`` if a switch was changed.

        Returns:
            The number of entries that differ from the reference or across ranks.

        Raises:
            DriftError: If entries differ and ``on_drift`` is ``"raise"``.
            LedgerError: If the ledger cannot be written.
        """
        assert self._header is not None, "begin() comes first"
        if Watched.watch is not None:
            Watched.watch.mark(moment, epoch, step)
        # Probes of the batches before come first: readers rely on the order of a training.
        self.probes.save_state(StatePoint(epoch, step, moment))
        self.ranks.raise_on_all(self.probes.close if moment == "final" else self.probes.flush)
        snapshot = self.ranks.raise_on_all(lambda: self._read(verify))
        complete_snapshot(snapshot, self.ranks)
        digests = self._describe(moment, epoch, step, snapshot, scalars)
        # The ledger is written before anything is raised, so that it has the record that differs.
        found = self.ranks.raise_on_all(lambda: self._write(digests))
        if self._check is not None and moment == "epoch":
            self._tell_ranks(self._problem_since or self._check.compare(digests, digests.groups))
        found += self._compare_ranks(digests, found)
        if not found:
            return 0
        if self.options.on_drift == "raise":
            raise found[0]
        for error in found:
            if self._header.rank in (0, error.rank):
                warnings.warn(str(error), stacklevel=2)
        return max(error.count for error in found)

    def record_exception(self, *, epoch: int, step: int) -> None:
        """Record the state of this rank where an exception ends the training.

        Ranks do not communicate, because some may be lost: a state that they share out is not
        recorded. A difference from the reference is a warning, and no error hides the exception.
        """
        self._reached = epoch, step
        if self._header is None or SHARDED_PARAMETERS in self._header.stack:
            return
        with suppress(Exception):
            self.probes.flush()
            digests = self._describe(EXCEPTION, epoch, step, self._read())
            for error in self._write(digests):
                warnings.warn(str(error), stacklevel=2)

    def _describe(
        self,
        moment: str,
        epoch: int,
        step: int,
        snapshot: Snapshot,
        scalars: Mapping[str, str] = MappingProxyType({}),
    ) -> Digests:
        training, totals = self._training, snapshot.total()
        self.digest, self._reached = totals["weights"], (epoch, step)
        gradients: dict[str, dict[str, str]] = {}
        if training.records_gradients:  # those that the program has not cleared yet
            named = training.model.named_parameters()
            found = {plain_name(name): p.grad for name, p in named if p.grad is not None}
            if found:
                gradients["gradients"] = {name: digest_value(grad) for name, grad in found.items()}
        return Digests(
            moment=moment,
            epoch=epoch,
            step=step,
            totals={
                **totals,
                **{k: digest_value(sorted(v.items())) for k, v in gradients.items()},
                # SHA-256 takes 20 times as long, and what a proof needs are the states that end
                # segments: this one, and those of end_step.
                **(self._commit() if moment == FINAL else {}),
            },
            groups=snapshot.groups | gradients,
            undigested=len(snapshot.undigested),
            problem=next(iter(snapshot.undigested), None),
            loss=self.loss_text,
            scalars=scalars,
        )

    def take_data(self, batch: object) -> None:
        """Take the batch that is trained next, if the run commits to its data."""
        if self._commitment is not None:
            self.data = self._commitment.chain_batch(self.data, batch, self._unhashed)

    def _commit(self) -> dict[str, str]:
        commitment = self._commitment
        given = self._training, self.data, self._unhashed
        return {} if commitment is None else commitment.hash_state(*given)

    def _read(self, verify: Callable[[], None] | None = None, *, whole: bool = True) -> Snapshot:
        """Digest the state; unless ``whole``, this rank's shards are digested as tensors."""
        training = self._training
        if verify is not None:
            verify()
        wrapped = training.model if training.wrapped is None else training.wrapped
        reshard(wrapped)
        return take_partial_snapshot(
            training.model,
            training.list_optimizers(),
            training.list_schedulers(),
            find_flat_layouts(wrapped) if whole else None,
            # Portable runs of two versions of torch are comparable.
            switches=self._header is None or not self._header.settings.get("portable"),
        )

    def _write(self, digests: Digests) -> list[DriftError]:
        assert self._writer is not None, "begin() comes first"
        if self._problem is not None:
            raise self._problem
        self._writer.write(digests)
        reference = self._reference
        if reference is None or (difference := reference.check(digests)) is None:
            return []
        return [reference.drift_error(difference)]

    def _compare_ranks(self, digests: Digests, found: list[DriftError]) -> list[DriftError]:
        """Return the errors that all ranks raise, the same on every rank."""
        # One gather for both comparisons. A rank that raised alone would leave the others in their
        # next collective.
        if self.ranks.is_alone:
            return []
        agreement = self._agreement
        summary = [] if agreement is None else agreement.summarize(digests.groups)
        rows = self.ranks.gather_json([found[0].count if found else 0, *summary])
        errors: list[DriftError] = []
        drifted = next((rank for rank, row in enumerate(rows) if row[0]), None)
        if drifted is not None and not found:
            assert self.folder is not None, "begin() comes first"
            text = (
                f"Rank {drifted} differs from its reference (epoch {digests.epoch}, step "
                f"{digests.step}); this rank {self.ranks.rank} does not. What differs is in the "
                f"message of rank {drifted} and in its ledger, {rank_path(self.folder, drifted)}."
            )
            place = {"moment": digests.moment, "epoch": digests.epoch, "step": digests.step}
            errors.append(DriftError(text, **place, rank=drifted, count=rows[drifted][0]))
        drift = None if agreement is None else agreement.compare([row[1:] for row in rows], digests)
        return errors if drift is None else [*errors, drift]

    def end_step(self, epoch: int, step: int) -> None:
        """Digest the state of this rank after a step, if it is one of those that are compared.

        That are the first ones after a checkpoint; some others are kept until the next record, if
        ranks are compared. An error is left to the next record, which all ranks see.

        Raises:
            InexactResumeError: On all ranks, if a resumed run differs, as ``resume`` has it.
        """
        agreement, header = self._agreement, self._header
        if header is None:
            return
        stops = self.stop is not None and self._saved_step < step and step >= self.stop - 1
        follows = (self._due > 0 and step > self._saved_step) or stops
        wanted = agreement is not None and SHARDED_PARAMETERS not in header.stack
        kept = agreement if agreement is not None and wanted and agreement.wants(step) else None
        if stops:
            self._reached = epoch, step
        if not follows and kept is None:
            return
        groups: dict[str, dict[str, str]] = {}
        with suppress(D9mError):
            groups = self._read(whole=False).groups
            if kept is not None:
                kept.keep_step(step, groups)
        if follows:
            # A proof needs the first state after a checkpoint, which the last one of the segment
            # before it has, too.
            commits = stops or self._due == FOLLOWED_STEPS
            self._due, self._saved_step = max(0, self._due - 1), step
            self._check_step(epoch, step, groups, self._commit() if commits else {})

    def _check_step(
        self,
        epoch: int,
        step: int,
        groups: dict[str, dict[str, str]],
        committed: Mapping[str, str],
    ) -> None:
        assert self._header is not None, "the ledger is open"
        rank = self._header.rank
        # A checkpoint has those of rank 0; the others get them with DDP's next synchronization.
        groups = {name: named for name, named in groups.items() if name != "buffers" or not rank}
        # With logical ranks they depend on the last one that a process has computed.
        if LOGICAL_RANKS not in self._header.stack:
            groups = {**groups, GENERATORS: digest_generators()}
        record = digest_step(epoch, step, groups, committed)
        self.probes.flush()  # the probes of this step come before it
        self.append(record)
        check = self._check
        if check is None:
            return
        problem = check.compare(record, groups)
        self._checked += 1
        # All ranks know that these steps are compared, and not which others.
        if self.ranks.is_alone or self._checked <= FOLLOWED_STEPS:
            self._tell_ranks(problem)
        else:
            self._problem_since = self._problem_since or problem

    def _tell_ranks(self, problem: str) -> None:
        """Report a difference that any rank has found; every rank calls this."""
        assert self._check is not None, "the run was resumed"
        rows = self.ranks.gather_json([problem, self._check.is_open])
        found = [text for text, _ in rows if text]
        if found or not any(is_open for _, is_open in rows):
            self._check.close()
            self._check, self._problem_since = None, ""
        if found:
            self._report(found[0])

    def break_resume(
        self, said: str, problems: Sequence[str], *, is_first: bool, **place: Any
    ) -> None:
        """Record why a resumed run is inexact; raise the problems, or warn of them if chosen.

        The record is another one that names a continued ledger, without a name: readers take only
        the reasons from it. ``place`` has the epoch, step and batch; ``is_first`` is True on the
        rank that warns.

        Raises:
            InexactResumeError: Unless ``on_inexact_resume`` is ``"warn"``.
        """
        self.append(Resume(parent="", parent_check="", inexact=tuple(problems), **place))
        text = (
            f"{said}\nTo resume anyway, with a break that the ledger records, pass "
            'on_inexact_resume="warn" to the recorder or callback, or set '
            "LIGHTNING_D9M_ON_INEXACT_RESUME=warn."
        )
        if self.options.on_inexact_resume != "warn":
            raise InexactResumeError(text, reasons=problems)
        if is_first:
            warnings.warn(text, stacklevel=2)

    def append(self, record: Record) -> None:
        """Write a record that is not compared during training, if a ledger is open.

        An error is raised by the next call of ``record``, on all ranks.
        """
        if self._writer is None or self._problem is not None:
            return
        # Ranks do not wait for each other here, so a full disk on one must not end it alone.
        try:
            self._writer.write(record)
        except LedgerError as error:
            self._problem = error

    def end(self, end: End) -> None:
        """Write the last record, with the place of the last state, and close the ledger.

        Warn of records that were not compared.

        If the training failed, errors of this do not hide that error.
        """
        failed = end.status == "failed"
        try:
            if (
                end.status == "finished"
                and self.loss is not None
                and not self.loss.isfinite().all()
            ):
                self.log_return()
            with suppress(Exception) if failed else nullcontext():
                self.probes.close()
                if self._commitment is not None and self.ranks.rank == 0:
                    self.append(self._commitment.find_sources(self._sources, self._unhashed))
        finally:
            writer, reference = self._writer, self._reference
            end = replace(end, epoch=self._reached[0], step=self._reached[1])
            if self._check is not None:
                self._check.close()
            # Forgotten before the last record is written: if that fails, the run is closed anyway.
            self.open_runs.discard(self)
            self._forget()
            if writer is not None:
                # If the ledger could not be written, its error was raised and failed the run.
                with suppress(LedgerError) if failed else nullcontext(), writer:
                    writer.write(end)
        if reference is not None and end.status != "finished":
            reference.close()
        elif reference is not None and (unchecked := reference.finish()) is not None:
            warnings.warn(unchecked, stacklevel=2)


def shorten_path(folder: Path) -> str:
    """Return a path from the working folder, if it is below that."""
    path = os.path.relpath(folder)
    return str(folder) if path.startswith("..") else path


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


def complete_snapshot(snapshot: Snapshot, ranks: Ranks) -> None:
    """Add the digests of tensors that ranks share out; every rank calls this.

    Raises:
        DigestError: If a tensor has no digest, or its parts do not cover it.
    """
    # Of a tensor that is divided along its first dimension, ranks gather the digests of chunks and
    # the bytes of chunks that two of them share. A tensor that is divided otherwise is gathered on
    # each rank, one after the other: its chunks lie on many ranks.
    if not (snapshot.shards or snapshot.owners or snapshot.scattered):
        return
    read = ranks.raise_on_all(lambda: [*read_shards(snapshot.shards.values())])
    # By group and name: the ranks that hold the tensor once, its header, its size and this rank's
    # parts; of a value that belongs to a tensor, its digest and None.
    parts_here: dict[tuple[str, str], tuple[Any, ...]] = {
        place: (shard.ranks, shard.header, shard.size, tuple(parts))
        for (place, shard), parts in zip(snapshot.shards.items(), read, strict=True)
    }
    for (group, name), shard in snapshot.owners.items():
        parts_here[group, name] = (shard.ranks, snapshot.groups[group][name], None, None)

    def gather(value: object) -> list[Any]:
        return [decode_plain(row) for row in ranks.gather_bytes(encode_plain(value))]

    digests: dict[tuple[str, str], str] = {}
    # Ranks may have different names, and each must take part in every gather.
    places = [*dict.fromkeys(place for names in gather([*parts_here]) for place in names)]
    for start in range(0, len(places), _ROUND):
        rows = gather({p: parts_here[p] for p in places[start : start + _ROUND] if p in parts_here})
        digests |= ranks.raise_on_all(lambda: _combine(rows, ranks.rank))  # noqa: B023 - called here
    for place, tensor in snapshot.scattered.items():
        with torch.no_grad():
            digests[place] = digest(tensor.full_tensor())  # type: ignore[attr-defined]
    for (group, name), value in digests.items():
        snapshot.groups[group][name] = value


def _combine(rows: list[dict[tuple[str, str], tuple[Any, ...]]], rank: int) -> dict[Any, str]:
    """Return the digests of the tensors of which a rank holds a part, by place."""
    found: dict[Any, str] = {}
    for row in (rows[rank], *rows):
        for place, (holders, known, size, _) in row.items():
            if place in found or rank not in holders:
                continue
            if size is None:
                found[place] = known
            else:
                parts = [ShardParts(*rows[n][place][3]) for n in holders if place in rows[n]]
                found[place] = combine_shards(known, size, parts)
    return found
