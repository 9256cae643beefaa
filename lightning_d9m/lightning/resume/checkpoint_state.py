"""The state that a checkpoint needs beyond Lightning's own content for an exact resume.

It is stored under one key, as plain values that ``torch.load(weights_only=True)`` reads:

- ``seed``, ``fit``, ``settings``, ``world_size``: they select the random streams of the run;
- ``place``: the epoch, the global step, and the number of trained batches of the epoch;
- ``ranks``: for each rank, its own state (see ``run_state``) and its position in the ledger;
- ``seal``: the manifest, one digest for each tensor (see ``hashing.checkpoint_digests``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from warnings import catch_warnings, filterwarnings, warn

from lightning_d9m.control.attribute_patches import AttributePatches
from lightning_d9m.control.resumable_sampler import find_position_problem
from lightning_d9m.errors import InexactResumeError
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.checkpoint_io import KEY, add_manifests
from lightning_d9m.lightning.gather import gather_values
from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.lightning.ranks import ranks_of
from lightning_d9m.lightning.resume import run_state
from lightning_d9m.lightning.resume.exactness import (
    FORMAT,
    describe_reloaded_generators,
    describe_unmatched_state,
    find_missing_state,
    find_problems,
    find_unresumable_loaders,
    is_at_end,
    is_other_world,
    saves_within_epochs,
)
from lightning_d9m.lightning.resume.logged_results import restore_latest
from lightning_d9m.lightning.resume.loop_position import (
    LoopPosition,
    draws_when_iterated,
    drop_consumed_states,
    find_position,
    finish_pending_work,
    iterate_again,
    skip_remaining_batches,
)
from lightning_d9m.lightning.trainer_recorder import TrainerRecorder
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
        self._kept: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None
        self._reasons: list[str] = []
        self._unvalidated: dict[str, Any] | None = None
        self._before_evaluation: run_state.RngAndMetricState | None = None
        self._loader_states: list[dict[str, Any]] = []
        self._at_end = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_kept": None,
            "_resumed": None,
            "_reasons": [],
            "_unvalidated": None,
            "_before_evaluation": None,
            "_loader_states": [],
        }

    def keep(
        self, trainer: "Trainer", run: TrainerSession, testimony: TrainerRecorder, *, ended: bool
    ) -> None:
        """Keep the state of a run that is about to end, for checkpoints that are saved later.

        Args:
            trainer: The Trainer.
            run: Its run.
            testimony: Its evidence.
            ended: Whether the fit finished. Then every rank calls this, and rank 0 gathers the
                state now, because other ranks may have exited by the next save. Otherwise rank 0
                gathers it when a checkpoint is saved.
        """
        if run.stage != "fit":
            return
        mine = self._capture(trainer, run, testimony)
        ranks = gather_values(trainer, mine) if ended else None
        self._kept = {**self._describe(trainer, run), "ranks": ranks, "mine": mine}

    def save(
        self,
        trainer: "Trainer",
        run: TrainerSession | None,
        testimony: TrainerRecorder,
        checkpoint: dict[str, Any],
    ) -> None:
        """Add the state to a checkpoint. Every rank calls this, unless the run has ended."""
        if run is not None and run.stage == "fit":
            state = self._describe(trainer, run)
            state["ranks"] = gather_values(trainer, self._capture(trainer, run, testimony))
        elif self._kept is not None:
            state = dict(self._kept)
            mine = state.pop("mine")
            if state["ranks"] is None:
                state["ranks"] = gather_values(trainer, mine)
            add_manifests(trainer, once=True)  # no session is open that does so
        else:  # a Trainer that has not trained
            return
        checkpoint[KEY] = state

    def load(self, trainer: "Trainer", run: TrainerSession, checkpoint: Mapping[str, Any]) -> None:
        """Read the state of the checkpoint from which a fit resumes.

        Raises:
            InexactResumeError: If it cannot be resumed exactly, unless ``on_inexact="warn"``.
        """
        state = checkpoint.get(KEY)
        if run.stage != "fit" or _is_untrained(state):
            return
        problems = find_problems(state, trainer, run.settings.as_record())
        if problems:
            self._raise_or_warn(trainer, problems)
        if isinstance(state, Mapping) and state.get("format") == FORMAT:
            self._resumed = dict(state)
            if not is_other_world(state, trainer):
                rank = self._rank_state(trainer)
                loaded = {
                    "train": rank.get("reload_epoch"),
                    "validate": rank.get("validation_reload_epoch"),
                }
                run.resume_fit(state["fit"], loaded)
            self._unvalidated = self._rank_state(trainer)

    def attach(self, trainer: "Trainer", run: TrainerSession) -> None:
        """Prepare a fit for a checkpoint that it may resume from; called before that is loaded."""
        self._kept = self._resumed = self._unvalidated = self._before_evaluation = None
        self._reasons, self._loader_states = [], []
        if run.stage == "fit":
            run.resume(
                self._loops_wrapped(trainer, run),
                lambda loader: self._place_loader(trainer, run, loader),
            )

    @contextmanager
    def _loops_wrapped(self, trainer: "Trainer", run: TrainerSession) -> Iterator[None]:
        fit = trainer.fit_loop
        epoch_loop, val_loop = fit.epoch_loop, fit.epoch_loop.val_loop
        wrappers: list[tuple[Any, str, Callable[..., object]]] = [
            (fit, lightning_private.LOAD_LOADER_STATES, self._load_loader_states),
            (fit, "reset", self._settle_and_reset),
            (fit, "on_advance_start", self._restore_and_start),
            (epoch_loop, "reset", self._reset_epoch),
            (epoch_loop, "on_run_start", partial(self._start_batches, run)),
            (val_loop, "setup_data", self._load_validation),
            (val_loop, "run", self._run_validation),
        ]
        patches = AttributePatches()
        try:
            for owner, name, wrapper in wrappers:
                patches.replace(owner, name, partial(wrapper, trainer, getattr(owner, name)))
            yield
        finally:
            patches.undo()

    def _load_loader_states(self, trainer: "Trainer", load: Callable[[], None]) -> None:
        if trainer.fit_loop.restarting:
            if self._resumed is not None and self._place(trainer).moment == "epoch":
                drop_consumed_states(trainer)
            self._loader_states = lightning_private.list_pending_loader_states(trainer)
        load()

    def _settle_and_reset(self, trainer: "Trainer", reset: Callable[[], None]) -> None:
        if not lightning_private.has_loaded_progress(trainer):
            reset()
            return
        restore_latest(trainer, self._rank_state(trainer).get("metrics", {}))
        self._at_end = finish_pending_work(trainer, self._place(trainer), reset)

    def _restore_and_start(self, trainer: "Trainer", start: Callable[[], None]) -> None:
        # After `on_train_start`, where modules reset their metrics.
        if self._resumed is not None:
            run_state.restore_outside(trainer, self._rank_state(trainer))
        start()

    def _reset_epoch(self, trainer: "Trainer", reset: Callable[[], None]) -> None:
        with catch_warnings():
            if self._resumed is not None and not self._reasons:
                # Lightning cannot resume these loaders; the loader control can.
                filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            reset()

    def _start_batches(
        self, run: TrainerSession, trainer: "Trainer", start: Callable[..., None], *args: Any
    ) -> None:
        if _iterates_again(trainer):
            run.restart_epoch(trainer.current_epoch)
        elif self._resumes_between_epochs(trainer) and draws_when_iterated(trainer):
            run.restart_epoch(trainer.current_epoch)
            iterate_again(trainer, self._loader_states)
        self._loader_states = []
        start(*args)
        # Otherwise Lightning skips the schedulers at the end of the epoch.
        lightning_private.clear_restart(trainer.fit_loop)
        if self._at_end:
            self._at_end = False
            skip_remaining_batches(trainer)
        self._restore(trainer)

    def _load_validation(self, trainer: "Trainer", load: Callable[[], None]) -> None:
        load()
        loop = trainer.fit_loop.epoch_loop.val_loop
        if lightning_private.has_loaders(loop) and self._unvalidated is not None:
            rank, self._unvalidated = self._unvalidated, None
            run_state.restore_validation(trainer, rank)

    def _run_validation(self, trainer: "Trainer", run: Callable[[], object]) -> object:
        if not trainer.sanity_checking:
            self._before_evaluation = run_state.capture_drawn(trainer, "validation")
        outputs = run()
        self._before_evaluation = None  # after an exception a checkpoint may still need it
        return outputs

    def _place_loader(self, trainer: "Trainer", run: TrainerSession, loader: object) -> None:
        if not lightning_private.has_loaded_progress(trainer):
            return
        place = self._place(trainer)
        if place.batch and not is_at_end(trainer):
            problem = find_position_problem(loader)
            if problem is not None and problem not in self._reasons:
                self._raise_or_warn(trainer, [problem])
        run.resume_loaders(
            place.epoch,
            place.batch,
            # Called when the loaders are iterated: Lightning sets their mode later.
            lambda: lightning_private.cycles_shorter_loaders(trainer),
            self._rank_state(trainer).get("samplers", {}),
        )

    def begin(self, trainer: "Trainer", testimony: TrainerRecorder) -> None:
        """Continue the ledger of the interrupted run; called before training starts."""
        if self._resumed is None and not self._reasons:
            self._report_unresumable(trainer)
            return
        place = self._place(trainer)
        rank = self._rank_state(trainer)
        if rank:
            self._raise_or_warn_on_all_ranks(trainer, rank)
        ledger = rank.get("ledger") or {}
        testimony.resume(
            {
                "parent": ledger.get("folder", ""),
                "parent_check": ledger.get("check", ""),
                "epoch": place.epoch,
                "step": place.step,
                "batch": place.batch,
                **({"inexact": list(self._reasons)} if self._reasons else {}),
            },
            rank.get("testimony", {}),
        )

    def _restore(self, trainer: "Trainer") -> None:
        """Restore the generators of training, as late as possible before the next batch."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or resumed["place"]["moment"] == "epoch":
            return
        run_state.restore_within(trainer, _rank_of(resumed, trainer))

    def _place(self, trainer: "Trainer") -> LoopPosition:
        if self._resumed is None:
            return find_position(trainer)
        return LoopPosition(**self._resumed["place"])

    def _resumes_between_epochs(self, trainer: "Trainer") -> bool:
        """Return whether a resumed fit is about to train its first epoch from its beginning."""
        return (
            trainer.current_epoch > 0
            and self._resumed is not None
            and self._place(trainer).moment == "epoch"
        )

    def _rank_state(self, trainer: "Trainer") -> dict[str, Any]:
        return {} if self._resumed is None else _rank_of(self._resumed, trainer)

    def _describe(self, trainer: "Trainer", run: TrainerSession) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "seed": run.settings.seed,
            "fit": run.fit,
            "settings": run.settings.as_record(),
            "world_size": trainer.world_size,
            "place": asdict(find_position(trainer)),
        }

    def _capture(
        self, trainer: "Trainer", run: TrainerSession, testimony: TrainerRecorder
    ) -> dict[str, Any]:
        place = find_position(trainer)
        drawn = self._before_evaluation if place.moment == "validation" else None
        drawn = drawn or run_state.capture_drawn(trainer, place.moment)
        return {
            **run_state.capture(trainer, run.capture_rng(), drawn),
            "samplers": run.capture_samplers(within=place.moment != "epoch"),
            "lacks": find_missing_state(trainer, place, drawn.measured),
            "ledger": testimony.ledger_position,
            "testimony": testimony.pending,
        }

    def _report_unresumable(self, trainer: "Trainer") -> None:
        """Report which checkpoints of a fresh fit could not be resumed exactly."""
        prospects = find_unresumable_loaders(trainer)
        if not prospects:
            return
        listed = "\n".join(f"- {problem}" for problem in prospects)
        text = f"Checkpoints of this run could not be resumed exactly:\n{listed}"
        if self._on_inexact == "raise_early":
            raise InexactResumeError(
                f"{text}\nTo train anyway, leave on_inexact_resume at its default: then the error "
                "is raised when such a checkpoint is loaded.",
                reasons=prospects,
            )
        if saves_within_epochs(trainer):
            rank_zero().rank_zero_info(
                f"{text}\nThis is an error when such a checkpoint is loaded."
            )

    def _raise_or_warn_on_all_ranks(self, trainer: "Trainer", rank: Mapping[str, Any]) -> None:
        """Raise or warn on all ranks if one of them finds a problem."""
        problems = describe_unmatched_state(run_state.find_unmatched_state(trainer, rank))
        reloaded = run_state.find_reloaded_generators(trainer, rank, self._place(trainer).epoch)
        problems += describe_reloaded_generators(reloaded)
        ranks_of(trainer).raise_on_all(
            lambda: self._raise_or_warn(trainer, problems) if problems else None
        )

    def _raise_or_warn(self, trainer: "Trainer", problems: list[str]) -> None:
        self._reasons += problems
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


def _is_untrained(state: object) -> bool:
    """Return whether a checkpoint was saved before training, as the learning rate finder does.

    No ledger was open then, and no generator had been used that an epoch does not seed.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        return False
    return all(rank.get("ledger") is None for rank in state["ranks"])


def _iterates_again(trainer: "Trainer") -> bool:
    """Return whether Lightning is about to make the iterator of the training loaders again.

    It makes the first one when it loads them, and their workers start then.
    """
    fit = trainer.fit_loop
    resumes = getattr(fit, "is_resuming", False) or fit.epoch_loop.restarting
    return trainer.current_epoch > 0 and not resumes


def _rank_of(state: Mapping[str, Any], trainer: "Trainer") -> dict[str, Any]:
    """Return this rank's state in a checkpoint; empty if the number of ranks has changed."""
    ranks = state["ranks"]
    if is_other_world(state, trainer):
        return {}
    rank: dict[str, Any] = ranks[trainer.global_rank] if trainer.global_rank < len(ranks) else {}
    return rank
