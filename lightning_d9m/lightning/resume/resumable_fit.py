"""One fit that may resume from a checkpoint: what is restored, and when."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from warnings import catch_warnings, filterwarnings, warn

from lightning_d9m.attribute_patches import AttributePatches, replace_method
from lightning_d9m.control.data.resumable_sampler import find_epoch_problem, find_position_problem
from lightning_d9m.control.data.samplers import list_unsaved
from lightning_d9m.errors import InexactResumeError
from lightning_d9m.hashing.training_state import ModelTensors
from lightning_d9m.ledger.format.records import Resume
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.checkpoint_io import add_manifests
from lightning_d9m.lightning.recording.trainer_recorder import TrainerRecorder
from lightning_d9m.lightning.resume import exactness, run_state
from lightning_d9m.lightning.resume.exactness import EpochLength
from lightning_d9m.lightning.resume.late_changes import (
    LateChanges,
    describe_hook,
    describe_validation,
    digest_callbacks,
    digest_tensors,
)
from lightning_d9m.lightning.resume.loop_position import (
    draws_when_iterated,
    drop_consumed_states,
    find_position,
    finish_last_batch,
    finish_pending_work,
    iterate_again,
    makes_iterator_again,
    reopen_epoch,
)
from lightning_d9m.lightning.resume.program_state import (
    Captured,
    ProgramState,
    keep_modes,
    keep_small,
)
from lightning_d9m.lightning.resume.run_state import restore_latest
from lightning_d9m.lightning.saved_state import (
    CALLBACKS,
    KEY,
    LoopPosition,
    SavedLedger,
    SavedRank,
    SavedState,
)
from lightning_d9m.lightning.strategies import is_sharded
from lightning_d9m.lightning.trainer_attributes import get_logical_ranks, ranks_of
from lightning_d9m.lightning.trainer_session import TrainerSession
from lightning_d9m.recording.rank_agreement import gather_json

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


InexactResumeAction = Literal["raise", "warn", "raise_early"]


class ResumableFit:
    """Captures and restores the state of one fit, with wrappers around methods of its loops.

    See ``CheckpointState`` for ``on_inexact``.
    """

    def __init__(
        self,
        trainer: "Trainer",
        session: TrainerSession,
        recorder: TrainerRecorder,
        on_inexact: InexactResumeAction,
    ) -> None:
        self._trainer, self._session, self._recorder = trainer, session, recorder
        self._on_inexact = on_inexact
        self._patches = AttributePatches()
        self._at_end = False
        self._resumed: SavedState | None = None
        self._first, self._at_cut = LateChanges(self._digest), LateChanges(self._digest_all)
        self._saved, self._validated = LateChanges(self._digest), LateChanges(self._digest)
        self._late: list[str] = []
        self._has_begun = False  # not yet, while a callback searches for a learning rate
        self._reasons: list[str] = []
        self._unvalidated: SavedRank | None = None
        self._before_evaluation: run_state.UserState | None = None
        self._loader_states: list[dict[str, Any]] = []
        self._parts = ModelTensors(trainer.lightning_module)
        self._has_settled = False
        self._captured: Captured = ({}, [])
        self._epoch_length: EpochLength | None = None
        # The state where `max_steps` ended the fit, before the end of the epoch.
        self._cut: SavedState | None = None

    def wrap_loops(self) -> None:
        """Wrap the methods of the loops, until ``release``."""
        fit = self._trainer.fit_loop
        epoch_loop, val_loop = fit.epoch_loop, fit.epoch_loop.val_loop
        wrappers: list[tuple[Any, str, Callable[..., object]]] = [
            (self._trainer.strategy, "load_model_state_dict", self._load_weights),
            (fit, lightning_private.LOAD_LOADER_STATES, self._load_loader_states),
            (fit, "reset", self._finish_and_reset),
            (fit, "on_advance_start", self._restore_and_start),
            (fit, "on_advance_end", self._keep_and_end),
            (epoch_loop, "reset", self._reset_epoch),
            (epoch_loop, "on_run_start", self._start_batches),
            (epoch_loop, "on_advance_end", self._end_batch),
            (fit, "setup_data", self._load_training),
            (val_loop, "setup_data", self._load_validation),
            (val_loop, "run", self._run_validation),
        ]
        for owner, name, wrapper in wrappers:
            self._patches.replace(owner, name, partial(wrapper, getattr(owner, name)))

    def release(self) -> None:
        """Restore the methods of the loops."""
        self._patches.undo()

    def save(self, checkpoint: Mapping[str, Any]) -> SavedState:
        """Return the state for a checkpoint, with the state of this rank alone."""
        self._recorder.reduce_loss(self._trainer)
        state = self.capture(checkpoint)
        if state.position.phase == "batch":
            self._saved.note(self._captured, reset=state.ranks[0].reset)
        return state

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Read the state of the checkpoint from which the fit resumes.

        Raises:
            CheckpointError: If the state is damaged.
            InexactResumeError: If it cannot be resumed exactly, unless ``on_inexact="warn"``.
        """
        trainer = self._trainer
        state = SavedState.from_checkpoint(checkpoint)
        if isinstance(state, str):
            self._raise_or_warn([state])
            return
        if state.is_untrained:
            return
        if problems := exactness.find_resume_problems(state, trainer, self._describe_settings()):
            self._raise_or_warn(problems)
        self._resumed = state
        if state.position.phase == "cut" and not exactness.reaches_max_steps(
            trainer, state.position.step
        ):
            reopen_epoch(checkpoint)
        rank = self._rank_state
        if state.fits(trainer.world_size, get_logical_ranks(trainer)):
            loaded = {"train": rank.train_reload_epoch, "validate": rank.validation_reload_epoch}
            self._session.resume_fit(state.fit, loaded)
        self._unvalidated = rank

    def _load_weights(self, load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Load the weights into a module of the dtype in which it will train.

        With precision ``64-true`` Lightning converts the module after that, so the weights would be
        rounded to float32.
        """
        strategy = self._trainer.strategy
        plugin = strategy.precision_plugin
        if plugin.precision == "64-true" and not strategy.restore_checkpoint_after_setup:
            plugin.convert_module(self._trainer.lightning_module)
        load(*args, **kwargs)

    def _load_loader_states(self, load: Callable[[], None]) -> None:
        trainer = self._trainer
        if trainer.fit_loop.restarting:
            if self._was_saved_between_epochs:
                drop_consumed_states(trainer)
            self._loader_states = lightning_private.list_pending_loader_states(trainer)
            if self._resumed is not None and any(self._loader_states):
                self._epoch_length = EpochLength(self._position.batch)
        load()
        if self._was_saved_between_epochs and not any(self._loader_states):
            found = map(find_epoch_problem, lightning_private.list_loaders(trainer.fit_loop))
            if problems := list(filter(None, found)):
                self._raise_or_warn(problems)

    def _finish_and_reset(self, reset: Callable[[], None]) -> None:
        _ = self._program  # it begins here
        if not lightning_private.has_loaded_progress(self._trainer):
            reset()
            return
        restore_latest(self._trainer, self._rank_state.callback_metrics)
        self._at_end = finish_pending_work(self._trainer, self._position, reset)

    @cached_property
    def _program(self) -> ProgramState:
        """The state of the program's objects, compared with what it was at first."""
        return ProgramState(self._trainer, self._parts)

    def _digest(self) -> dict[str, str]:
        return digest_tensors(self._trainer.strategy, self._parts)

    def _digest_all(self) -> dict[str, str]:
        return self._digest() | digest_callbacks(self._trainer)

    def _restore_and_start(self, start: Callable[[], None]) -> None:
        # After `on_train_start`, where modules reset their metrics.
        if self._has_begun and not self._has_settled:
            self._has_settled = True
            self._program.settle()
        if self._resumed is not None and self._has_begun:
            missing = self._restore_program()
            self._raise_or_warn_on_all_ranks(exactness.describe_missing_objects(missing))
            run_state.restore_outside(
                self._trainer, self._session, self._rank_state, self._report_problem
            )
            if self._was_saved_between_epochs:
                self._session.loaders.restore_numbers("train", self._position.epoch)
        start()

    def _keep_and_end(self, end: Callable[[], None]) -> None:
        if exactness.is_cut_by_max_steps(self._trainer):
            self._recorder.reduce_loss(self._trainer)
            self._cut = self.capture()
            self._at_cut.note(self._program.capture())
        end()

    def _restore_program(self) -> list[str]:
        rank = self._rank_state
        return self._program.restore(rank.program, rank.reset)

    def _reset_epoch(self, reset: Callable[[], None]) -> None:
        with catch_warnings():
            if self._resumed is not None and not self._reasons:
                # Lightning cannot resume these loaders; the loader control can.
                filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            reset()

    def _start_batches(self, start: Callable[..., None], *args: Any, **words: Any) -> None:
        trainer, session = self._trainer, self._session
        between = self._was_saved_between_epochs
        if makes_iterator_again(trainer):
            session.loaders.restart_epoch("train", trainer.current_epoch)
        elif trainer.current_epoch and between and draws_when_iterated(trainer):
            session.loaders.restart_epoch("train", trainer.current_epoch)
            iterate_again(trainer, self._loader_states)
        self._loader_states = []
        start(*args, **words)
        if self._resumed is not None and exactness.is_at_end(trainer):  # a batch may be fetched
            session.loaders.restore_numbers("train", self._resumed.position.epoch)
        # Otherwise Lightning skips the schedulers at the end of the epoch.
        lightning_private.clear_restart(trainer.fit_loop)
        if self._at_end:
            self._at_end = False
            finish_last_batch(trainer)
        # The generators of training, as late as possible before the next batch.
        if self._has_begun:
            if self._resumed is not None and self._resumed.position.phase != "epoch":
                self._restore_program()
                run_state.restore_within(trainer, self._rank_state, self._report_problem)
            self._resumed = None

    def _end_batch(self, end: Callable[..., None], *args: Any, **words: Any) -> None:
        self._find_late_changes()
        end(*args, **words)

    def _find_late_changes(self) -> None:
        """Report what has changed since a checkpoint was saved in this batch or validation."""
        names = self._saved.find(self._program)
        self._saved.forget()
        if names and not self._late:
            self._late = [describe_hook(names)]
            exactness.report_late(self._late[0], raises=self._on_inexact == "raise_early")

    def _load_training(self, load: Callable[[], None]) -> None:
        load()
        self._session.loaders.keep_iterated("train")

    def _load_validation(self, load: Callable[[], None]) -> None:
        load()
        loop = self._trainer.fit_loop.epoch_loop.val_loop
        if lightning_private.has_loaders(loop) and self._unvalidated is not None:
            rank, self._unvalidated = self._unvalidated, None
            run_state.restore_validation(self._trainer, self._session, rank)

    def _run_validation(self, run: Callable[[], object]) -> object:
        if self._trainer.sanity_checking:
            _ = self._program  # it begins here
            return run()
        self._before_evaluation = run_state.capture_user_state(
            self._trainer, "validation", self._program
        )
        self._validated.note()
        outputs = run()
        self._find_late_changes()
        self._validated.forget()
        self._before_evaluation = None  # after an exception a checkpoint may still need it
        return outputs

    def resume_loader(self, loader: object) -> None:
        """Continue a training loader, which has just been loaded, where the checkpoint was saved.

        Raises:
            InexactResumeError: If it cannot, unless ``on_inexact="warn"``.
        """
        trainer = self._trainer
        # `estimated_stepping_batches` loads the data before Lightning restores its progress.
        early = not lightning_private.has_loaded_progress(trainer)
        if early and self._resumed is None:
            return
        position = self._position
        if position.batch and not early and not exactness.is_at_end(trainer):
            self._report_problem(find_position_problem(loader))
        self._session.resume_loaders(
            position.epoch,
            position.batch,
            # Called when the loaders are iterated: Lightning sets their mode later.
            lambda: lightning_private.cycles_shorter_loaders(trainer),
            self._rank_state.samplers,
        )

    def end_epoch(self) -> None:
        """Check the length of an epoch; every rank calls this before an epoch is recorded.

        Raises:
            InexactResumeError: A loader began the epoch after the resumed one at the position of
                the checkpoint, unless ``on_inexact="warn"``.
        """
        if self._epoch_length is not None:
            problem = self._epoch_length.end_epoch(self._trainer)
            if self._epoch_length.is_checked:
                self._epoch_length = None
            self._raise_or_warn_on_all_ranks([problem] if problem else [])

    def begin(self) -> None:
        """Continue the ledger of the interrupted run; called before training starts."""
        self._has_begun = True
        trainer = self._trainer
        self._first.note()
        if self._resumed is None and not self._reasons:
            exactness.report_unresumable(trainer, raises=self._on_inexact == "raise_early")
            return
        position, rank = self._position, self._rank_state
        if (resumed := self._resumed) is not None:
            self._report_problem(exactness.find_lost_progress(trainer, position))
            run_state.restore_frozen(trainer, resumed.settings)
            if resumed.fits(trainer.world_size, get_logical_ranks(trainer)):
                find = partial(self._find_unmatched, rank)
                self._raise_or_warn_on_all_ranks(ranks_of(trainer).raise_on_all(find))
        ledger = rank.ledger or SavedLedger("", "")
        self._recorder.resume(
            Resume(
                parent=ledger.folder,
                parent_check=ledger.check,
                epoch=position.epoch,
                step=position.step,
                batch=position.batch,
                inexact=tuple(self._reasons),
            ),
            rank.pending,
        )

    @property
    def _position(self) -> LoopPosition:
        return find_position(self._trainer) if self._resumed is None else self._resumed.position

    @property
    def _was_saved_between_epochs(self) -> bool:
        return self._resumed is not None and self._resumed.position.phase == "epoch"

    @property
    def _rank_state(self) -> SavedRank:
        if self._resumed is None:
            return SavedRank()
        ranks, logical_ranks = self._trainer.world_size, get_logical_ranks(self._trainer)
        return self._resumed.of_rank(self._trainer.global_rank, ranks, logical_ranks)

    def _describe_settings(self) -> dict[str, Any]:
        return exactness.describe_settings(self._trainer, self._session)

    def capture(self, checkpoint: Mapping[str, Any] = MappingProxyType({})) -> SavedState:
        """Return the state of the run, with the state of this rank alone.

        ``checkpoint`` is what is being saved, which may hold large values already.
        """
        if self._cut is not None:
            return self._add_changes_since_cut(self._cut)
        trainer, session = self._trainer, self._session
        position = find_position(trainer)
        user = self._before_evaluation if position.phase == "validation" else None
        user = user or run_state.capture_user_state(trainer, position.phase, self._program)
        self._captured = program = user.program
        if trainer.validating and self._before_evaluation is not None:
            program = keep_modes(program, self._before_evaluation.program)
        kept, reasons = keep_small(program, checkpoint)
        late = self._late if position.phase == "batch" else []
        if position.phase == "validation" and (names := self._validated.find()):
            late = [describe_validation(names)]
        ledger = self._recorder.ledger_position
        samplers = session.capture_samplers(position.phase)
        reasons += list_unsaved(samplers)
        rank = replace(
            run_state.capture(trainer, session, user, position.phase),
            samplers=samplers,
            program=kept,
            inexact=exactness.find_missing_state(trainer, position) + reasons + late,
            ledger=None if ledger is None else SavedLedger(**ledger),
            pending=self._recorder.pending,
        )
        return SavedState(
            seed=session.settings.seed,
            fit=session.fit,
            settings=self._describe_settings() | run_state.capture_frozen(self._parts),
            world_size=trainer.world_size,
            position=position,
            ranks=[rank],
        )

    def _add_changes_since_cut(self, cut: SavedState) -> SavedState:
        """Return the state at the cut, with a reason if hooks have changed anything since."""
        trainer, (rank,) = self._trainer, cut.ranks
        names = self._at_cut.find(self._program)
        if not names:
            return cut
        reason = exactness.describe_cut(trainer, cut.position.epoch, names)
        return replace(cut, ranks=[replace(rank, inexact=[*rank.inexact, reason])])

    def find_lost(self, checkpoint: Mapping[str, Any]) -> list[str]:
        """Return why a checkpoint that is about to be written lacks weights of the model."""
        names = self._first.find_lost(self._parts, checkpoint)
        return [exactness.describe_lost_tensor(names[0])] if names else []

    def _find_unmatched(self, rank: SavedRank) -> list[str]:
        """Return why the generators of this rank cannot be restored."""
        trainer = self._trainer
        problems = exactness.describe_unmatched_state(run_state.find_unmatched_state(trainer, rank))
        reloaded = run_state.find_reloaded_generators(trainer, rank, self._position.epoch)
        problems += exactness.describe_reloaded_generators(reloaded)
        return problems + run_state.find_lost_generators(rank)

    def _raise_or_warn_on_all_ranks(self, problems: list[str]) -> None:
        """Raise or warn on all ranks of the problems that any of them has found."""
        rows = gather_json(ranks_of(self._trainer), problems)
        if found := list(dict.fromkeys(problem for row in rows for problem in row)):
            self._raise_or_warn(found)

    def _report_problem(self, problem: str | None) -> None:
        if problem is not None and problem not in self._reasons:
            self._raise_or_warn([problem])

    def _raise_or_warn(self, problems: list[str]) -> None:
        self._reasons += problems
        self._recorder.add_reasons(self._trainer, problems)  # if its ledger is open
        listed = "\n".join(f"- {problem}" for problem in problems)
        text = (
            f"This run cannot be resumed exactly from the checkpoint:\n{listed}\n"
            "To resume anyway, with a break that the ledger records, pass "
            'DeterminismCallback(on_inexact_resume="warn").'
        )
        if self._on_inexact != "warn":
            raise InexactResumeError(text, reasons=problems)
        if self._trainer.is_global_zero:
            warn(text, stacklevel=2)


class CheckpointState:
    """Saves and restores the state of one callback's fits.

    Args:
        on_inexact: ``"raise"`` or ``"warn"`` if a run cannot be resumed exactly; ``"raise_early"``
            raises at the start of a fit whose checkpoints could not be resumed exactly.
    """

    def __init__(self, on_inexact: InexactResumeAction = "raise") -> None:
        self._on_inexact = on_inexact
        self._fit: ResumableFit | None = None
        # The state of a run that has ended, for later checkpoints; whether it has all ranks.
        self._ended: SavedState | None = None
        self._ended_on_all_ranks = False
        self._find_lost: Callable[[Mapping[str, Any]], list[str]] | None = None
        self._written = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        return vars(CheckpointState(self._on_inexact))

    def attach(
        self, trainer: "Trainer", session: TrainerSession, recorder: TrainerRecorder
    ) -> None:
        """Prepare a fit for a checkpoint that it may resume from; called before that is loaded."""
        self._ended = None
        if session.stage == "fit":
            fit = self._fit = ResumableFit(trainer, session, recorder, self._on_inexact)
            self._find_lost = fit.find_lost
            session.resume(fit.resume_loader, self._detach)
            fit.wrap_loops()

    def _detach(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.release()

    def keep(self, trainer: "Trainer", *, ended: bool) -> None:
        """Keep the state of a run that is about to end, for checkpoints that are saved later.

        Args:
            trainer: The Trainer.
            ended: Whether the fit finished. Then every rank calls this, and rank 0 gathers the
                state now, because other ranks may have exited by the next save. Otherwise rank 0
                gathers it when a checkpoint is saved.
        """
        if self._fit is not None:
            state = self._fit.capture()
            self._ended = run_state.gather_ranks(trainer, state) if ended else state
            self._ended_on_all_ranks = ended

    def save(self, trainer: "Trainer", checkpoint: dict[str, Any]) -> None:
        """Add the state to a checkpoint. Every rank calls this, unless the run has ended."""
        self._written.close()  # of a save that failed before it wrote
        if self._fit is not None:
            state = run_state.gather_ranks(trainer, self._fit.save(checkpoint))
        elif self._ended is not None:
            state = self._ended
            if not self._ended_on_all_ranks:
                state = run_state.gather_ranks(trainer, state)
            add_manifests(trainer, once=True)  # no session is open that does so
        else:  # a Trainer that has not trained
            return
        plain = checkpoint.setdefault(CALLBACKS, {})[KEY] = state.as_plain()
        if self._find_lost is not None and not is_sharded(trainer.strategy):
            self._check_next_write(trainer, plain, self._find_lost)

    def _check_next_write(
        self,
        trainer: "Trainer",
        plain: dict[str, Any],
        find_lost: Callable[[Mapping[str, Any]], list[str]],
    ) -> None:
        """Note in the state of a checkpoint which weights it lacks when it is written.

        Until then other callbacks, and the module, may have taken some out.
        """
        save = trainer.strategy.save_checkpoint

        @wraps(save)
        def save_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self._written.close()
            plain["ranks"][0]["inexact"] += find_lost(checkpoint)
            return save(checkpoint, *args, **kwargs)

        replace_method(self._written, trainer.strategy, "save_checkpoint", save_checkpoint)

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Read the state of the checkpoint from which a fit resumes.

        Raises:
            CheckpointError: If the state is damaged.
            InexactResumeError: If it cannot be resumed exactly, unless ``on_inexact="warn"``.
        """
        if self._fit is not None:
            self._fit.load(checkpoint)

    @property
    def fit(self) -> ResumableFit:
        """The fit that runs."""
        assert self._fit is not None, "`setup` comes before training"
        return self._fit
