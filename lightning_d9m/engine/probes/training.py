"""The training whose batches are probed, its moments, and probes that take nothing.

Every recorded run imports this. What takes values, in the other files of the folder, is loaded by
the runs that take some.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

from torch import nn

from lightning_d9m.engine.ledger.kinds import VALIDATION

# Read-only, because it is the default of arguments: one call must not leave an entry for another.
NOTHING: Mapping[str, Any] = MappingProxyType({})
Recorded: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Returns a context in which operations are recorded."""


class ProbePoint(NamedTuple):
    """A batch of the training: epoch, global step when it began, and index within the epoch."""

    epoch: int
    step: int
    batch: int

    @property
    def folder(self) -> str:
        """The name of the folder for its values."""
        return f"epoch-{self.epoch}.step-{self.step}.batch-{self.batch}"


class StatePoint(NamedTuple):
    """A moment whose state a ledger records: ``"initial"``, ``"epoch"`` or ``"final"``."""

    epoch: int
    step: int
    moment: str

    @property
    def folder(self) -> str:
        """The name of the folder for its values."""
        return f"epoch-{self.epoch}.step-{self.step}.{self.moment}"


@dataclass(frozen=True)
class Training:
    """The training whose batches are probed, and whose state is recorded.

    Attributes:
        model: The model, as the user's optimizers see it.
        wrapped: The model with the wrappers around it; None if it has none.
        list_optimizers: Returns the optimizers.
        list_schedulers: Returns the learning rate schedulers.
        wrap_steps: Records operations while the training makes a step, until a stack is closed;
            the training then calls ``take_step`` itself. Without it the optimizers call
            ``take_step``, and operations are recorded from the start of a batch on, but for those
            of an optimizer.
        is_compiled: See ``hook_model``.
        records_gradients: Whether the ledger has the gradients that are there at a record.
    """

    model: nn.Module
    wrapped: nn.Module | None = None
    # Functions and not lists: hooks and callbacks may put other optimizers and schedulers in their
    # place while the training runs.
    list_optimizers: Callable[[], Sequence[Any]] = tuple
    list_schedulers: Callable[[], Sequence[Any]] = tuple
    wrap_steps: Callable[[ExitStack, Recorded], None] | None = None
    is_compiled: bool = False
    records_gradients: bool = False


class Watched:
    """The watch of this process over what is read from outside; see ``outside.py``.

    Attributes:
        watch: It; None while nothing watches.
    """

    # In a class and not a variable of the module, of which `from ... import` would take the value
    # that it had then. `outside.py` sets it, so a run without a watch need not import that module.
    watch: ClassVar[Any] = None


class Probes:
    """The probes of a run that takes none; those of ``BatchProbes`` do what the methods say.

    Attributes:
        evidence: What keeps values for ``d9m locate``; None if they are not kept.
    """

    evidence: Any = None

    def __init__(self) -> None:
        self._validated = 0  # batches of validations since the last batch of the training

    @property
    def are_idle(self) -> bool:
        """True if nothing takes the point of a batch, so that it need not be read."""
        return Watched.watch is None

    def start(self, point: ProbePoint, batch: Any = None, scaler: Any = None) -> None:  # noqa: ARG002 - taken by BatchProbes
        """Record the state at the start of a batch, and hook the model, if its step is probed.

        ``scaler`` is the ``torch.amp.GradScaler``, where the precision has one.
        """
        if Watched.watch is not None:
            Watched.watch.mark("batch", *point)
        # A batch of the training; those of validations have numbers from VALIDATION on.
        if point.batch < VALIDATION:
            self._validated = 0

    def start_validation(self, epoch: int, step: int, batch: Any, scaler: Any = None) -> None:
        """Begin a batch of a validation, which belongs to the training batch before it."""
        number = VALIDATION + self._validated
        self._validated += 1
        # The step is counted by now, and a point has the global step when its training batch began.
        # A sanity check comes before the first step.
        self.start(ProbePoint(epoch, max(step - 1, 0), number), batch, scaler)

    def take_batch(self, batch: Any) -> None:
        """Take the batch, or what the model is given of it; None if that is not known."""

    def take_loss(self, loss: Any) -> None:
        """Take the loss that is about to be differentiated, or was."""

    def take_step(self, optimizer: Any, *_: object) -> None:
        """Take the gradients and the state that an optimizer is about to use.

        The state was there when the batch began, too. What changed since would look like a change
        of the weights in the next batch.
        """

    def end(self, loss: Any = None, scalars: Mapping[str, Any] = NOTHING) -> None:
        """Record the results of the batch, and write its records."""

    def save_state(self, point: StatePoint) -> None:
        """Keep the state that the ledger is about to record, if values are kept at this step."""

    def unhook(self) -> None:
        """Remove the hooks."""

    def flush(self) -> None:
        """End the batch and write all records."""

    def close(self) -> None:
        """Remove the hooks and write the pending records."""
