"""One fit that may save checkpoints and resume from one: the hooks around Lightning's loops.

Each part of the state says itself how it is captured and restored. The run that saves a checkpoint
knows some of the reasons why it is not exact, and stores them in it; the run that loads it finds
the others.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from warnings import catch_warnings, filterwarnings

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.engine.control.data.loaders import find_epoch_problem, find_loader_problems
from lightning_d9m.engine.control.seeding import rng_restored
from lightning_d9m.engine.hashing.checkpoint_manifest import make_manifest
from lightning_d9m.engine.ledger.format.records import Resume
from lightning_d9m.integrations.lightning.resume.loaders import (
    drop_consumed_states,
    reads_when_iterated,
)
from lightning_d9m.integrations.lightning.resume.logged import count_logged
from lightning_d9m.integrations.lightning.resume.optimizers import Groups
from lightning_d9m.integrations.lightning.resume.part import Fit, Moment
from lightning_d9m.integrations.lightning.resume.position import (
    LoopPosition,
    continue_cut,
    find_position,
    finish_pending_work,
    is_at_end,
    is_cut_by_max_steps,
)
from lightning_d9m.integrations.lightning.resume.program import (
    EXPECTED,
    Program,
    digest_callbacks,
    find_lost,
    remember,
)
from lightning_d9m.integrations.lightning.resume.saved_run import PARTS, gather, read_state, select
from lightning_d9m.integrations.lightning.saved_state import CALLBACKS, MANIFEST_KEY, find_state
from lightning_d9m.integrations.strategies.strategies import is_sharded
from lightning_d9m.integrations.trainer import lightning_private
from lightning_d9m.integrations.trainer.packages import rank_zero
from lightning_d9m.integrations.trainer.trainer_attributes import KEY, Trainer, ranks_of

_Find = Callable[[], list[str]]

_CUT = (
    "Its fit ended after {} batches of epoch {}, by max_steps, and hooks at the end of the epoch "
    "or the fit changed {}, where a longer fit would train the rest. Resume from a checkpoint "
    "within the epoch: ModelCheckpoint(every_n_train_steps=...)."
)
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


class ResumableFit(Fit):
    """One fit: what it resumes, and what it would save; see ``Fit`` for the arguments.

    It is made before a checkpoint is loaded.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._parts: dict[str, Any] = {part.name: part(self) for part in PARTS}
        self._program: Program = self._parts[Program.name]
        self._reasons: list[str] = []
        # What the loaders of validation, which may come later, restore.
        self._unvalidated: Mapping[str, Any] = {}
        self._loader_states: list[dict[str, Any]] = []
        self._at_end = self._starts_epoch = False
        # The numbers of batches of the epochs since a loader has loaded its state.
        self._lengths: list[int] | None = None
        self._skipped = 0
        # They name what has changed since training began, where `max_steps` ended the fit, after a
        # save, and in a validation.
        self._find_trained: _Find = list
        self._find_changed_since_cut: _Find = list
        self._find_late: _Find = list
        self._saves_in_validation = False
        self._find_validated: _Find = list
        # The state where `max_steps` ended the fit, before the end of the epoch.
        self._cut: dict[str, Any] = {}
        # Reasons of checkpoints that are saved in a validation, or else before that. Hooks that run
        # late for the latter have run before the former.
        self._late: dict[bool, list[str]] = {}
        self._told: set[str] = set()
        self._is_open = True
        # Returns the state of the fit once it has ended, for later checkpoints.
        self._ended: Callable[[], dict[str, Any]] = dict
        self._patches = AttributePatches()
        self.session.resume(self._resume_loader, self.close)  # first, as a hook may be missing
        for hook in self._list_hooks():
            self._wrap(*hook)

    def __deepcopy__(self, memo: dict[int, object]) -> "ResumableFit":
        """Return this fit: the Trainer, which a program may copy, has methods that it replaced."""
        return self

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., object]) -> None:
        self._patches.replace(owner, name, partial(wrapper, getattr(owner, name)))

    def close(self) -> None:
        """Restore the methods of Lightning; later checkpoints have its last state."""
        self._is_open = False
        self._patches.undo()

    def _list_hooks(self) -> Sequence[tuple[Any, str, Callable[..., object]]]:
        """Return the methods that Lightning calls in a fit, in its order, and their wrappers.

        No hook of a callback is called at these points. A wrapper gets the method first.
        """
        trainer = self.trainer
        fit, connector = trainer.fit_loop, lightning_private.get_checkpoint_connector(trainer)
        epoch_loop, val_loop = fit.epoch_loop, fit.epoch_loop.val_loop
        return (
            # Around the hooks that save, which may draw, and change what is saved; and after them,
            # as a manifest has all that is written.
            (connector, "dump_checkpoint", self._dump),
            (trainer.strategy, "save_checkpoint", self._write),
            # The weights are loaded before the callbacks' on_load_checkpoint, the optimizers after.
            (trainer.strategy, "load_model_state_dict", self._load_weights),
            (trainer.strategy, "load_optimizer_state_dict", self._load_optimizers),
            # After that the hooks may make objects of the weights.
            (trainer.strategy, "setup", self._set_up),
            # The loaders of training are loaded: each is given to `resume_loader`, they load their
            # states, and then they are iterated for the first time, which starts workers.
            (fit, lightning_private.LOAD_LOADER_STATES, self._load_loader_states),
            (fit, "setup_data", self._load_training),
            # Before a sanity check, or before the first validation.
            (val_loop, "setup_data", self._load_validation),
            # Within it, the seeds are those of the validation: the state before is that of
            # training, and what is found after it belongs to training, too.
            (val_loop, "run", self._run_validation),
            # After the sanity check. Here Lightning reads the progress that it has loaded, so what
            # was pending must be completed first.
            (fit, "reset", self._finish_and_reset),
            # After on_train_start, in which modules reset their metrics; before the hooks that
            # start an epoch, which a run that resumes between epochs calls.
            (fit, "on_advance_start", self._restore_and_start),
            (epoch_loop, "reset", self._reset_epoch),
            # After these hooks: the last point before the next batch.
            (epoch_loop, "on_run_start", self._start_batches),
            # After all hooks of a batch, and of a validation that follows it.
            (epoch_loop, "on_advance_end", self._end_batch),
            # Before the hooks that end an epoch, which `max_steps` may have cut short.
            (fit, "on_advance_end", self._keep_and_end),
        )

    # Saving

    def keep(self, *, ended: bool) -> None:
        """Keep the state of the fit, which is about to end, for checkpoints that are saved later.

        If it has finished, every rank calls this, and rank 0 gathers the state now, because other
        ranks may have exited by the next save. Otherwise it does so when a checkpoint is saved.
        """
        captured = self.capture()
        state = gather(self.trainer, captured) if ended else {}
        self._ended = (lambda: state) if ended else partial(gather, self.trainer, captured)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the state to a checkpoint of a fit that has ended, see ``_dump`` for others."""
        if not self._is_open and (state := self._ended()):
            self._patches.undo()  # of a save that failed before it wrote its checkpoint
            self._wrap(self.trainer.strategy, "save_checkpoint", self._write)
            _add(checkpoint, state)

    def _save(self, checkpoint: dict[str, Any]) -> None:
        trainer = self.trainer
        self.recorder.reduce_loss(trainer)
        captured = self.capture()
        # Log once each reason, and each object that the checkpoint does not hold.
        reasons = (*captured["inexact"], *map(EXPECTED.format, self._program.changes.expected))
        if new := [text for text in reasons if text not in self._told]:
            _report("The checkpoint that is being saved", new)
        logged = [text for text in self._parts["samplers"].lost if text not in self._told]
        for text in logged:
            rank_zero().rank_zero_info(text)
        self._told.update(new, logged)
        # Of several files in one batch, whatever changes after a later one changes after the first.
        if captured["position"]["phase"] == "batch" and self._find_late is list:
            self._saves_in_validation = bool(trainer.validating)
            self._find_late = remember(
                self._program,
                count_logged,
                changes=self._program.captured,
                reset=captured["reset"],
            )
        self.recorder.run.note_save(trainer.global_step)
        _add(checkpoint, gather(trainer, captured))

    def _dump(self, dump: Callable[..., dict[str, Any]], weights_only: bool = False) -> Any:
        """Add the state that hooks leave which save; what they draw does not change the training.

        A fit that saves more often would otherwise train on other numbers. Every rank calls this.
        """
        with rng_restored():
            checkpoint = dump(weights_only)
        # Not in our `on_save_checkpoint`: hooks of the module and of other callbacks follow it.
        if not weights_only:
            self._save(checkpoint)
        return checkpoint

    def capture(self) -> dict[str, Any]:
        """Return the state of this rank by part."""
        trainer, cut = self.trainer, self._cut
        if cut:
            trained = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            epoch = cut["position"]["epoch"]
            found = self._find_changed_since_cut()[:1]
            late = [_CUT.format(trained, epoch, name) for name in found]
            return {**cut, "inexact": [*cut["inexact"], *late]}
        phase = find_position(trainer).phase
        self.unknown = []
        late = self._late.get(bool(trainer.validating), [])
        self.inexact = [*late] if phase == "batch" else []
        if phase == "validation":
            self.inexact += map(_IN_VALIDATION.format, self._find_validated()[:1])
        # An interrupted validation is run again as a whole.
        before = self.before if phase == "validation" else {}
        return {
            name: part.store(before[name] if name in before else part.capture(phase))
            for name, part in self._parts.items()
        }

    def _end_batch(self, end: Callable[..., None], *args: Any, **words: Any) -> None:
        self._find_late_changes()
        end(*args, **words)

    def _find_late_changes(self) -> None:
        """Report what has changed since a checkpoint was saved in this batch or validation."""
        names, self._find_late = self._find_late(), list
        if names and self._saves_in_validation not in self._late:
            late = self._late[self._saves_in_validation] = [_LATE_HOOK.format(names[0])]
            _report("The checkpoint that was just saved", late)

    def _keep_and_end(self, end: Callable[[], None]) -> None:
        # A search for a batch size ends by `max_steps`, too, before the training begins.
        if self.has_begun and is_cut_by_max_steps(self.trainer):
            self.recorder.reduce_loss(self.trainer)
            self._cut = self.capture()
            self._find_changed_since_cut = remember(
                self._program, digest_callbacks, changes=self._program.find_changes()
            )
        end()

    def _write(
        self, write: Callable[..., object], checkpoint: Any, *args: Any, **words: Any
    ) -> Any:
        """Add a manifest to a checkpoint, and note which weights it lacks.

        Other callbacks, the datamodule and the module may have changed it.
        """
        if not self._is_open:
            self._patches.undo()
        state = find_state(checkpoint)
        sharded = is_sharded(self.trainer.strategy)
        if state is not None and self.trainer.is_global_zero and not sharded:
            lost = find_lost(self.tensors, checkpoint)
            changed = self._find_trained() if lost else []
            reasons = [_LOST_TENSOR.format(name) for name in lost if name in changed]
            state["inexact"] = [*state["inexact"], *reasons[:1]]
            state[MANIFEST_KEY] = make_manifest(checkpoint)
        return write(checkpoint, *args, **words)

    # Resuming

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Read the state of the checkpoint from which the fit resumes.

        Raises:
            CheckpointError: If the state is damaged.
            InexactResumeError: If it cannot be resumed exactly, and ``on_inexact_resume`` is not
                ``"warn"``.
        """
        if not self._is_open:  # a checkpoint for an evaluation
            return
        trainer, state = self.trainer, read_state(checkpoint)
        if isinstance(state, str):
            self.report([state])
            return
        # Saved before training, as by the learning rate finder: no ledger was open, and nothing was
        # drawn from a generator that an epoch does not seed.
        if all(rank.ledger is None for rank in state.ranks):
            return
        saved = self.saved = select(self._parts.values(), state, trainer)
        self._check("load")
        self._unvalidated = saved
        self._restore("load")
        # The interrupted run has made it, and what it changes is in the checkpoint. Lightning would
        # repeat it.
        self._patches.replace(trainer, "num_sanity_val_steps", 0)
        continue_cut(trainer, saved["position"], checkpoint)

    @property
    def _position(self) -> LoopPosition:
        """The position from which the fit resumes; without a checkpoint the present one."""
        return self.saved["position"] if self.saved else find_position(self.trainer)

    def _restore(self, moment: Moment) -> None:
        """Restore the parts that are restored at a moment."""
        saved = self._unvalidated if moment == "validation" else self.saved
        for part in self._parts.values():
            if moment in part.restored and part.name in saved:
                part.restore(saved[part.name], moment)

    def _check(self, moment: Moment) -> None:
        """Raise or warn of the problems that parts find at a moment; every rank calls this."""
        saved = self.saved
        parts = [
            part for part in self._parts.values() if part.checked == moment and part.name in saved
        ]
        problems = ranks_of(self.trainer).raise_on_all(
            lambda: [text for part in parts for text in part.problems(saved[part.name])]
        )
        self.report(problems, on_all_ranks=True)

    def _load_weights(self, load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Load the weights into a module of the dtype in which it will train.

        With precision ``64-true`` Lightning converts the module after that, so the weights would be
        rounded to float32.
        """
        strategy = self.trainer.strategy
        plugin = strategy.precision_plugin
        if plugin.precision == "64-true" and not strategy.restore_checkpoint_after_setup:
            plugin.convert_module(self.trainer.lightning_module)
        load(*args, **kwargs)

    def _load_optimizers(
        self, load: Callable[..., None], checkpoint: Mapping[str, Any], *args: Any, **words: Any
    ) -> None:
        """Load the state of each parameter, whatever its place in its group."""
        saved = self.saved
        if saved and not is_sharded(self.trainer.strategy):
            states = checkpoint["optimizer_states"]
            own = self._parts[Groups.name].sort(states, saved[Groups.name])
            checkpoint = {**checkpoint, "optimizer_states": own}
        load(checkpoint, *args, **words)

    def _resume_loader(self, loader: object) -> None:
        """Continue a training loader, which has just been loaded, where the checkpoint was saved.

        Raises:
            InexactResumeError: If it cannot, unless ``on_inexact_resume="warn"``.
        """
        trainer, saved = self.trainer, self.saved
        # `estimated_stepping_batches` loads the data before Lightning restores its progress.
        early = not lightning_private.has_loaded_progress(trainer)
        if early and not saved:
            return
        position = self._position
        if position.batch and not early and not is_at_end(trainer):
            self.report(find_loader_problems(loader, within=True))
        self.session.resumed_epoch = position.epoch
        self.session.loaders.resume_epoch(
            "train",
            position.epoch,
            batches=position.batch,
            # Called when the loaders are iterated: Lightning sets their mode later.
            cycled=lambda: lightning_private.cycles_shorter_loaders(trainer),
            samplers=saved.get("samplers", {}),
        )

    def _load_loader_states(self, load: Callable[[], None]) -> None:
        trainer = self.trainer
        if trainer.fit_loop.restarting:
            if self.was_saved_between_epochs:
                drop_consumed_states(trainer)
            self._loader_states = lightning_private.list_pending_loader_states(trainer)
            if self.saved and any(self._loader_states):
                self._lengths = [] if self._position.batch else [0]
                self._skipped = self._position.batch
        load()
        if self.was_saved_between_epochs and not any(self._loader_states):
            found = map(find_epoch_problem, lightning_private.list_loaders(trainer.fit_loop))
            self.report([*filter(None, found)])

    def _set_up(self, set_up: Callable[[Trainer], None], trainer: Trainer) -> None:
        set_up(trainer)
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._watch_program()

    def _load_training(self, load: Callable[[], None]) -> None:
        self._watch_program()
        load()
        self.session.loaders.keep_iterated("train")
        if self._starts_epoch:
            self._starts_epoch = False
            self.session.start_epoch(self.trainer.current_epoch)

    def _watch_program(self) -> None:
        """Take the program's state as held at first, before hooks change it.

        Loaders may restore what they share with the program.
        """
        if self.trainer.optimizers:
            _ = self._program.changes

    def _load_validation(self, load: Callable[[], None]) -> None:
        self._watch_program()
        load()
        if lightning_private.has_loaders(self.trainer.fit_loop.epoch_loop.val_loop):
            self._restore("validation")
            self._unvalidated = {}

    def _run_validation(self, run: Callable[[], object]) -> object:
        _ = self._program.changes  # since now
        counts = not self.trainer.sanity_checking
        if counts:
            self._begin_validation()
        with self.session.validation_isolated():
            outputs = run()
        if counts:
            self._find_late_changes()
            self._find_validated = list
            self.before = {}  # after an exception a checkpoint may still need it
        return outputs

    def _begin_validation(self) -> None:
        evaluated = [part for part in self._parts.values() if part.evaluated]
        self.before = {part.name: part.capture("validation") for part in evaluated}
        self._find_validated = remember(self._program)

    def _finish_and_reset(self, reset: Callable[[], None]) -> None:
        _ = self._program.changes  # since now
        if not lightning_private.has_loaded_progress(self.trainer):
            reset()
            return
        self._restore("reset")
        self._at_end = finish_pending_work(self.trainer, self._position, reset)

    def begin(self) -> None:
        """Continue the ledger of the interrupted run; called before training starts."""
        self._find_trained = remember(self._program)
        for part in self._parts.values():
            part.begin()
        self.has_begun = True  # last, as an exception may save while parts begin
        if not self.saved and not self._reasons:
            return
        position, step = self._position, self.trainer.global_step
        if step != position.step:
            self.report([_LOST_PROGRESS.format(step, position.step)])
        self._restore("train")
        self._check("train")
        ledger = self.saved.get("ledger") or {"folder": "", "check": ""}
        pending = self.saved.get("pending", {})
        self.recorder.run.resume(
            Resume(
                parent=ledger["folder"],
                parent_check=ledger["check"],
                epoch=position.epoch,
                step=position.step,
                batch=position.batch,
                inexact=tuple(self._reasons),
            ),
            pending.get("loss"),
            lambda problem: self.report([problem]),
            pending.get("data", ""),
        )

    def _restore_and_start(self, start: Callable[[], None]) -> None:
        if self.has_begun:
            self._program.settle()
        if self.saved and self.has_begun:
            self._restore("epoch")
            self._check("epoch")
            within = not self.was_saved_between_epochs
            self.session.loaders.restore_data("train", self._position.epoch, within=within)
        # Loaders may be loaded again now, which seeds. Then it seeds the epoch, before the hooks of
        # all callbacks: what one draws must not depend on its place among them.
        self._starts_epoch = self.has_begun
        start()

    def _reset_epoch(self, reset: Callable[[], None]) -> None:
        with catch_warnings():
            if self.saved and not self._reasons:
                # Lightning cannot resume these loaders; the loader control can.
                filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            reset()

    def _start_batches(self, start: Callable[..., None], *args: Any, **words: Any) -> None:
        trainer, loaders = self.trainer, self.session.loaders
        loop = trainer.fit_loop
        # Lightning makes the first iterator, and starts its workers, when it loads the loaders.
        first = getattr(loop, "is_resuming", False) or loop.epoch_loop.restarting
        # An uninterrupted run makes it after the epoch is seeded and `on_train_epoch_start`, where
        # a dataset may be set, and it fetches the first batch of an iterable dataset at once. So
        # make it again.
        again = self.was_saved_between_epochs and reads_when_iterated(trainer)
        if trainer.current_epoch and (again or not first):
            loaders.restart_epoch("train", trainer.current_epoch)
        if trainer.current_epoch and again and first:
            if self._loader_states:
                lightning_private.load_loader_states(trainer, self._loader_states)
            lightning_private.create_loader_iterator(trainer)
        self._loader_states = []
        start(*args, **words)
        if self.saved and is_at_end(trainer):  # a batch may be fetched
            loaders.restore_data("train", self._position.epoch)
        # Otherwise Lightning skips the schedulers at the end of the epoch.
        lightning_private.clear_restart(loop)
        if self._at_end:
            self._at_end = False
            # It repeats nothing of the last batch, and ends at once if no batch is left.
            lightning_private.clear_restart(loop.epoch_loop)
        # The generators of training, as late as possible before the next batch.
        if self.has_begun:
            self._restore("started")
            if not self.was_saved_between_epochs:
                self._restore("batch")
            self.saved = {}

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
        trainer, problems = self.trainer, []
        self._lengths.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        if len(self._lengths) > 1:
            before, after = self._lengths
            self._lengths = None
            if after == before - self._skipped:
                earlier = f", and the epoch before {before}" if self._skipped else ""
                problems.append(_REPEATED_START.format(trainer.current_epoch, after, earlier))
        self.report(problems, on_all_ranks=True)

    def report(self, problems: Sequence[str], *, on_all_ranks: bool = False) -> None:
        """Raise or warn of new problems; with ``on_all_ranks`` of those that any rank has found."""
        rows = ranks_of(self.trainer).gather_json(problems) if on_all_ranks else [problems]
        every = dict.fromkeys(problem for row in rows for problem in row)
        problems = [problem for problem in every if problem not in self._reasons]
        if not problems:
            return
        self._reasons += problems
        trainer, listed = self.trainer, "\n".join(f"- {problem}" for problem in problems)
        self.recorder.run.break_resume(  # its ledger may not be open yet
            f"This run cannot be resumed exactly from the checkpoint:\n{listed}",
            problems,
            is_first=trainer.is_global_zero,
            epoch=trainer.current_epoch,
            step=trainer.global_step,
            batch=trainer.fit_loop.epoch_loop.batch_progress.current.ready,
        )


def _add(checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
    """Add a state to a checkpoint, which other code may change later."""
    checkpoint.setdefault(CALLBACKS, {})[KEY] = {**state}


def _report(checkpoint: str, problems: list[str]) -> None:
    """Log problems of a checkpoint that this run saves."""
    listed = "\n- ".join(problems)
    rank_zero().rank_zero_info(f"{checkpoint} cannot be resumed exactly:\n- {listed}")
