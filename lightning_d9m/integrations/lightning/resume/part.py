"""A part of the state of a run that Lightning's checkpoints lack, and the fit that has it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from lightning_d9m.engine.hashing.training_state import ModelTensors
from lightning_d9m.integrations.lightning.trainer_recorder import TrainerRecorder
from lightning_d9m.integrations.lightning.trainer_session import TrainerSession
from lightning_d9m.integrations.trainer.trainer_attributes import Trainer

# Texts and not an enum: `torch.load(weights_only=True)` refuses the classes of a program, and
# msgspec compares a stored text with a `Literal` as with a type.
Phase = Literal["epoch", "batch", "cut", "validation", "within"]
"""See ``LoopPosition``."""

Moment = Literal["load", "reset", "train", "validation", "epoch", "started", "batch"]
"""A point in a fit that resumes, in their order but for ``"validation"``.

``"load"``: the checkpoint has been read. ``"reset"``: the loops are about to read their progress.
``"train"``: training is about to start. ``"validation"``: the loaders of validation have been
loaded. ``"epoch"``: the first epoch is about to start.
``"started"``: its hooks have run. ``"batch"``: the next batch of a partly trained epoch follows.
"""


class Fit:
    """A fit that may save checkpoints and may resume from one, as its parts see it.

    Args:
        trainer: The Trainer.
        session: Its seeds and loaders.
        recorder: The recorder of its ledger.
        accepted: Patterns of the paths of objects that nothing can read, and that steer nothing.

    Attributes:
        tensors: Those of the model.
        has_begun: Whether training has started; not yet while a callback searches for a learning
            rate.
        saved: The state that is resumed, by part, until the first batch; without those of ranks if
            the data of this rank are others now.
        before: The state of the parts that a validation changes, before the one that runs.
        inexact: Why the state that is being captured cannot be resumed exactly.
        unknown: The paths of objects that nothing can read: they may have changed.
    """

    def __init__(
        self,
        trainer: Trainer,
        session: TrainerSession,
        recorder: TrainerRecorder,
        accepted: Sequence[str],
    ) -> None:
        self.trainer, self.session, self.recorder = trainer, session, recorder
        self.accepted = accepted
        self.tensors = ModelTensors(trainer.lightning_module)
        self.has_begun = False
        self.saved: Mapping[str, Any] = {}
        self.before: Mapping[str, Any] = {}
        self.inexact: list[str] = []
        self.unknown: list[str] = []

    @property
    def accepts_breaks(self) -> bool:
        """True if ``on_inexact_resume`` allows an inexact resume."""
        return self.recorder.run.options.on_inexact_resume == "warn"

    @property
    def was_saved_between_epochs(self) -> bool:
        """True if the fit resumes from a checkpoint that was saved between two epochs."""
        return bool(self.saved) and self.saved["position"].phase == "epoch"

    # `ResumableFit` does it. The parts know only this class, because that one imports all of them.
    def report(self, problems: Sequence[str]) -> None:
        """Raise an error about problems, or warn of them."""
        raise NotImplementedError


class Part:
    """A part of the state of a run. A new one is a subclass, named in ``saved_run.PARTS``.

    Attributes:
        name: Its key in a checkpoint.
        form: The type of what ``store`` returns; a checkpoint with another is damaged.
        scope: Whether the state is that of a ``"rank"``, or the same in the whole ``"run"``;
            ``"joined"`` if it is a list, of which the run has the entries of all ranks.
        restored: When ``restore`` is called.
        checked: When ``problems`` is called, on all ranks.
        evaluated: Whether a validation changes it. A validation that was interrupted is run again
            as a whole, so a checkpoint within it has the state before it.
    """

    name: str
    # `Any`, since msgspec takes more than classes, such as a union with None or a list of dicts.
    form: Any = dict[str, Any]
    scope: Literal["rank", "run", "joined"] = "rank"
    # A part may be restored more than once: what runs after the first time, such as the hooks that
    # start an epoch, may change its state again.
    restored: tuple[Moment, ...] = ()
    checked: Moment | None = None
    evaluated = False

    def __init__(self, fit: Fit) -> None:
        self.fit, self.trainer = fit, fit.trainer

    def begin(self) -> None:
        """Note the state that training starts from; called before anything is restored there."""

    def capture(self, phase: Phase) -> Any:
        """Return the present state; add to ``fit.inexact`` what makes it inexact."""
        raise NotImplementedError

    def store(self, captured: Any) -> Any:
        """Return what a checkpoint holds of a state that ``capture`` has returned."""
        return captured

    def restore(self, state: Any, moment: Moment) -> None:
        """Restore what ``store`` has returned."""

    def problems(self, state: Any) -> Iterable[str]:
        """Return why this run cannot be resumed exactly from a stored state."""
        return ()

    def select(self, states: list[Any], rank: int) -> Any:
        """Return the state for a rank, given those of all, where they have logical ranks.

        Between steps all ranks are alike then, but for what belongs to logical ranks.
        """
        return states[0]
