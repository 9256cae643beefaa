"""Saving and restoring what an exact resume needs beyond Lightning's own; see ``saved_state``.

The file has over 400 lines because one class wraps the methods of Lightning's loops, and each
wrapper repeats a signature.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from warnings import catch_warnings, filterwarnings, warn

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.control.data.resumable_sampler import find_epoch_problem, find_position_problem
from lightning_d9m.errors import InexactResumeError
from lightning_d9m.ledger.format.records import Resume
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.checkpoint_io import add_manifests
from lightning_d9m.lightning.ranks.trainer_ranks import ranks_of
from lightning_d9m.lightning.recording.trainer_recorder import TrainerRecorder
from lightning_d9m.lightning.resume import exactness, run_state
from lightning_d9m.lightning.resume.epoch_length import EpochLength
from lightning_d9m.lightning.resume.late_changes import (
    LateChanges,
    describe_hook,
    describe_validation,
)
from lightning_d9m.lightning.resume.logged_results import restore_latest
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
from lightning_d9m.lightning.resume.model_parts import ModelParts
from lightning_d9m.lightning.resume.weights import load_unrounded
from lightning_d9m.lightning.saved_state import (
    CALLBACKS,
    KEY,
    LoopPosition,
    SavedLedger,
    SavedRank,
    SavedState,
)
from lightning_d9m.lightning.trainer_attributes import get_logical_ranks
from lightning_d9m.lightning.trainer_session import TrainerSession

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

InexactResumeAction = Literal["raise", "warn", "raise_early"]


class CheckpointState:
    """Saves and restores the state of one callback's fits.

    Args:
        on_inexact: ``"raise"`` or ``"warn"`` if a run cannot be resumed exactly; ``"raise_early"``
            raises at the start of a fit whose checkpoints could not be resumed exactly.
    """

    def __init__(self, on_inexact: InexactResumeAction = "raise") -> None:
        self._on_inexact = on_inexact
        self._at_end = False
        # The state of a run that has ended, for later checkpoints; whether it has all ranks.
        self._ended: SavedState | None = None
        self._ended_on_all_ranks = False
        self._clear()

    def _clear(self) -> None:
        """Forget the checkpoint of the last fit."""
        self._resumed: SavedState | None = None
        self._saved, self._validated = LateChanges(), LateChanges()
        self._late: list[str] = []
        self._has_begun = False  # not yet, while a callback searches for a learning rate
        self._recorder: TrainerRecorder | None = None
        self._reasons: list[str] = []
        self._unvalidated: SavedRank | None = None
        self._before_evaluation: run_state.RngAndMetricState | None = None
        self._loader_states: list[dict[str, Any]] = []
        self._model: ModelParts | None = None
        self._epoch_length: EpochLength | None = None
        self._ended = None
        # The state where `max_steps` ended the fit, before the end of the epoch.
        self._cut: SavedState | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(CheckpointState(self._on_inexact)) | {"_at_end": self._at_end}

    def keep(
        self, trainer: "Trainer", session: TrainerSession, recorder: TrainerRecorder, *, ended: bool
    ) -> None:
        """Keep the state of a run that is about to end, for checkpoints that are saved later.

        Args:
            trainer: The Trainer.
            session: Its session.
            recorder: Its recorder.
            ended: Whether the fit finished. Then every rank calls this, and rank 0 gathers the
                state now, because other ranks may have exited by the next save. Otherwise rank 0
                gathers it when a checkpoint is saved.
        """
        if session.stage != "fit":
            return
        state = self._cut or self._capture(trainer, session, recorder)
        self._ended = run_state.gather_ranks(trainer, state) if ended else state
        self._ended_on_all_ranks = ended

    def save(
        self,
        trainer: "Trainer",
        session: TrainerSession | None,
        recorder: TrainerRecorder,
        checkpoint: dict[str, Any],
    ) -> None:
        """Add the state to a checkpoint. Every rank calls this, unless the run has ended."""
        if session is not None and session.stage == "fit":
            recorder.reduce_loss(trainer)
            state = self._cut or self._capture(trainer, session, recorder)
            if state.position.phase == "batch":
                self._saved.note(trainer, self._parts(trainer))
            state = run_state.gather_ranks(trainer, state)
        elif self._ended is not None:
            state = self._ended
            if not self._ended_on_all_ranks:
                state = run_state.gather_ranks(trainer, state)
            add_manifests(trainer, once=True)  # no session is open that does so
        else:  # a Trainer that has not trained
            return
        checkpoint.setdefault(CALLBACKS, {})[KEY] = state.as_plain()

    def load(
        self, trainer: "Trainer", session: TrainerSession, checkpoint: Mapping[str, Any]
    ) -> None:
        """Read the state of the checkpoint from which a fit resumes.

        Raises:
            CheckpointError: If the state is damaged.
            InexactResumeError: If it cannot be resumed exactly, unless ``on_inexact="warn"``.
        """
        if session.stage != "fit":
            return
        state = SavedState.from_checkpoint(checkpoint)
        if isinstance(state, str):
            self._raise_or_warn(trainer, [state])
            return
        if state.is_untrained:
            return
        if problems := exactness.find_resume_problems(
            state, trainer, exactness.describe_settings(trainer, session)
        ):
            self._raise_or_warn(trainer, problems)
        self._resumed = state
        if state.position.phase == "cut" and not exactness.reaches_max_steps(
            trainer, state.position.step
        ):
            reopen_epoch(checkpoint)
        rank = self._rank_state(trainer)
        if state.fits(trainer.world_size, get_logical_ranks(trainer)):
            loaded = {"train": rank.train_reload_epoch, "validate": rank.validation_reload_epoch}
            session.resume_fit(state.fit, loaded)
        self._unvalidated = rank

    def attach(
        self, trainer: "Trainer", session: TrainerSession, recorder: TrainerRecorder
    ) -> None:
        """Prepare a fit for a checkpoint that it may resume from; called before that is loaded."""
        self._clear()
        if session.stage == "fit":
            self._recorder = recorder
            resume_loader = partial(self._resume_loader, trainer, session)
            session.resume(self._loops_wrapped(trainer, session, recorder), resume_loader)

    @contextmanager
    def _loops_wrapped(
        self, trainer: "Trainer", session: TrainerSession, recorder: TrainerRecorder
    ) -> Iterator[None]:
        fit = trainer.fit_loop
        epoch_loop, val_loop = fit.epoch_loop, fit.epoch_loop.val_loop
        wrappers: list[tuple[Any, str, Callable[..., object]]] = [
            (trainer.strategy, "load_model_state_dict", load_unrounded),
            (fit, lightning_private.LOAD_LOADER_STATES, self._load_loader_states),
            (fit, "reset", self._finish_and_reset),
            (fit, "on_advance_start", partial(self._restore_and_start, session)),
            (fit, "on_advance_end", partial(self._keep_and_end, session, recorder)),
            (epoch_loop, "reset", self._reset_epoch),
            (epoch_loop, "on_run_start", partial(self._start_batches, session)),
            (epoch_loop, "on_advance_end", self._end_batch),
            (fit, "setup_data", partial(self._load_training, session)),
            (val_loop, "setup_data", partial(self._load_validation, session)),
            (val_loop, "run", self._run_validation),
        ]
        patches = AttributePatches()
        try:
            for owner, name, wrapper in wrappers:
                patches.replace(owner, name, partial(wrapper, trainer, getattr(owner, name)))
            yield
        finally:
            patches.undo()
            self._model = None

    def _load_loader_states(self, trainer: "Trainer", load: Callable[[], None]) -> None:
        if trainer.fit_loop.restarting:
            if self._was_saved_between_epochs:
                drop_consumed_states(trainer)
            self._loader_states = lightning_private.list_pending_loader_states(trainer)
            if self._resumed is not None and any(self._loader_states):
                self._epoch_length = EpochLength(self._position(trainer).batch)
        load()
        if self._was_saved_between_epochs and not any(self._loader_states):
            found = map(find_epoch_problem, lightning_private.list_loaders(trainer.fit_loop))
            if problems := list(filter(None, found)):
                self._raise_or_warn(trainer, problems)

    def _finish_and_reset(self, trainer: "Trainer", reset: Callable[[], None]) -> None:
        if not lightning_private.has_loaded_progress(trainer):
            reset()
            return
        restore_latest(trainer, self._rank_state(trainer).callback_metrics)
        self._at_end = finish_pending_work(trainer, self._position(trainer), reset)

    def _restore_and_start(
        self, session: TrainerSession, trainer: "Trainer", start: Callable[[], None]
    ) -> None:
        # After `on_train_start`, where modules reset their metrics.
        if self._resumed is not None and self._has_begun:
            report = partial(self._report_problem, trainer)
            run_state.restore_outside(trainer, session, self._rank_state(trainer), report)
            if self._was_saved_between_epochs:
                session.restore_numbers(self._position(trainer).epoch)
        start()

    def _keep_and_end(
        self,
        session: TrainerSession,
        recorder: TrainerRecorder,
        trainer: "Trainer",
        end: Callable[[], None],
    ) -> None:
        if exactness.is_cut_by_max_steps(trainer):
            recorder.reduce_loss(trainer)
            self._cut = self._capture(trainer, session, recorder)
        end()

    def _reset_epoch(self, trainer: "Trainer", reset: Callable[[], None]) -> None:
        with catch_warnings():
            if self._resumed is not None and not self._reasons:
                # Lightning cannot resume these loaders; the loader control can.
                filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            reset()

    def _start_batches(
        self, session: TrainerSession, trainer: "Trainer", start: Callable[..., None], *args: Any
    ) -> None:
        between = self._was_saved_between_epochs
        if makes_iterator_again(trainer):
            session.restart_epoch(trainer.current_epoch)
        elif trainer.current_epoch and between and draws_when_iterated(trainer):
            session.restart_epoch(trainer.current_epoch)
            iterate_again(trainer, self._loader_states)
        self._loader_states = []
        start(*args)
        if self._resumed is not None and exactness.is_at_end(trainer):  # a batch may be fetched
            session.restore_numbers(self._resumed.position.epoch)
        # Otherwise Lightning skips the schedulers at the end of the epoch.
        lightning_private.clear_restart(trainer.fit_loop)
        if self._at_end:
            self._at_end = False
            finish_last_batch(trainer)
        self._restore(trainer)

    def _end_batch(self, trainer: "Trainer", end: Callable[..., None], *args: Any) -> None:
        self._find_late_changes(trainer)
        end(*args)

    def _find_late_changes(self, trainer: "Trainer") -> None:
        """Report what has changed since a checkpoint was saved in this batch or validation."""
        names = self._saved.find(self._parts(trainer))
        self._saved.forget()
        if names and not self._late:
            self._late = [describe_hook(names)]
            exactness.report_late(self._late[0], raises=self._on_inexact == "raise_early")

    def _load_training(
        self, session: TrainerSession, trainer: "Trainer", load: Callable[[], None]
    ) -> None:
        load()
        session.keep_iterated()

    def _load_validation(
        self, session: TrainerSession, trainer: "Trainer", load: Callable[[], None]
    ) -> None:
        load()
        loop = trainer.fit_loop.epoch_loop.val_loop
        if lightning_private.has_loaders(loop) and self._unvalidated is not None:
            rank, self._unvalidated = self._unvalidated, None
            run_state.restore_validation(trainer, session, rank)

    def _run_validation(self, trainer: "Trainer", run: Callable[[], object]) -> object:
        if not trainer.sanity_checking:
            self._before_evaluation = run_state.capture_rng_and_metrics(
                trainer, self._parts(trainer), "validation"
            )
            self._validated.note(trainer, self._parts(trainer))
        outputs = run()
        self._find_late_changes(trainer)
        self._validated.forget()
        self._before_evaluation = None  # after an exception a checkpoint may still need it
        return outputs

    def _resume_loader(self, trainer: "Trainer", session: TrainerSession, loader: object) -> None:
        # `estimated_stepping_batches` loads the data before Lightning restores its progress.
        early = not lightning_private.has_loaded_progress(trainer)
        if early and self._resumed is None:
            return
        position = self._position(trainer)
        if position.batch and not early and not exactness.is_at_end(trainer):
            self._report_problem(trainer, find_position_problem(loader))
        session.resume_loaders(
            position.epoch,
            position.batch,
            # Called when the loaders are iterated: Lightning sets their mode later.
            lambda: lightning_private.cycles_shorter_loaders(trainer),
            self._rank_state(trainer).samplers,
        )

    def end_epoch(self, trainer: "Trainer") -> None:
        """Check the length of an epoch; every rank calls this before an epoch is recorded.

        Raises:
            InexactResumeError: A loader began the epoch after the resumed one at the position of
                the checkpoint, unless ``on_inexact="warn"``.
        """
        if self._epoch_length is not None:
            problem = self._epoch_length.end_epoch(trainer)
            if self._epoch_length.is_checked:
                self._epoch_length = None
            self._raise_or_warn_on_all_ranks(trainer, [problem] if problem else [])

    def begin(self, trainer: "Trainer", recorder: TrainerRecorder) -> None:
        """Continue the ledger of the interrupted run; called before training starts."""
        self._has_begun = True
        if self._resumed is None and not self._reasons:
            exactness.report_unresumable(trainer, raises=self._on_inexact == "raise_early")
            return
        position, rank = self._position(trainer), self._rank_state(trainer)
        if (resumed := self._resumed) is not None:
            if problem := exactness.find_lost_progress(trainer, position):
                self._raise_or_warn(trainer, [problem])
            run_state.restore_frozen(trainer, resumed.settings)
            if resumed.fits(trainer.world_size, get_logical_ranks(trainer)):
                problems = ranks_of(trainer).raise_on_all(
                    lambda: self._find_unmatched(trainer, rank)
                )
                self._raise_or_warn_on_all_ranks(trainer, problems)
        ledger = rank.ledger or SavedLedger("", "")
        recorder.resume(
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

    def _restore(self, trainer: "Trainer") -> None:
        """Restore the generators of training, as late as possible before the next batch."""
        if not self._has_begun:
            return
        if self._resumed is not None and self._resumed.position.phase != "epoch":
            report = partial(self._report_problem, trainer)
            run_state.restore_within(trainer, self._rank_state(trainer), report)
        self._resumed = None

    def _parts(self, trainer: "Trainer") -> ModelParts:
        if self._model is None:
            self._model = ModelParts(trainer.lightning_module)
        return self._model

    def _position(self, trainer: "Trainer") -> LoopPosition:
        return find_position(trainer) if self._resumed is None else self._resumed.position

    @property
    def _was_saved_between_epochs(self) -> bool:
        return self._resumed is not None and self._resumed.position.phase == "epoch"

    def _rank_state(self, trainer: "Trainer") -> SavedRank:
        if self._resumed is None:
            return SavedRank()
        ranks, logical_ranks = trainer.world_size, get_logical_ranks(trainer)
        return self._resumed.of_rank(trainer.global_rank, ranks, logical_ranks)

    def _capture(
        self, trainer: "Trainer", session: TrainerSession, recorder: TrainerRecorder
    ) -> SavedState:
        """Return the state of the run, with the state of this rank alone."""
        position = find_position(trainer)
        user = self._before_evaluation if position.phase == "validation" else None
        user = user or run_state.capture_rng_and_metrics(
            trainer, self._parts(trainer), position.phase
        )
        late = self._late if position.phase == "batch" else []
        if position.phase == "validation" and (names := self._validated.find(self._parts(trainer))):
            late = [describe_validation(names)]
        ledger = recorder.ledger_position
        rank = replace(
            run_state.capture(trainer, session.capture_rng(), user),
            samplers=session.capture_samplers(position.phase),
            inexact=exactness.find_missing_state(trainer, position, user.left_out) + late,
            ledger=None if ledger is None else SavedLedger(**ledger),
            pending=recorder.pending,
        )
        return SavedState(
            seed=session.settings.seed,
            fit=session.fit,
            settings=exactness.describe_settings(trainer, session)
            | run_state.capture_frozen(self._parts(trainer)),
            world_size=trainer.world_size,
            position=position,
            ranks=[rank],
        )

    def _find_unmatched(self, trainer: "Trainer", rank: SavedRank) -> list[str]:
        """Return why the generators and metrics of this rank cannot be restored."""
        problems = exactness.describe_unmatched_state(run_state.find_unmatched_state(trainer, rank))
        reloaded = run_state.find_reloaded_generators(trainer, rank, self._position(trainer).epoch)
        return problems + exactness.describe_reloaded_generators(reloaded)

    def _raise_or_warn_on_all_ranks(self, trainer: "Trainer", problems: list[str]) -> None:
        """Raise or warn on all ranks of the problems that any of them has found."""
        rows = ranks_of(trainer).gather_bytes(json.dumps(problems).encode())
        if found := list(dict.fromkeys(problem for row in rows for problem in json.loads(row))):
            self._raise_or_warn(trainer, found)

    def _report_problem(self, trainer: "Trainer", problem: str | None) -> None:
        if problem is not None and problem not in self._reasons:
            self._raise_or_warn(trainer, [problem])

    def _raise_or_warn(self, trainer: "Trainer", problems: list[str]) -> None:
        self._reasons += problems
        if self._recorder is not None:
            self._recorder.add_reasons(trainer, problems)  # if its ledger is open
        listed = "\n".join(f"- {problem}" for problem in problems)
        text = (
            f"This run cannot be resumed exactly from the checkpoint:\n{listed}\n"
            "To resume anyway, with a break that the ledger records, pass "
            'DeterminismCallback(on_inexact_resume="warn").'
        )
        if self._on_inexact != "warn":
            raise InexactResumeError(text, reasons=problems)
        if trainer.is_global_zero:
            warn(text, stacklevel=2)
