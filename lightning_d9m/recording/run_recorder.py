"""The recorder of a training: what the callback of a Trainer and the recorder of a loop share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from lightning_d9m.control.environment import control_is_on
from lightning_d9m.control.settings import Settings
from lightning_d9m.hashing.flat_parameters import find_flat_layouts
from lightning_d9m.hashing.model_tensors import ModelTensors
from lightning_d9m.hashing.shards import reshard
from lightning_d9m.hashing.training_state import (
    PartialSnapshot,
    describe_model,
    take_partial_snapshot,
)
from lightning_d9m.ledger.format.records import Digests, End, Header, Json, RunFacts, Scalar
from lightning_d9m.ledger.program import capture_program
from lightning_d9m.ledger.stack import capture_stack
from lightning_d9m.recording.collective import Ranks
from lightning_d9m.recording.ledger_recorder import LedgerRecorder, Policy
from lightning_d9m.recording.loader_facts import describe_loader
from lightning_d9m.recording.replicated_state import (
    ReplicatedState,
    describe_division,
    find_replicated_state,
)
from lightning_d9m.recording.whole_state import complete_snapshot
from lightning_d9m.version import __version__

NO_SCALARS: Mapping[str, str] = MappingProxyType({})


class RunRecorder:
    """Opens the ledger of a training, digests its state at each moment, and closes the ledger.

    Attributes:
        model_tensors: The tensors of the model; None if no ledger is open.
        ranks: The ranks of the training.
        loss: The last loss, on its device; None without one.
        digest: The digest of the weights that were digested last; None before the first.
        folder: The folder of the ledger that was opened last; None before.
        open_recorders: Those of this process with an open ledger.
    """

    open_recorders: ClassVar["WeakSet[RunRecorder]"] = WeakSet()

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._recorder: LedgerRecorder | None = None
        self._model: torch.nn.Module | None = None
        self.model_tensors: ModelTensors | None = None
        self.ranks = Ranks(0)
        self.loss: torch.Tensor | None = None
        self.digest: str | None = None
        self.folder: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_recorder": None,
            "_model": None,
            "model_tensors": None,
            "ranks": Ranks(0),
            "loss": None,
        }

    @property
    def is_open(self) -> bool:
        """True while a ledger is open."""
        return self._recorder is not None

    @property
    def compares(self) -> bool:
        """True if the recorder compares the training with a reference or across ranks."""
        return self._recorder is not None and self._recorder.compares

    @property
    def ledger_position(self) -> dict[str, str] | None:
        """The ledger's folder, and the check of this rank's last record; None without one."""
        return None if self._recorder is None else self._recorder.ledger_position

    @property
    def loss_text(self) -> str | None:
        """``float.hex()`` of the last loss; None without one."""
        return None if self.loss is None else float(self.loss).hex()

    def load_loss(self, text: str | None) -> None:
        """Restore a loss from what ``loss_text`` was."""
        number = None if text is None else float.fromhex(text)
        self.loss = None if number is None else torch.tensor(number, dtype=torch.float64)

    def begin(
        self,
        ranks: Ranks,
        model: torch.nn.Module,
        describe: Callable[[], tuple[Header, RunFacts, ReplicatedState | None]],
        make_folder: Callable[[], Path],
        *,
        wrapped: torch.nn.Module | None = None,
        resumed: Mapping[str, Json] | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Open a ledger, and write its header and the facts of the training.

        ``describe`` returns the header, the facts, and what must be equal on all ranks;
        ``make_folder`` makes the ledger's folder, the same on all ranks. ``wrapped`` is the
        model with the wrappers around it, if it has any; ``resumed`` the record that names
        the continued ledger. A policy takes the place of the recorder's.

        Raises:
            LedgerError: If the ledger cannot be written, or the reference not be read.
            ReferenceRefusedError: If the reference comes from another experiment.
            StackDifferenceError: If the reference's stack differs, unless the policy allows it.
        """
        self.ranks = ranks
        header, facts, replicated = ranks.raise_on_all(describe)
        self.folder = make_folder()
        self._recorder = LedgerRecorder(
            self.folder, header, policy=policy or self._policy, ranks=ranks, replicated=replicated
        )
        self._model = model if wrapped is None else wrapped
        self.model_tensors = ModelTensors(model)
        self.open_recorders.add(self)
        self._recorder.begin(facts, resumed)

    def take(
        self,
        moment: str,
        *,
        epoch: int,
        step: int,
        optimizers: Sequence[Any] = (),
        schedulers: Sequence[Any] = (),
        scalars: Mapping[str, str] = NO_SCALARS,
        verify: Callable[[], None] | None = None,
    ) -> Digests:
        """Digest the state at a moment; every rank must call this.

        The moment is ``"initial"``, ``"epoch"`` or ``"final"``. Scalars are ``float.hex()``
        of numbers; ``verify`` raises a ``SettingError`` if a switch was changed.
        """
        partial = self.ranks.raise_on_all(
            lambda: self._read(optimizers, schedulers, verify, sketches=moment == "epoch")
        )
        snapshot = complete_snapshot(partial, self.ranks)
        self.digest = snapshot.totals["weights"]
        return Digests(
            moment=moment,
            epoch=epoch,
            step=step,
            totals=snapshot.totals,
            groups=snapshot.groups,
            loss=self.loss_text,
            scalars=scalars,
            sketches=snapshot.sketches,
        )

    def _read(
        self,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        verify: Callable[[], None] | None,
        *,
        sketches: bool,
    ) -> PartialSnapshot:
        assert self.model_tensors is not None, "begin() comes first"
        assert self._model is not None, "begin() comes first"
        if verify is not None:
            verify()
        reshard(self._model)
        layouts = find_flat_layouts(self._model)
        return take_partial_snapshot(
            self.model_tensors, optimizers, schedulers, layouts, sketches=sketches
        )

    def record(self, digests: Digests) -> int:
        """Write what ``take`` returned, and compare it; return the number of differences.

        Raises:
            DriftError: If it differs and ``on_drift`` is ``"raise"``.
            LedgerError: If the ledger cannot be written.
        """
        assert self._recorder is not None, "begin() comes first"
        return self._recorder.record(digests)

    def append(self, record: Mapping[str, Json]) -> None:
        """Write a record that is not compared now, if a ledger is open."""
        if self._recorder is not None:
            self._recorder.append(record)

    def end(self, end: End) -> None:
        """Close the ledger, if one is open."""
        recorder, self._recorder = self._recorder, None
        self.open_recorders.discard(self)
        self._model = self.model_tensors = self.loss = None
        if recorder is not None:
            recorder.end(end)


def describe_training(  # noqa: PLR0913 - one keyword for each fact
    ranks: Ranks,
    settings: Settings,
    layout: Mapping[str, Any],
    model: torch.nn.Module,
    wrapped: torch.nn.Module,
    *,
    fit: int,
    further: Mapping[str, Scalar] = MappingProxyType({}),
    loaders: Iterable[object] = (),
    trainer: Mapping[str, Scalar] = MappingProxyType({}),
    optimizers: Sequence[Any] = (),
    schedulers: Sequence[Any] = (),
) -> tuple[Header, RunFacts, ReplicatedState | None]:
    """Return the header of this rank's ledger, the facts, and what must be equal on all ranks.

    ``layout`` is what the stack says of processes and devices, ``"world.size"`` their number;
    ``wrapped`` is the model with the wrappers around it, and ``trainer`` has settings that two
    comparable trainings must share.
    """
    layouts = find_flat_layouts(wrapped)
    control = {} if control_is_on() else {"control": "off"}
    header = Header(
        rank=ranks.rank,
        world_size=layout["world.size"],
        fit=fit,
        seed=settings.seed,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        settings={**settings.as_record(), **control, **further},
        stack=capture_stack({**layout, **describe_division(model, layouts)}),
        package=__version__,
        program=capture_program() if ranks.rank == 0 else {},
    )
    described, parameters = describe_model(model, layouts)
    train = tuple(describe_loader(loader) for loader in loaders)
    facts = RunFacts(model=described, parameters=parameters, train=train, trainer=trainer)
    if layout["world.size"] == 1:
        return header, facts, None
    return header, facts, find_replicated_state(model, optimizers, schedulers, layouts=layouts)
