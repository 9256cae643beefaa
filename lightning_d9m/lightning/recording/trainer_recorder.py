"""The recorder of a Trainer: reads facts and state from it and writes them to the ledger."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from lightning_d9m.control.environment import control_is_on
from lightning_d9m.hashing.output_digest import LogicalOutputDigest, OutputDigest
from lightning_d9m.ledger.format.records import (
    End,
    Evaluation,
    Header,
    Json,
    Resume,
    RunFacts,
    Scalar,
)
from lightning_d9m.ledger.stack import LOGICAL_RANKS, capture_compiler
from lightning_d9m.lightning.lightning_private import is_compiled, list_loaders
from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.lightning.recording.ledger_location import make_ledger_folder
from lightning_d9m.lightning.saved_state import PendingRecords
from lightning_d9m.lightning.trainer_ranks import ranks_of
from lightning_d9m.lightning.trainer_session import TrainerSession
from lightning_d9m.ranks.ranks import Ranks
from lightning_d9m.recording.rank_agreement import ReplicatedState
from lightning_d9m.recording.run_recorder import Policy, RunRecorder, describe_training
from lightning_d9m.text import cut_digests, escape, pluralize

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


_LONGEST = 4096


@dataclass
class FitSummary:
    """The last fit in a few words.

    The digest is that of the weights in the last record; the number of epochs that of those
    recorded.
    """

    ledger: str | None = None
    digest: str | None = None
    epochs: int = 0

    def add(self, moment: str, digest: str) -> None:
        """Note a record."""
        self.digest = digest
        self.epochs += moment == "epoch"

    def log(self, trainer: "Trainer", fit: int, seed: int) -> None:
        """Log one line on rank 0."""
        if self.ledger is None or self.digest is None:
            return
        if trainer.is_global_zero:
            folder = os.path.relpath(self.ledger)
            folder = self.ledger if folder.startswith("..") else folder
            rank_zero().rank_zero_info(
                f"d9m: {pluralize(self.epochs, 'epoch')} recorded, weights "
                f"{cut_digests([self.digest])[0]}, ledger {escape(folder, _LONGEST)}"
                + (_describe_second_fit(seed) if fit == 1 else "")
            )


def _describe_second_fit(seed: int) -> str:
    """Return what a program may not expect that seeds again before its second fit."""
    return (
        ". This second fit drew other numbers than the first, even after seed_everything(); to "
        f"repeat a fit, train within `with lightning_d9m.deterministic(seed={seed}):`."
    )


RecordKind = Literal["initial", "epoch", "final"]


class TrainerRecorder:
    """Records the fits and evaluations of one Trainer, one after the other.

    See ``make_ledger_folder`` for ``spare_cwd``.

    Attributes:
        further_settings: Settings that the header of the next ledger records, too.
        summary: The last fit in a few words.
    """

    def __init__(
        self,
        policy: Policy,
        ledger_dir: str | Path | None,
        ignored_metrics: Sequence[str] = (),
        *,
        spare_cwd: bool = False,
    ) -> None:
        self._policy = policy
        self._run = RunRecorder(policy)
        self._make_folder = partial(make_ledger_folder, ledger_dir=ledger_dir, spare_cwd=spare_cwd)
        self._ignored_metrics = tuple(ignored_metrics)
        self._outputs: OutputDigest | LogicalOutputDigest | None = None
        self._evaluations: list[dict[str, Json]] = []
        self._resumed: dict[str, Json] | None = None
        self.further_settings: dict[str, str | int] = {}
        self.summary = FitSummary()
        self._epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_outputs": None}

    def check_reference(self) -> None:
        """Raise a ``LedgerError`` before the setup if the reference cannot be read."""
        self._policy.check_reference()

    def begin(self, trainer: "Trainer", module: "LightningModule", session: TrainerSession) -> None:
        """Open the ledger of a fit and record the state that training starts from.

        Raises:
            SettingError: If a switch has been changed since the run began.
        """
        if self._resumed is None:
            self._run.loss = None
            self._evaluations.clear()
        self._epoch = trainer.current_epoch
        resumed, self._resumed = self._resumed, None
        self._run.begin(
            ranks_of(trainer),
            module,
            lambda: describe_run(trainer, module, session, self.further_settings),
            lambda: self._make_fit_folder(trainer),
            wrapped=trainer.model,
            resumed=resumed,
        )
        if resumed is None:
            self.record(trainer, module, session, "initial")

    def _make_fit_folder(self, trainer: "Trainer") -> Path:
        folder = self._make_folder(trainer, kind="fit")
        self.summary = FitSummary(str(folder))
        return folder

    @property
    def ledger_position(self) -> dict[str, str] | None:
        """The ledger's folder, and the check of this rank's last record; None without one."""
        return self._run.ledger_position

    @property
    def pending(self) -> PendingRecords:
        """The values that wait for the next record."""
        return PendingRecords(self._run.loss_text, list(self._evaluations))

    def resume(self, record: Resume, pending: PendingRecords) -> None:
        """Let the ledger that ``begin`` opens next continue another one.

        ``pending`` is that of the run that wrote the other ledger.
        """
        self._resumed = record.as_record()
        self._run.load_loss(pending.loss)
        self._evaluations[:] = pending.evaluations

    def add_reasons(self, trainer: "Trainer", reasons: Sequence[str]) -> None:
        """Record why a resumed fit is inexact, as found after it has begun.

        The record is another one that names a continued ledger, without a name: readers take only
        the reasons from it.
        """
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        record = Resume(
            parent="",
            parent_check="",
            epoch=trainer.current_epoch,
            step=trainer.global_step,
            batch=batches.ready,
            inexact=tuple(reasons),
        )
        self._run.append(record)

    def keep_loss(self, outputs: object) -> None:
        """Keep the loss of a step on its device, without waiting for it."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # Lightning has detached the loss of an automatic optimization already.
            self._run.loss = loss.detach() if loss.requires_grad else loss

    def keep_step(self, trainer: "Trainer") -> None:
        """Keep the digests of a step, which tell when ranks that drift apart began to."""
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._run.keep_step(trainer.global_step, trainer.optimizers, schedulers)

    def reduce_loss(self, trainer: "Trainer") -> None:
        """With logical ranks, replace the loss by the mean of all; every rank must call this."""
        reduce = getattr(trainer.strategy, "reduce_loss", None)
        number = None if reduce is None else reduce()
        if number is not None:
            self._run.loss = torch.tensor(number, dtype=torch.float64)

    def record(
        self,
        trainer: "Trainer",
        module: "LightningModule",
        session: TrainerSession,
        moment: RecordKind,
    ) -> None:
        """Record one moment, and compare it with the reference and across ranks.

        Raises:
            DriftError: If it differs from either and ``on_drift`` is ``"raise"``.
            LedgerError: If the ledger cannot be written.
            SettingError: If a switch has been changed since the run began.
        """
        if not self._run.is_open:  # no batch has been trained
            return
        if moment == "epoch":
            self._epoch = trainer.current_epoch
        self.reduce_loss(trainer)
        scalars = {} if moment == "initial" else self._logged_scalars(trainer)
        digests = self._run.take(
            moment,
            epoch=self._epoch,
            step=trainer.global_step,
            optimizers=trainer.optimizers,
            schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            scalars=scalars,
            # Other callbacks may have restored their switches at the end.
            verify=None if moment == "final" else session.verify,
        )
        self.summary.add(moment, digests.totals["weights"])
        try:
            differing = self._run.record(digests)
        finally:
            self._append_evaluations()
        assert self._run.folder is not None, "the ledger is open"
        if moment == "final" or not trainer.is_global_zero:  # the loggers are closed by then
            return
        log_digest(trainer.loggers, digests.totals["weights"], trainer.global_step)
        if self._run.compares:
            log_drift(trainer.loggers, differing, trainer.global_step)

    def append(self, record: Mapping[str, Json]) -> None:
        """Write a record, such as one of probes, if a ledger is open."""
        self._run.append(record)

    def begin_evaluation(
        self, trainer: "Trainer", module: "LightningModule", session: TrainerSession, stage: str
    ) -> None:
        """Begin to digest the outputs of an evaluation; outside a fit, open a ledger for it.

        Raises:
            LedgerError: If the ledger cannot be made.
        """
        if trainer.sanity_checking:  # its outputs are not recorded
            return
        logical = getattr(trainer.strategy, "logical_ranks", None) is not None
        block = cast(Any, trainer.strategy).block if logical else None
        self._outputs = OutputDigest() if block is None else LogicalOutputDigest(block)
        if trainer.state.fn == "fit":
            return
        self._run.begin(
            ranks_of(trainer),
            module,
            lambda: describe_run(trainer, module, session, trains=False),
            lambda: self._make_folder(trainer, kind=stage),
            wrapped=trainer.model,
            policy=Policy(),
        )
        self._append_model(trainer, "initial")

    def keep_outputs(self, outputs: object, batch: int, loader: int) -> None:
        """Digest the outputs of one batch of an evaluation."""
        if self._outputs is not None and self._run.is_open:
            self._outputs.add(outputs, loader=loader, batch=batch)

    def end_evaluation(self, trainer: "Trainer", module: "LightningModule", stage: str) -> None:
        """Record an evaluation."""
        outputs, self._outputs = self._outputs, None
        if outputs is None or not self._run.is_open:
            return
        if isinstance(outputs, LogicalOutputDigest):
            outputs.merge(cast(Any, trainer.strategy).gather_values(outputs.as_plain()))
        record = Evaluation(
            name=stage,
            epoch=trainer.current_epoch,
            step=trainer.global_step,
            scalars=self._logged_scalars(trainer),
            **outputs.as_fields(),
        )
        self._evaluations.append(record.as_record())
        if trainer.state.fn != "fit":
            self._append_evaluations()
            self._append_model(trainer, "final")

    def _append_evaluations(self) -> None:
        """Write the evaluations after the digests of their epoch.

        If both differ, the weights are then reported first: they usually cause the difference.
        """
        for record in self._evaluations:
            self._run.append(record)
        self._evaluations.clear()

    def _append_model(self, trainer: "Trainer", moment: RecordKind) -> None:
        """Record the evaluated weights, to tell different weights from different arithmetic."""
        digests = self._run.take(moment, epoch=trainer.current_epoch, step=trainer.global_step)
        self._run.append(digests)

    def end(self, end: End) -> None:
        """Close the ledger of the fit, if one is open."""
        if self._run.is_open:
            self._append_evaluations()
        self._run.end(end)

    def _logged_scalars(self, trainer: "Trainer") -> dict[str, str]:
        """Return the logged scalars; vectors are left out.

        With logical ranks they are those of rank 0, where the first logical rank is, whatever the
        number of processes. Every rank must call this.
        """
        scalars = {
            name: float(value).hex()
            for name, value in sorted(trainer.callback_metrics.items())
            if torch.numel(value) == 1
            and not any(fnmatchcase(name, pattern) for pattern in self._ignored_metrics)
        }
        if getattr(trainer.strategy, "logical_ranks", None) is None:
            return scalars
        first: dict[str, str] = cast(Any, trainer.strategy).gather_values(scalars)[0]
        return first


def describe_run(
    trainer: "Trainer",
    module: "LightningModule",
    session: TrainerSession,
    further: Mapping[str, Scalar] = MappingProxyType({}),
    *,
    trains: bool = True,
) -> tuple[Header, RunFacts, ReplicatedState | None]:
    """Return what the ledger of a run begins with; ranks are compared if it trains."""
    shared: dict[str, Scalar] = {"precision": str(trainer.precision)}
    if trains:
        shared |= {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": str(trainer.gradient_clip_val),
            "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm or "norm"),
        }
    overridden = " ".join(session.overridden if control_is_on() else [])
    header, facts, replicated = describe_training(
        Ranks(trainer.global_rank),
        session.settings,
        _describe_layout(trainer),
        module,
        cast(nn.Module, trainer.model),
        fit=session.fit,
        further={**({"overridden": overridden} if overridden else {}), **further},
        loaders=list_loaders(trainer.fit_loop) if trains else (),
        trainer=shared,
        optimizers=trainer.optimizers,
        schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
    )
    return header, facts, replicated if trains else None


def _is_compiled(model: "LightningModule") -> bool:
    """Return whether a module of a model, or the model, was passed to ``torch.compile``."""
    return is_compiled(model) or any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None  # noqa: SLF001 - module.compile() leaves no other trace
        for module in model.modules()
    )


def _describe_layout(trainer: "Trainer") -> dict[str, Scalar]:
    layout: dict[str, Scalar] = {
        "world.size": trainer.world_size,
        "world.nodes": trainer.num_nodes,
        "world.devices_per_node": trainer.num_devices,
        "world.strategy": type(trainer.strategy).__name__,
        "world.accelerator": type(trainer.accelerator).__name__,
    }
    if _is_compiled(trainer.lightning_module):
        layout |= capture_compiler()
    logical_ranks = getattr(trainer.strategy, "logical_ranks", None)
    if logical_ranks is not None:
        layout[LOGICAL_RANKS] = logical_ranks
    return layout


_WEIGHTS = "d9m/weights"
_DRIFT = "d9m/drift"


def log_digest(loggers: Iterable[Any], digest: str, step: int) -> None:
    """Log the digest of the weights as text with each logger.

    TensorBoard keeps one text for each epoch. MLflow (a tag of the run), W&B (the summary of the
    run) and CSV (a hyperparameter in hparams.yaml) keep the last. A logger of another class gets
    none: it may keep only what its last call of ``log_hyperparams`` had.
    """
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_text"):
            experiment.add_text(_WEIGHTS, digest, step)
        elif hasattr(experiment, "set_tag"):
            experiment.set_tag(logger.run_id, _WEIGHTS, digest)
        elif hasattr(experiment, "summary"):
            experiment.summary[_WEIGHTS] = digest
        elif hasattr(experiment, "log_hparams"):
            logger.log_hyperparams({_WEIGHTS: digest})


def log_drift(loggers: Iterable[Any], differing: int, step: int) -> None:
    """Log the number of entries that differ from the reference or across ranks."""
    for logger in loggers:
        logger.log_metrics({_DRIFT: float(differing)}, step=step)
