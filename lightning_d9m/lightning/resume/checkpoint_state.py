"""The state for an exact resume beyond Lightning's own, in checkpoints; see ``saved_state``."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

from lightning_d9m.attribute_patches import replace_method
from lightning_d9m.lightning.checkpoint_io import add_manifests
from lightning_d9m.lightning.recording.trainer_recorder import TrainerRecorder
from lightning_d9m.lightning.resume import run_state
from lightning_d9m.lightning.resume.resumable_fit import InexactResumeAction, ResumableFit
from lightning_d9m.lightning.saved_state import CALLBACKS, KEY, SavedState
from lightning_d9m.lightning.strategies import is_sharded
from lightning_d9m.lightning.trainer_session import TrainerSession

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


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
