"""One fit that may resume from a checkpoint: what is restored, and when."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from warnings import catch_warnings, filterwarnings, warn

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.control.data.data_state import list_logged, list_unsaved
from lightning_d9m.control.data.resumable_sampler import find_epoch_problem, find_loader_problems
from lightning_d9m.control.seeding import find_lost_devices
from lightning_d9m.errors import InexactResumeError
from lightning_d9m.hashing.training_state import ModelTensors
from lightning_d9m.ledger.format.records import Resume
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.checkpoint_io import add_manifests
from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.lightning.recording.trainer_recorder import TrainerRecorder
from lightning_d9m.lightning.resume import exactness, program_state, run_state
from lightning_d9m.lightning.resume.exactness import name_all
from lightning_d9m.lightning.resume.program_state import Captured, ProgramState
from lightning_d9m.lightning.saved_state import (
    CALLBACKS,
    KEY,
    LoopPosition,
    SavedLedger,
    SavedRank,
    SavedState,
    find_state,
)
from lightning_d9m.lightning.strategies import is_sharded
from lightning_d9m.lightning.trainer_attributes import (
    Trainer,
    get_logical_ranks,
    list_schedulers,
    ranks_of,
)
from lightning_d9m.lightning.trainer_session import TrainerSession
from lightning_d9m.state.plain_data import decode_plain, encode_plain, pack_bytes, unpack_bytes

InexactResumeAction = Literal["raise", "warn"]


# The key, among the state of the program, of what hooks change in the Trainer.
_HOOKS = "hooks"


class _Moment(NamedTuple):
    """State that may not change from one moment to another.

    Attributes:
        digests: Those of the tensors of the model, and at a cut of the states of callbacks.
        program: The program's objects; None if they may change.
        reset: The beginnings of the paths of metrics that Lightning is about to reset.
        logged: How often each value of the epoch was logged; None if more may be.
    """

    digests: dict[str, str]
    program: Captured | None = None
    reset: tuple[str, ...] = ()
    logged: dict[str, int] | None = None


class ResumableFit:
    """Captures and restores the state of one fit, with wrappers around methods of its loops.

    See ``CheckpointState`` for ``on_inexact``.
    """

    def __init__(
        self,
        trainer: Trainer,
        session: TrainerSession,
        recorder: TrainerRecorder,
        on_inexact: InexactResumeAction,
    ) -> None:
        self._trainer, self._session, self._recorder = trainer, session, recorder
        self._on_inexact = on_inexact
        self._patches = AttributePatches()
        self._at_end = False
        # The state that is resumed, and that of this rank, until the first batch.
        self._resumed: SavedState | None = None
        self._rank = SavedRank()
        # Where training began, where `max_steps` ended the fit, after a save, before a validation.
        self._first = _Moment({})
        self._at_cut: _Moment | None = None
        self._saved: _Moment | None = None
        self._validated: _Moment | None = None
        self._late: list[str] = []
        self._has_begun = False  # not yet, while a callback searches for a learning rate
        self._reasons: list[str] = []
        self._unvalidated: SavedRank | None = None
        self._before_evaluation: tuple[SavedRank, Captured] | None = None
        self._loader_states: list[dict[str, Any]] = []
        self._parts = ModelTensors(trainer.lightning_module)
        self._has_settled = False
        self._captured: Captured = ({}, [])
        # The numbers of batches of the epochs since a loader has loaded its state.
        self._lengths: list[int] | None = None
        self._skipped = 0
        # The state where `max_steps` ended the fit, before the end of the epoch.
        self._cut: SavedState | None = None
        self._options: dict[str, Any] = {}
        self._schedulers: list[object] = []
        self._told: set[str] = set()

    def wrap_loops(self) -> None:
        """Wrap the methods of the loops, until ``release``."""
        fit = self._trainer.fit_loop
        epoch_loop, val_loop = fit.epoch_loop, fit.epoch_loop.val_loop
        wrappers: list[tuple[Any, str, Callable[..., object]]] = [
            (self._trainer.strategy, "load_model_state_dict", self._load_weights),
            (self._trainer.strategy, "save_checkpoint", self._write),
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
        self._tell(state.ranks[0])
        if state.position.phase == "batch":
            reset = tuple(f"model.{name}." for name in state.ranks[0].reset)
            logged = run_state.count_logged(self._trainer)
            self._saved = _Moment(self._digest(), self._captured, reset, logged)
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
        settings = exactness.describe_settings(trainer, self._session)
        if problems := exactness.find_resume_problems(state, trainer, settings):
            self._raise_or_warn(problems)
        self._resumed = state
        if state.position.phase == "cut" and not exactness.reaches_max_steps(
            trainer, state.position.step
        ):
            run_state.reopen_epoch(checkpoint)
        place = trainer.world_size, get_logical_ranks(trainer)
        rank = self._rank = state.of_rank(trainer.global_rank, *place)
        if state.fits(*place):
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
                run_state.drop_consumed_states(trainer)
            self._loader_states = lightning_private.list_pending_loader_states(trainer)
            if self._resumed is not None and any(self._loader_states):
                self._lengths = [] if self._position.batch else [0]
                self._skipped = self._position.batch
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
        latest, device = self._rank.callback_metrics, self._trainer.strategy.root_device
        moved = {name: value.to(device, copy=True) for name, value in latest.items()}
        lightning_private.update_callback_metrics(self._trainer, moved)
        self._at_end = run_state.finish_pending_work(self._trainer, self._position, reset)

    @cached_property
    def _program(self) -> ProgramState:
        """The state of the program's objects, compared with what it was at first."""
        return ProgramState(self._trainer, self._parts)

    def _digest(self, *, callbacks: bool = False) -> dict[str, str]:
        found = program_state.digest_tensors(self._trainer, self._parts)
        return found | (program_state.digest_callbacks(self._trainer) if callbacks else {})

    def _find_changed(self, since: _Moment | None, *, callbacks: bool = False) -> list[str]:
        """Return the names of what has changed since a moment."""
        if since is None:
            return []
        now = self._digest(callbacks=callbacks)
        names = [name for name, digest in since.digests.items() if now.get(name) != digest]
        if since.program is not None:
            changed = program_state.find_changed(since.program, self._program.capture())
            names += [path for path in changed if not path.startswith(since.reset)]
        if since.logged is not None:
            counts = run_state.count_logged(self._trainer).items()
            names += [name for name, count in counts if since.logged.get(name) != count]
        return names

    def _restore_and_start(self, start: Callable[[], None]) -> None:
        # After `on_train_start`, where modules reset their metrics.
        if self._has_begun and not self._has_settled:
            self._has_settled = True
            self._program.settle()
        if self._resumed is not None and self._has_begun:
            self._trainer.__dict__.update(self._read_hooks().get("options", {}))
            missing = self._program.restore(self._rank.program, self._rank.reset)
            self._raise_or_warn_on_all_ranks(name_all(exactness.MISSING_OBJECTS, missing))
            run_state.restore_outside(
                self._trainer, self._session, self._rank, self._report_problems
            )
            if self._was_saved_between_epochs:
                self._session.loaders.restore_data("train", self._position.epoch)
        start()

    def _keep_and_end(self, end: Callable[[], None]) -> None:
        if exactness.is_cut_by_max_steps(self._trainer):
            self._recorder.reduce_loss(self._trainer)
            self._cut = self.capture()
            self._at_cut = _Moment(self._digest(callbacks=True), self._program.capture())
        end()

    def _reset_epoch(self, reset: Callable[[], None]) -> None:
        with catch_warnings():
            if self._resumed is not None and not self._reasons:
                # Lightning cannot resume these loaders; the loader control can.
                filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            reset()

    def _start_batches(self, start: Callable[..., None], *args: Any, **words: Any) -> None:
        trainer, session = self._trainer, self._session
        between = self._was_saved_between_epochs
        if run_state.makes_iterator_again(trainer):
            session.loaders.restart_epoch("train", trainer.current_epoch)
        elif trainer.current_epoch and between and run_state.draws_when_iterated(trainer):
            session.loaders.restart_epoch("train", trainer.current_epoch)
            run_state.iterate_again(trainer, self._loader_states)
        self._loader_states = []
        start(*args, **words)
        if self._resumed is not None and exactness.is_at_end(trainer):  # a batch may be fetched
            session.loaders.restore_data("train", self._resumed.position.epoch)
        # Otherwise Lightning skips the schedulers at the end of the epoch.
        lightning_private.clear_restart(trainer.fit_loop)
        if self._at_end:
            self._at_end = False
            # It repeats nothing of the last batch, and ends at once if no batch is left.
            lightning_private.clear_restart(trainer.fit_loop.epoch_loop)
        # The generators of training, as late as possible before the next batch.
        if self._has_begun:
            if self._resumed is not None:
                self._start_schedules()
            if self._resumed is not None and self._resumed.position.phase != "epoch":
                self._program.restore(self._rank.program, self._rank.reset)
                run_state.restore_within(trainer, self._rank, self._report_problems)
            self._resumed, self._rank = None, SavedRank()

    def _start_schedules(self) -> None:
        """Set up the options and schedulers that callbacks change when an epoch starts."""
        hooks, trainer = self._read_hooks(), self._trainer
        if not self._was_saved_between_epochs:
            run_state.start_schedules(trainer, hooks.get("starters", ()))
            trainer.__dict__.update(hooks.get("options", {}))
        names = [type(own).__name__ for own in list_schedulers(trainer)]
        saved = hooks.get("schedulers", names)
        if saved != names and not lightning_private.skips_backward(trainer):
            texts = [", ".join(part) or "none" for part in (saved, names)]
            self._report_problems([exactness.OTHER_SCHEDULERS.format(*texts)])

    def _read_hooks(self) -> dict[str, Any]:
        """Return what ``_capture_hooks`` has saved."""
        data = self._rank.program.get(_HOOKS)
        return {} if data is None else decode_plain(unpack_bytes(data))

    def _capture_hooks(self) -> dict[str, Any]:
        """Return what hooks have changed in the Trainer since the fit began."""
        trainer, now = self._trainer, run_state.read_options(self._trainer)
        changed = {name: own for name, own in now.items() if self._options.get(name, own) != own}
        schedulers = list_schedulers(trainer)
        replaced = any(own not in self._schedulers for own in schedulers)
        if not self._has_begun or not (changed or replaced):
            return {}
        return {
            "options": changed,
            "starters": run_state.find_starters(trainer, self._schedulers),
            "schedulers": [type(own).__name__ for own in schedulers],
        }

    def _end_batch(self, end: Callable[..., None], *args: Any, **words: Any) -> None:
        self._find_late_changes()
        end(*args, **words)

    def _find_late_changes(self) -> None:
        """Report what has changed since a checkpoint was saved in this batch or validation."""
        names = self._find_changed(self._saved)
        self._saved = None
        if names and not self._late:
            self._late = [exactness.LATE_HOOK.format(names[0])]
            exactness.report("The checkpoint that was just saved", self._late)

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
        self._validated = _Moment(self._digest())
        outputs = run()
        self._find_late_changes()
        self._validated = None
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
            self._report_problems(find_loader_problems(loader, within=True))
        self._session.resume_loaders(
            position.epoch,
            position.batch,
            # Called when the loaders are iterated: Lightning sets their mode later.
            lambda: lightning_private.cycles_shorter_loaders(trainer),
            self._rank.samplers,
        )

    def end_epoch(self) -> None:
        """Check the length of an epoch; every rank calls this before an epoch is recorded.

        Some loaders apply the state that they load in every later epoch: a Hugging Face
        ``IterableDataset`` whose ``set_epoch`` is not called, litData's ``StreamingDataLoader``
        0.2.76. The epoch after the resumed one then lacks the batches that preceded the checkpoint.

        Raises:
            InexactResumeError: A loader began the epoch after the resumed one at the position of
                the checkpoint, unless ``on_inexact="warn"``.
        """
        if self._lengths is None:
            return
        trainer, problems = self._trainer, []
        self._lengths.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        if len(self._lengths) > 1:
            before, after = self._lengths
            self._lengths = None
            if after == before - self._skipped:
                earlier = f", and the epoch before {before}" if self._skipped else ""
                found = exactness.REPEATED_START.format(trainer.current_epoch, after, earlier)
                problems.append(found)
        self._raise_or_warn_on_all_ranks(problems)

    def begin(self) -> None:
        """Continue the ledger of the interrupted run; called before training starts."""
        self._has_begun = True
        trainer = self._trainer
        self._first = _Moment(self._digest())
        self._options = run_state.read_options(trainer)
        self._schedulers = list_schedulers(trainer)
        if self._resumed is None and not self._reasons:
            return
        position, rank = self._position, self._rank
        if (resumed := self._resumed) is not None:
            if (step := trainer.global_step) != position.step:
                problem = exactness.LOST_PROGRESS.format(step, position.step)
                self._report_problems([problem])
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
        return (
            run_state.find_position(self._trainer)
            if self._resumed is None
            else self._resumed.position
        )

    @property
    def _was_saved_between_epochs(self) -> bool:
        return self._resumed is not None and self._resumed.position.phase == "epoch"

    def capture(self, checkpoint: Mapping[str, Any] = MappingProxyType({})) -> SavedState:
        """Return the state of the run, with the state of this rank alone.

        ``checkpoint`` is what is being saved, which may hold large values already.
        """
        if self._cut is not None:
            return self._add_changes_since_cut(self._cut)
        trainer, session = self._trainer, self._session
        position = run_state.find_position(trainer)
        before = self._before_evaluation
        user, program = (
            before
            if before is not None and position.phase == "validation"
            else run_state.capture_user_state(trainer, position.phase, self._program)
        )
        self._captured = program
        if trainer.validating and before is not None:
            program = program_state.keep_modes(program, before[1])
        kept, reasons = program_state.keep_small(program, checkpoint)
        late = self._late if position.phase == "batch" else []
        if position.phase == "validation" and (names := self._find_changed(self._validated)):
            late = [exactness.IN_VALIDATION.format(names[0])]
        ledger = self._recorder.run.ledger_position
        samplers = session.capture_samplers(position.phase)
        reasons += list_unsaved(samplers)
        if hooks := self._capture_hooks():
            kept[_HOOKS] = pack_bytes(encode_plain(hooks))
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
            settings=exactness.describe_settings(trainer, session)
            | run_state.capture_frozen(self._parts),
            world_size=trainer.world_size,
            position=position,
            ranks=[rank],
        )

    def _tell(self, saved: SavedRank) -> None:
        """Log, once each, why a checkpoint cannot be resumed exactly, and what it does not hold."""
        if new := [text for text in saved.inexact if text not in self._told]:
            exactness.report("The checkpoint that is being saved", new)
        logged = [exactness.NOT_HELD.format(path) for path in list_logged(saved.samplers)]
        for text in logged:
            if text not in self._told:
                rank_zero().rank_zero_info(text)
        self._told.update(new, logged)

    def _add_changes_since_cut(self, cut: SavedState) -> SavedState:
        """Return the state at the cut, with a reason if hooks have changed anything since."""
        trainer, (rank,) = self._trainer, cut.ranks
        names = self._find_changed(self._at_cut, callbacks=True)
        if not names:
            return cut
        then = exactness.CUT.format(names[0])
        reason = exactness.describe_unfinished(trainer, cut.position.epoch, "max_steps", then)
        return replace(cut, ranks=[replace(rank, inexact=[*rank.inexact, reason])])

    def _write(self, save: Callable[..., Any], checkpoint: Any, *args: Any, **words: Any) -> Any:
        self.name_lost(checkpoint)
        return save(checkpoint, *args, **words)

    def name_lost(self, checkpoint: Mapping[str, Any]) -> None:
        """Note in the state of a checkpoint that is about to be written which weights it lacks.

        Other callbacks, and the module, may have taken them out.
        """
        state = find_state(checkpoint)
        trainer = self._trainer
        if state is not None and trainer.is_global_zero and not is_sharded(trainer.strategy):
            lost = program_state.find_lost(self._parts, checkpoint)
            changed = self._find_changed(self._first) if lost else []
            known = self._first.digests
            names = [name for name in lost if name in changed or name not in known]
            reasons = [exactness.LOST_TENSOR.format(name) for name in names[:1]]
            state["ranks"][0]["inexact"] += reasons

    def _find_unmatched(self, rank: SavedRank) -> list[str]:
        """Return why the generators of this rank cannot be restored."""
        trainer = self._trainer
        unmatched = run_state.find_unmatched_state(trainer, rank)
        reloaded = run_state.find_reloaded_generators(trainer, rank, self._position.epoch)
        return [
            *name_all(exactness.UNMATCHED_GENERATORS, unmatched),
            *name_all(exactness.RELOADED, reloaded),
            *([] if rank.rng is None else find_lost_devices(rank.rng)),
        ]

    def _raise_or_warn_on_all_ranks(self, problems: list[str]) -> None:
        """Raise or warn on all ranks of the problems that any of them has found."""
        rows = ranks_of(self._trainer).gather_json(problems)
        if found := list(dict.fromkeys(problem for row in rows for problem in row)):
            self._raise_or_warn(found)

    def _report_problems(self, problems: Sequence[str]) -> None:
        if new := [problem for problem in problems if problem not in self._reasons]:
            self._raise_or_warn(new)

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
        on_inexact: ``"raise"`` or ``"warn"`` if a run cannot be resumed exactly.
    """

    def __init__(self, on_inexact: InexactResumeAction = "raise") -> None:
        self._on_inexact = on_inexact
        self._fit: ResumableFit | None = None
        # The state of a run that has ended, for later checkpoints; whether it has all ranks.
        self._ended: SavedState | None = None
        self._ended_on_all_ranks = False
        self._name_lost: Callable[[Mapping[str, Any]], object] = bool

    def __getstate__(self) -> dict[str, Any]:
        return vars(CheckpointState(self._on_inexact))

    def attach(self, trainer: Trainer, session: TrainerSession, recorder: TrainerRecorder) -> None:
        """Prepare a fit for a checkpoint that it may resume from; called before that is loaded."""
        self._ended = None
        if session.stage == "fit":
            fit = self._fit = ResumableFit(trainer, session, recorder, self._on_inexact)
            self._name_lost = fit.name_lost
            session.resume(fit.resume_loader, self._detach)
            fit.wrap_loops()

    def _detach(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.release()

    def keep(self, trainer: Trainer, *, ended: bool) -> None:
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

    def save(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Add the state to a checkpoint. Every rank calls this, unless the run has ended."""
        if self._fit is not None:
            state = run_state.gather_ranks(trainer, self._fit.save(checkpoint))
        elif self._ended is not None:
            state = self._ended
            if not self._ended_on_all_ranks:
                state = run_state.gather_ranks(trainer, state)
            # No session is open that does so.
            add_manifests(trainer, once=True, before=self._name_lost)
        else:  # a Trainer that has not trained
            return
        checkpoint.setdefault(CALLBACKS, {})[KEY] = state.as_plain()

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
