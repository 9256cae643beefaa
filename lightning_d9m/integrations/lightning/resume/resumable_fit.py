"""One fit that may resume from a checkpoint: what is restored, when, and why it is not exact.

The run that saves a checkpoint knows some of the reasons and stores them in it; the run that loads
it finds the others.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from types import MappingProxyType
from typing import Any
from warnings import catch_warnings, filterwarnings, warn

from msgspec.structs import replace

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.engine.control.data.data_state import (
    CHANGES,
    DATA,
    list_logged,
    list_unknown,
    list_unsaved,
)
from lightning_d9m.engine.control.data.loaders import find_epoch_problem, find_loader_problems
from lightning_d9m.engine.control.seeding import find_lost_devices, rng_restored
from lightning_d9m.engine.hashing.shards import find_hybrid_sharding
from lightning_d9m.engine.hashing.training_state import ModelTensors
from lightning_d9m.engine.ledger.format.records import Resume
from lightning_d9m.engine.recording.resume_check import can_be_checked
from lightning_d9m.engine.state.plain_data import (
    decode_plain,
    encode_plain,
    pack_bytes,
    unpack_bytes,
)
from lightning_d9m.engine.state.state import find_generators, search
from lightning_d9m.errors import InexactResumeError
from lightning_d9m.integrations.lightning.resume import run_state
from lightning_d9m.integrations.lightning.resume.run_state import MODE, Captured, ProgramState
from lightning_d9m.integrations.lightning.saved_state import (
    CALLBACKS,
    EMPTY_RANK,
    FROZEN,
    GROUPS,
    LIMITS,
    LOGICAL_RANKS_KEY,
    STOPPED,
    VALIDATION,
    LoopPosition,
    SavedRank,
    SavedState,
    add_manifests,
    find_state,
)
from lightning_d9m.integrations.lightning.trainer_recorder import TrainerRecorder
from lightning_d9m.integrations.lightning.trainer_session import TrainerSession
from lightning_d9m.integrations.strategies.strategies import is_sharded
from lightning_d9m.integrations.trainer import lightning_private
from lightning_d9m.integrations.trainer.packages import rank_zero
from lightning_d9m.integrations.trainer.trainer_attributes import (
    KEY,
    Trainer,
    get_logical_ranks,
    list_schedulers,
    name_callbacks,
    ranks_of,
)
from lightning_d9m.text import pluralize

_Find = Callable[[], list[str]]


# The key, among the state of the program, of what hooks change in the Trainer.
_HOOKS = "hooks"
# The settings that select the random streams, the data or how sums are rounded, and what follows if
# they differ. (The others change speed, or are in the ledger.)
_RANKS = "world_size"
_COMPARED = {
    "seed": "",
    "per_sample_rng": "",
    LOGICAL_RANKS_KEY: ", so the ranks get different data",
    _RANKS: ", so the ranks get different data",
    "threads": ", which round differently: pass DeterminismCallback(threads=...)",
}

_ENDED = (
    "The fit that saved the checkpoint had ended there by trainer.should_stop, as EarlyStopping "
    "ends it"
)
_FINISHED = (
    f"{_ENDED}, so this one is finished, too. To train longer, pass "
    'DeterminismCallback(on_inexact_resume="warn").'
)
_LONGER = f"{_ENDED}, and this one trains longer."
_STOPPING = (
    "The checkpoint was saved after trainer.should_stop was set, before the validation and the end "
    "of the epoch that follow. Use one that was saved there."
)
_OTHER_GROUPS = (
    "The checkpoint was saved with other parameters in the groups of the optimizer {} ({} and {} "
    "of them), whose state would go to the wrong ones. Make the groups of the same parameters."
)
_CUT = "hooks at the end of the epoch or the fit changed {}, where a longer fit"
_LOST_TENSOR = (
    "The checkpoint lacks {!r}, which changes in the fit, as that of ModelPruning lacks the masks "
    "of pruned weights, which would be trained again. Save all weights and buffers that change."
)
_LATE_HOOK = (
    "A hook that runs after the checkpoint is saved, such as the module's on_train_batch_end, "
    "changes {}, and a resumed run does not call it again. Do it in a callback's "
    "on_train_batch_end, or save checkpoints at the end of an epoch."
)
_IN_VALIDATION = (
    "The checkpoint was saved within a validation that had changed {}, and a resumed run begins "
    "the validation again. Use one that was saved before it or after it."
)
_WITHOUT_STEPS = (
    "It was saved in an epoch that trains nothing, in which StochasticWeightAveraging only reads "
    "the statistics of batch normalization, and a resumed run would train that epoch. Use one that "
    "was saved at the end of an epoch."
)
_OTHER_SCHEDULERS = (
    "The checkpoint was saved with the learning rate schedulers {}, and this run has {}. A "
    "callback that replaces one in on_train_epoch_start must keep it in an attribute; one that "
    "does so in another hook must do it again when it is resumed."
)
_NOT_HELD = (
    "{} changes while samples are read, and a checkpoint does not hold it. A resumed run begins "
    "without it; if samples depend on what it holds, they differ."
)
_UNKNOWN = (
    "Nothing can read {0}, so it may change in the fit unseen, and the resumed run cannot be "
    "compared with the steps after the checkpoint. Keep its position in a number; or if the "
    "training does not depend on it, pass DeterminismCallback(accepted_unknown={0!r})."
)
_EXPECTED = (
    "{} changes in the fit, and has no form that a checkpoint could keep, unless the program saves "
    "and loads it itself, as in on_load_checkpoint."
)
_CHECKED = (
    "Nothing can read {}. The first steps of the resumed run are compared with those of the run "
    "that saved the checkpoint."
)
_UNMATCHED_GENERATORS = (
    "These generators are only in the checkpoint, or only in this run: {}. Create them before "
    "training starts, as in the run that saved the checkpoint."
)
_MISSING_OBJECTS = (
    "The checkpoint holds values of objects that this run lacks, or that take others: {}. Create "
    "them before training starts, as in the run that saved the checkpoint."
)
_RELOADED = (
    "The loaders are loaded again for the epoch that is resumed "
    "(reload_dataloaders_every_n_epochs), and their datasets, samplers or datamodule keep "
    "generators, or values that change: {}. Whether these go on or start again is not known. Keep "
    "generators in the module or the datamodule, or draw from those of Python, NumPy or torch; "
    "take the epoch from set_epoch()."
)
_LOST_PROGRESS = (
    "The fit begins at step {}, and the checkpoint was saved at step {}: a callback such as "
    "LearningRateFinder or BatchSizeFinder has loaded a checkpoint since, and Lightning forgets "
    "the first one then. Resume without that callback."
)
_REPEATED_START = (
    "Epoch {} had {} batches{}: its loader began at the position that it has from the checkpoint. "
    "Call the dataset's set_epoch() when an epoch starts, if it has one; or save checkpoints at "
    "the end of an epoch, and load with a loader that has no state_dict()."
)


class CheckpointState:
    """Saves and restores the state of one callback's fits, one after the other.

    Args:
        accepted: Patterns of the paths of objects that nothing can read, and that steer nothing.
    """

    def __init__(self, accepted: Sequence[str] = ()) -> None:
        self._accepted = accepted
        self._is_open = False
        # The state of a run that has ended, for later checkpoints; whether it has all ranks.
        self._ended: SavedState | None = None
        self._ended_on_all_ranks = False
        # Restores the strategy, even if a save after a run fails before it writes its checkpoint.
        self._manifests = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        return vars(CheckpointState(self._accepted))

    def attach(self, trainer: Trainer, session: TrainerSession, recorder: TrainerRecorder) -> None:
        """Prepare a fit for a checkpoint that it may resume from; called before that is loaded."""
        self._ended = None
        self._manifests.close()
        if session.stage != "fit":
            return
        self._is_open = True
        self._trainer, self._session, self._recorder = trainer, session, recorder
        self._program_state: ProgramState | None = None
        self._patches = AttributePatches()
        self._parts = ModelTensors(trainer.lightning_module)
        # The state that is resumed, and that of this rank, until the first batch.
        self._resumed: SavedState | None = None
        self._rank = EMPTY_RANK
        self._unvalidated: SavedRank | None = None
        self._loader_states: list[dict[str, Any]] = []
        self._at_end = False
        self._reasons: list[str] = []
        # The numbers of batches of the epochs since a loader has loaded its state.
        self._lengths: list[int] | None = None
        self._skipped = 0
        # They name what has changed since training began, where `max_steps` ended the fit, after a
        # save, and in a validation.
        self._find_trained: _Find = list
        self._find_changed_since_cut: _Find = list
        self._find_late: _Find = list
        self._find_validated: _Find = list
        self._has_begun = False  # not yet, while a callback searches for a learning rate
        self._has_settled = False
        self._schedulers: list[object] = []
        self._before_evaluation: dict[str, Any] | None = None
        self._captured: Captured = {}
        # The state where `max_steps` ended the fit, before the end of the epoch.
        self._cut: SavedState | None = None
        self._stops = False  # before its next batch, as the fit that saved the checkpoint
        self._limits: dict[str, Any] = {}
        self._is_dumping = False
        self._awaits_dump = False  # the checkpoint that is being collected gets our state
        self._late: list[str] = []
        self._told: set[str] = set()
        self._manifests = add_manifests(trainer, self._name_lost)
        session.resume(self._resume_loader, self._release)
        self._wrap_loops(trainer)

    def _wrap_loops(self, trainer: Trainer) -> None:
        """Wrap the methods of the loops, until the run is closed."""
        fit = trainer.fit_loop
        epoch_loop, val_loop = fit.epoch_loop, fit.epoch_loop.val_loop
        wrappers: list[tuple[Any, str, Callable[..., object]]] = [
            (trainer.strategy, "load_model_state_dict", self._load_weights),
            (trainer.strategy, "load_optimizer_state_dict", self._load_optimizers),
            (lightning_private.get_checkpoint_connector(trainer), "dump_checkpoint", self._dump),
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

    def _release(self) -> None:
        self._is_open = False
        self._manifests.close()
        self._patches.undo()

    def keep(self, trainer: Trainer, *, ended: bool) -> None:
        """Keep the state of a run that is about to end, for checkpoints that are saved later.

        Args:
            trainer: The Trainer.
            ended: Whether the fit finished. Then every rank calls this, and rank 0 gathers the
                state now, because other ranks may have exited by the next save. Otherwise rank 0
                gathers it when a checkpoint is saved.
        """
        if self._is_open:
            state = self._capture()
            self._ended = run_state.gather_ranks(trainer, state) if ended else state
            self._ended_on_all_ranks = ended

    def save(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Add the state to a checkpoint. Every rank calls this, unless the run has ended."""
        if self._is_open and self._is_dumping:
            self._awaits_dump = True  # the hooks of the module and of other callbacks follow
            return
        if self._is_open:
            self._recorder.reduce_loss(trainer)
            state = self._capture(checkpoint)
            (saved,) = state.ranks
            # Log once each reason, and each object that the checkpoint does not hold.
            expected = map(_EXPECTED.format, self._program.expected)
            if new := [text for text in (*saved.inexact, *expected) if text not in self._told]:
                _report("The checkpoint that is being saved", new)
            logged = [_NOT_HELD.format(path) for path in list_logged(saved.samplers)]
            for text in logged:
                if text not in self._told:
                    rank_zero().rank_zero_info(text)
            self._told.update(new, logged)
            if state.position.phase == "batch":
                reset = tuple(f"model.{name}." for name in saved.reset)
                self._find_late = self._remember(
                    run_state.count_logged, program=self._captured, reset=reset
                )
            self._recorder.run.note_save(trainer.global_step)
            state = run_state.gather_ranks(trainer, state)
        elif self._ended is not None:
            state = self._ended
            if not self._ended_on_all_ranks:
                state = run_state.gather_ranks(trainer, state)
            self._manifests.close()
            self._manifests = add_manifests(trainer, self._name_lost, once=True)
        else:  # a Trainer that has not trained
            return
        checkpoint.setdefault(CALLBACKS, {})[KEY] = state.as_plain()

    def _dump(self, dump: Callable[..., dict[str, Any]], *args: Any, **words: Any) -> Any:
        """Add the state that hooks leave which save; what they draw does not change the training.

        A fit that saves more often would otherwise train on other numbers.
        """
        self._is_dumping, self._awaits_dump = True, False
        try:
            with rng_restored():
                checkpoint = dump(*args, **words)
        finally:
            self._is_dumping = False
        if self._awaits_dump:
            self.save(self._trainer, checkpoint)
        return checkpoint

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Read the state of the checkpoint from which a fit resumes.

        Raises:
            CheckpointError: If the state is damaged.
            InexactResumeError: If it cannot be resumed exactly, and ``on_inexact_resume`` is not
                ``"warn"``.
        """
        if not self._is_open:
            return
        trainer = self._trainer
        state = SavedState.from_checkpoint(checkpoint)
        if isinstance(state, str):
            self._raise_or_warn([state])
            return
        # Saved before training, as by the learning rate finder: no ledger was open, and nothing was
        # drawn from a generator that an epoch does not seed.
        if all(rank.ledger is None for rank in state.ranks):
            return
        self._raise_or_warn(self._find_problems(state))
        if not run_state.reaches_max_steps(trainer, state.position.step):
            # Another rank may lack its ledger, so all ranks ask whether each can be checked.
            self._raise_or_warn(self._find_unknown(state), on_all_ranks=True)
        self._resumed = state
        run_state.restore_limits(trainer, state.settings.get(LIMITS, {}))
        position = state.position
        if state.settings.get(STOPPED) and not self._accepts_breaks:
            rank_zero().rank_zero_info(_FINISHED)
            # Within an epoch Lightning would leave out what follows the checkpoint.
            self._stops = position.phase != "epoch"
            trainer.should_stop = not self._stops
        if position.phase == "cut" and not run_state.reaches_max_steps(trainer, position.step):
            # It was saved when Lightning had ended the epoch, which continues.
            progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
            for part in (progress["total"], progress["current"]):
                part["processed"] = part["completed"] = part["started"] - 1
        place = trainer.world_size, get_logical_ranks(trainer)
        rank = self._rank = self._unvalidated = state.of_rank(trainer.global_rank, *place)
        if state.fits(*place):
            loaded = {"train": rank.train_reload_epoch, "validate": rank.validation_reload_epoch}
            self._session.resume_fit(state.fit, loaded)

    def _find_problems(self, state: SavedState) -> list[str]:
        """Return why this run cannot be resumed exactly from the state that a checkpoint holds."""
        trainer, settings = self._trainer, self._describe_settings()
        saved = {**state.settings, _RANKS: state.world_size}
        now = {**settings, _RANKS: trainer.world_size}
        # With logical ranks the data are the same on any number of processes, and threads round.
        skipped = "threads" if state.logical_ranks is None else _RANKS
        problems = [
            f"It was saved with {name}={saved.get(name)!r}; now it is {now.get(name)!r}{effect}."
            for name, effect in _COMPARED.items()
            if name != skipped and saved.get(name) != now.get(name)
        ]
        problems += filter(None, [find_hybrid_sharding([trainer.strategy])])
        position = state.position
        if position.phase == "within":
            problems.append(
                f"It was saved while batch {position.batch} of epoch {position.epoch} was trained: "
                "it holds part of the changes of that batch, which would be trained again."
            )
        if state.settings.get(STOPPED) and self._accepts_breaks:
            problems.append(_LONGER)
        if not run_state.reaches_max_steps(trainer, position.step):
            # Those of all ranks, so that all ranks agree. If no step remains, they do not matter.
            problems += dict.fromkeys(reason for rank in state.ranks for reason in rank.inexact)
        return problems

    def _find_unknown(self, state: SavedState) -> list[str]:
        """Return problems of objects that nothing can read, unless the resumed run is checked."""
        paths = dict.fromkeys(path for rank in state.ranks for path in rank.unknown)
        found = [path for path in paths if not any(fnmatch(path, own) for own in self._accepted)]
        trainer = self._trainer
        place = trainer.world_size, get_logical_ranks(trainer)
        own = state.of_rank(trainer.global_rank, *place)
        if found and can_be_checked(own.ledger, trainer.global_rank):
            rank_zero().rank_zero_info(_CHECKED.format(", ".join(found)))
            return []
        return [_UNKNOWN.format(path) for path in found]

    def _describe_settings(self) -> dict[str, Any]:
        """Return the settings in a checkpoint, which ``_find_problems`` compares with a run's."""
        settings = self._session.settings.as_record()
        return {**settings, LOGICAL_RANKS_KEY: get_logical_ranks(self._trainer)}

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

    def _load_optimizers(
        self, load: Callable[..., None], checkpoint: Mapping[str, Any], *args: Any, **words: Any
    ) -> None:
        """Load the state of each parameter, whatever its place in its group."""
        saved = {} if self._resumed is None else self._resumed.settings
        if GROUPS in saved and not is_sharded(self._trainer.strategy):
            found, problems = [], []
            states = checkpoint["optimizer_states"]
            groups = zip(states, saved[GROUPS], run_state.name_groups(self._trainer), strict=False)
            for number, (state, before, now) in enumerate(groups):
                own = run_state.sort_groups(state, before, now)
                counts = ([len(group) for group in one] for one in (before, now))
                problems += [] if own else [_OTHER_GROUPS.format(number, *counts)]
                found.append(own or state)
            self._raise_or_warn(problems)
            checkpoint = {**checkpoint, "optimizer_states": [*found, *states[len(found) :]]}
        load(checkpoint, *args, **words)

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
            self._raise_or_warn([*filter(None, found)])

    def _finish_and_reset(self, reset: Callable[[], None]) -> None:
        _ = self._program  # it begins here
        if not lightning_private.has_loaded_progress(self._trainer):
            reset()
            return
        latest, device = self._rank.callback_metrics, self._trainer.strategy.root_device
        moved = {name: value.to(device, copy=True) for name, value in latest.items()}
        lightning_private.update_callback_metrics(self._trainer, moved)
        self._at_end = run_state.finish_pending_work(self._trainer, self._position, reset)

    @property
    def _program(self) -> ProgramState:
        """The state of the program's objects, compared with what it was at first."""
        if self._program_state is None:
            self._program_state = ProgramState(self._trainer, self._parts)
        return self._program_state

    def _remember(
        self,
        *others: Callable[[Trainer], Mapping[str, object]],
        program: Captured | None = None,
        reset: tuple[str, ...] = (),
    ) -> _Find:
        """Return a function that names what has changed since now.

        Args:
            others: Return values by name, which are compared as the tensors of the model are.
            program: The state of the program's objects now; without one they may change.
            reset: The beginnings of the paths of metrics that Lightning is about to reset.
        """

        def take() -> list[Mapping[str, object]]:
            tensors = run_state.digest_tensors(self._trainer, self._parts)
            return [tensors, *(other(self._trainer) for other in others)]

        before = take()

        def find() -> list[str]:
            pairs = list(zip(before, take(), strict=True))
            if program is not None:
                old, new = (
                    {path: own for path, own in one.items() if not path.startswith(reset)}
                    for one in (program, self._program.capture())
                )
                pairs.append((old, new))
            return [
                name.rstrip("'")
                for old, new in pairs
                for name in {**old, **new}
                if old.get(name, b"") != new.get(name, b"") and not name.endswith(MODE)
            ]

        return find

    def _restore(self, *, within: bool) -> list[str]:
        """Restore what this rank holds; return the paths of objects that do not exist."""
        program = {path: own for path, own in self._rank.program.items() if path != _HOOKS}
        missing = self._program.restore(program, self._rank.reset)
        run_state.restore(
            self._trainer, self._session, self._rank, self._raise_or_warn, within=within
        )
        return missing

    def _restore_and_start(self, start: Callable[[], None]) -> None:
        # After `on_train_start`, where modules reset their metrics.
        if self._has_begun and not self._has_settled:
            self._has_settled = True
            self._program.settle()
        if self._resumed is not None and self._has_begun:
            missing = self._restore(within=False)
            problems = [*_name_all(_MISSING_OBJECTS, missing), *self._program.describe_unlike()]
            self._raise_or_warn(problems, on_all_ranks=True)
            if self._was_saved_between_epochs:
                self._session.loaders.restore_data("train", self._position.epoch)
        start()

    def _keep_and_end(self, end: Callable[[], None]) -> None:
        if run_state.is_cut_by_max_steps(self._trainer):
            self._recorder.reduce_loss(self._trainer)
            self._cut = self._capture()
            self._find_changed_since_cut = self._remember(
                run_state.digest_callbacks, program=self._program.capture()
            )
        end()

    def _reset_epoch(self, reset: Callable[[], None]) -> None:
        with catch_warnings():
            if self._resumed is not None and not self._reasons:
                # Lightning cannot resume these loaders; the loader control can.
                filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            reset()

    def _start_batches(self, start: Callable[..., None], *args: Any, **words: Any) -> None:
        trainer, loaders, fit = self._trainer, self._session.loaders, self._trainer.fit_loop
        # Lightning makes the first iterator, and starts its workers, when it loads the loaders.
        first = getattr(fit, "is_resuming", False) or fit.epoch_loop.restarting
        # An uninterrupted run makes it after `on_train_epoch_start`, where the epoch is seeded and
        # a dataset may be set, and it fetches the first batch of an iterable dataset at once. So
        # make it again.
        again = self._was_saved_between_epochs and run_state.reads_when_iterated(trainer)
        if trainer.current_epoch and (again or not first):
            loaders.restart_epoch("train", trainer.current_epoch)
        if trainer.current_epoch and again and first:
            if self._loader_states:
                lightning_private.load_loader_states(trainer, self._loader_states)
            lightning_private.create_loader_iterator(trainer)
        self._loader_states = []
        start(*args, **words)
        trainer.should_stop |= self._stops
        if self._resumed is not None and run_state.is_at_end(trainer):  # a batch may be fetched
            loaders.restore_data("train", self._resumed.position.epoch)
        # Otherwise Lightning skips the schedulers at the end of the epoch.
        lightning_private.clear_restart(fit)
        if self._at_end:
            self._at_end = False
            # It repeats nothing of the last batch, and ends at once if no batch is left.
            lightning_private.clear_restart(fit.epoch_loop)
        # The generators of training, as late as possible before the next batch.
        if self._has_begun:
            if self._resumed is not None:
                self._start_schedules()
                if not self._was_saved_between_epochs:
                    self._restore(within=True)
            self._resumed, self._rank = None, EMPTY_RANK

    def _start_schedules(self) -> None:
        """Set up the schedulers that callbacks change when an epoch starts."""
        trainer, data = self._trainer, self._rank.program.get(_HOOKS)
        hooks = {} if data is None else decode_plain(unpack_bytes(data))
        if not self._was_saved_between_epochs:
            groups = [group for own in trainer.optimizers for group in own.param_groups]
            rates = [group["lr"] for group in groups]
            for name, callback in name_callbacks(trainer.callbacks).items():
                if name in hooks.get("starters", ()):
                    callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate  # which a new schedule sets
        names = [type(own).__name__ for own in list_schedulers(trainer)]
        saved = hooks.get("schedulers", names)
        if saved != names and not lightning_private.skips_backward(trainer):
            texts = [", ".join(part) or "none" for part in (saved, names)]
            self._raise_or_warn([_OTHER_SCHEDULERS.format(*texts)])

    def _capture_hooks(self) -> dict[str, Any]:
        """Return the names of schedulers, and of the callbacks that have put new ones there."""
        schedulers = list_schedulers(self._trainer)
        new = {id(own) for own in schedulers if own not in self._schedulers}
        if not self._has_begun or not new:
            return {}
        # The callbacks that hold a new scheduler: they have put it in the place of another when an
        # epoch started, and Lightning does not call their hook again for a partly trained epoch.
        starters = [
            name
            for name, callback in name_callbacks(self._trainer.callbacks).items()
            if any(id(own) in new for _, own in search({name: callback}, depth=2))
        ]
        names = [type(own).__name__ for own in schedulers]
        return {"starters": starters, "schedulers": names}

    def _end_batch(self, end: Callable[..., None], *args: Any, **words: Any) -> None:
        self._find_late_changes()
        end(*args, **words)

    def _find_late_changes(self) -> None:
        """Report what has changed since a checkpoint was saved in this batch or validation."""
        names, self._find_late = self._find_late(), list
        if names and not self._late:
            self._late = [_LATE_HOOK.format(names[0])]
            _report("The checkpoint that was just saved", self._late)

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
        program = self._program  # it begins here
        if self._trainer.sanity_checking:
            return run()
        self._before_evaluation = run_state.capture_user_state(self._trainer, "validation", program)
        self._find_validated = self._remember()
        outputs = run()
        self._find_late_changes()
        self._find_validated = list
        self._before_evaluation = None  # after an exception a checkpoint may still need it
        return outputs

    def _resume_loader(self, loader: object) -> None:
        """Continue a training loader, which has just been loaded, where the checkpoint was saved.

        Raises:
            InexactResumeError: If it cannot, unless ``on_inexact_resume="warn"``.
        """
        trainer = self._trainer
        # `estimated_stepping_batches` loads the data before Lightning restores its progress.
        early = not lightning_private.has_loaded_progress(trainer)
        if early and self._resumed is None:
            return
        position = self._position
        if position.batch and not early and not run_state.is_at_end(trainer):
            self._raise_or_warn(find_loader_problems(loader, within=True))
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
                the checkpoint, unless ``on_inexact_resume="warn"``.
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
                problems.append(_REPEATED_START.format(trainer.current_epoch, after, earlier))
        self._raise_or_warn(problems, on_all_ranks=True)

    def begin(self) -> None:
        """Continue the ledger of the interrupted run; called before training starts."""
        self._has_begun = True
        trainer = self._trainer
        self._find_trained = self._remember()
        self._schedulers = list_schedulers(trainer)
        self._limits = run_state.capture_limits(trainer)
        if self._resumed is None and not self._reasons:
            return
        position, rank = self._position, self._rank
        if (resumed := self._resumed) is not None:
            if (step := trainer.global_step) != position.step:
                self._raise_or_warn([_LOST_PROGRESS.format(step, position.step)])
            frozen, changed = resumed.settings[FROZEN]["parameters"], []
            for name, parameter in trainer.lightning_module.named_parameters():
                if parameter.requires_grad == (name in frozen):
                    parameter.requires_grad_(not parameter.requires_grad)
                    changed.append(name)
            if changed:
                rank_zero().rank_zero_info(
                    f"{pluralize(len(changed), 'parameter')} frozen or unfrozen as when the "
                    f"checkpoint was saved, {changed[0]} first. To train others, load its weights "
                    "without ckpt_path."
                )
            if resumed.fits(trainer.world_size, get_logical_ranks(trainer)):
                found = ranks_of(trainer).raise_on_all(self._find_unmatched)
                self._raise_or_warn(found, on_all_ranks=True)
        ledger = rank.ledger or {"folder": "", "check": ""}
        self._recorder.run.resume(
            Resume(
                parent=ledger["folder"],
                parent_check=ledger["check"],
                epoch=position.epoch,
                step=position.step,
                batch=position.batch,
                inexact=tuple(self._reasons),
            ),
            rank.pending.get("loss"),
            lambda problem: self._raise_or_warn([problem]),
            rank.pending.get("evaluations", ()),
        )

    def _find_unmatched(self) -> list[str]:
        """Return why the generators and loaders of this rank cannot be restored."""
        trainer, rank = self._trainer, self._rank
        unmatched = find_generators(run_state.name_datasets(trainer)).keys() ^ rank.generators
        if not lightning_private.has_loaders(trainer.fit_loop.epoch_loop.val_loop):
            unmatched = {path for path in unmatched if not path.startswith(VALIDATION)}
        # The dataset of a loader that is loaded again may be a new object, whose generator starts
        # again, or the same one, whose generator continues.
        every = trainer.reload_dataloaders_every_n_epochs
        loaded = {"train.": rank.train_reload_epoch, VALIDATION: rank.validation_reload_epoch}
        stages = tuple(
            stage
            for stage, epoch in loaded.items()
            if every and epoch is not None and self._position.epoch - epoch >= every
        )
        paths = [*rank.generators]
        for number, states in rank.samplers.items():
            loader = number if number.startswith(VALIDATION) else f"train.{number}"
            changed = (path.partition(".")[2] for path in states.get(CHANGES, {}))
            paths += [f"{loader}.{path}" for path in states.get(DATA, {})]
            paths += [f"{loader}.sampler.{path}" for path in changed]
        reloaded = [path.rstrip("'") for path in paths if path.startswith(stages)]
        if every and (stages or rank.train_reload_epoch or rank.validation_reload_epoch):
            # Of its numbers and texts loaders may be made, such as the size of batches.
            reloaded += [path for path in rank.program if re.fullmatch(r"datamodule\.\w+", path)]
        return [
            *_name_all(_UNMATCHED_GENERATORS, sorted(unmatched)),
            *_name_all(_RELOADED, reloaded),
            *([] if rank.rng is None else find_lost_devices(rank.rng)),
        ]

    @property
    def _position(self) -> LoopPosition:
        resumed = self._resumed
        return run_state.find_position(self._trainer) if resumed is None else resumed.position

    @property
    def _was_saved_between_epochs(self) -> bool:
        return self._resumed is not None and self._resumed.position.phase == "epoch"

    def _capture(self, checkpoint: Mapping[str, Any] = MappingProxyType({})) -> SavedState:
        """Return the state of the run, with the state of this rank alone.

        ``checkpoint`` is what is being saved, which may hold large values already.
        """
        trainer, session = self._trainer, self._session
        if (cut := self._cut) is not None:
            epoch, (rank,) = cut.position.epoch, cut.ranks
            late = [
                _describe_unfinished(trainer, epoch, "max_steps", _CUT.format(name))
                for name in self._find_changed_since_cut()[:1]
            ]
            return replace(cut, ranks=[replace(rank, inexact=rank.inexact + late)])
        position = run_state.find_position(trainer)
        user = before = self._before_evaluation
        if user is None or position.phase != "validation":
            user = run_state.capture_user_state(trainer, position.phase, self._program)
        program = self._captured = user["program"]
        if trainer.validating and before is not None:
            # An evaluation changes the modes of modules.
            modes = {p: own for p, own in before["program"].items() if p.endswith(MODE)}
            program = {p: own for p, own in program.items() if not p.endswith(MODE)} | modes
        kept, reasons = run_state.keep_small(program, checkpoint)
        late = self._late if position.phase == "batch" else []
        if position.phase == "validation" and (names := self._find_validated()):
            late = [_IN_VALIDATION.format(names[0])]
        if hooks := self._capture_hooks():
            kept[_HOOKS] = pack_bytes(encode_plain(hooks))
        run = self._recorder.run
        samplers = session.capture_samplers(position.phase)
        user = {**user, "unknown": [*user["unknown"], *list_unknown(samplers)]}
        reasons = [*self._find_missing_state(position), *reasons, *list_unsaved(samplers), *late]
        rank = run_state.capture(
            trainer, session, position.phase, user,
            program=kept,
            samplers=samplers,
            inexact=reasons,
            ledger=run.ledger_position,
            pending={"loss": run.loss_text, "evaluations": [*run.held]},
        )  # fmt: skip
        # Callbacks and hooks freeze and unfreeze parameters at the start of an epoch.
        parameters = [name for name, own in self._parts.listed[0] if not own.requires_grad]
        limits = run_state.capture_limits(trainer).items() - self._limits.items()
        further = {
            FROZEN: {"parameters": parameters},
            STOPPED: bool(trainer.should_stop) and lightning_private.can_stop_early(trainer),
            GROUPS: run_state.name_groups(trainer),
            LIMITS: dict(limits) if self._has_begun else {},
        }
        return SavedState(
            seed=session.settings.seed,
            fit=session.fit,
            settings=self._describe_settings() | further,
            world_size=trainer.world_size,
            position=position,
            ranks=[rank],
        )

    def _find_missing_state(self, position: LoopPosition) -> list[str]:
        """Return why a checkpoint that is being saved cannot be resumed exactly."""
        trainer = self._trainer
        between, fit = position.phase == "epoch", trainer.fit_loop
        if not between and lightning_private.skips_backward(trainer):
            return [_WITHOUT_STEPS]
        batches = fit.epoch_loop.batch_progress.current
        pending = position.phase == "validation" or batches.completed < batches.processed
        if trainer.should_stop and not between and pending:
            return [_STOPPING]
        within = not between and not run_state.is_at_end(trainer)
        found = [
            problem
            for loop, is_within in ((fit, within), (fit.epoch_loop.val_loop, False))
            for loader in lightning_private.list_loaders(loop)
            for problem in find_loader_problems(loader, within=is_within)
        ]
        # Lightning loads the state of a loader in a fit of a number of steps.
        if between and trainer.max_steps < 0:
            found += filter(None, map(find_epoch_problem, lightning_private.list_loaders(fit)))
        return found

    def _name_lost(self, checkpoint: Mapping[str, Any]) -> None:
        """Note in the state of a checkpoint that is about to be written which weights it lacks.

        Other callbacks, and the module, may have taken them out.
        """
        lost = run_state.find_lost(self._parts, checkpoint)
        changed = self._find_trained() if lost else []
        reasons = [_LOST_TENSOR.format(name) for name in lost if name in changed]
        find_state(checkpoint)["ranks"][0]["inexact"] += reasons[:1]

    @property
    def _accepts_breaks(self) -> bool:
        return self._recorder.run.options.on_inexact_resume == "warn"

    def _raise_or_warn(self, found: Sequence[str], *, on_all_ranks: bool = False) -> None:
        """Raise or warn of new problems; with ``on_all_ranks`` of those that any rank has found."""
        rows = ranks_of(self._trainer).gather_json(found) if on_all_ranks else [found]
        every = dict.fromkeys(problem for row in rows for problem in row)
        problems = [problem for problem in every if problem not in self._reasons]
        if not problems:
            return
        self._reasons += problems
        self._recorder.add_reasons(self._trainer, problems)  # if its ledger is open
        listed = "\n".join(f"- {problem}" for problem in problems)
        text = (
            f"This run cannot be resumed exactly from the checkpoint:\n{listed}\n"
            "To resume anyway, with a break that the ledger records, pass "
            'DeterminismCallback(on_inexact_resume="warn").'
        )
        if not self._accepts_breaks:
            raise InexactResumeError(text, reasons=problems)
        if self._trainer.is_global_zero:
            warn(text, stacklevel=2)


def _name_all(problem: str, paths: Iterable[str]) -> list[str]:
    """Return a problem with the paths in it; nothing without paths."""
    named = ", ".join(paths)
    return [problem.format(named)] if named else []


def _describe_unfinished(trainer: Trainer, epoch: int, cause: str, then: str) -> str:
    """Return why an epoch that the end of a fit cut short cannot go on."""
    trained = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    return (
        f"Its fit ended after {trained} batches of epoch {epoch}, by {cause}, and {then} would "
        "train the rest. Resume from a checkpoint within the epoch: "
        "ModelCheckpoint(every_n_train_steps=...)."
    )


def _report(checkpoint: str, problems: list[str]) -> None:
    """Log problems of a checkpoint that this run saves."""
    listed = "\n- ".join(problems)
    rank_zero().rank_zero_info(f"{checkpoint} cannot be resumed exactly:\n- {listed}")
