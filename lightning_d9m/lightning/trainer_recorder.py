"""What a Trainer's fit says about itself: read off the Trainer, handed to the recorder."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_d9m.errors import LedgerError
from lightning_d9m.hashing.model_tensors import ModelTensors
from lightning_d9m.hashing.output_digest import OutputDigest
from lightning_d9m.hashing.training_state import describe_model, take_snapshot
from lightning_d9m.ledger.folder import create_ledger_folder
from lightning_d9m.ledger.records import Digests, End, Json, RunFacts
from lightning_d9m.lightning.loggers import log_digest, log_drift
from lightning_d9m.lightning.ranks import ranks_of
from lightning_d9m.lightning.run_metadata import describe_run, find_replicated, make_header
from lightning_d9m.lightning.trainer_session import TrainerSession
from lightning_d9m.lightning.weight_snapshots import keep_weights
from lightning_d9m.recording.collective import Ranks
from lightning_d9m.recording.recorder import Policy, Recorder

RecordKind = Literal["initial", "epoch", "final"]
LEDGER_VARIABLE = "LIGHTNING_D9M_LEDGER_DIR"


class TrainerRecorder:
    """The evidence of one Trainer's fits, one after the other.

    Args:
        policy: What the fits are held against, and what a difference means.
        ledger_dir: Folder for ledgers; None takes ``d9m`` under the log directory.
        ignored_metrics: Names or patterns of logged scalars that are not recorded.
    """

    def __init__(
        self, policy: Policy, ledger_dir: Path | None, ignored_metrics: Sequence[str] = ()
    ) -> None:
        self._policy = policy
        self._ledger_dir = ledger_dir
        self._ignored_metrics = tuple(ignored_metrics)
        self._ranks = Ranks(0)
        self._roster: ModelTensors | None = None
        self._recorder: Recorder | None = None
        self._outputs: OutputDigest | None = None
        self._evaluations: list[dict[str, Json]] = []
        self._resumed: dict[str, Json] | None = None
        self.further_settings: dict[str, str | int] = {}
        self._loss: torch.Tensor | None = None
        self._epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        mine = {"_recorder": None, "_outputs": None, "_loss": None, "_roster": None}
        return self.__dict__ | mine | {"_ranks": Ranks(0)}

    def check_reference(self) -> None:
        """Raise now, rather than after the set-up, if the reference cannot be read."""
        self._policy.check_reference()

    def begin(self, trainer: Any, module: Any, run: TrainerSession) -> None:
        """Open the ledger of a fit and record the state that training starts from.

        Raises:
            SettingError: When a switch no longer stands.
        """
        if self._resumed is None:
            self._loss = None
            self._evaluations.clear()
        self._epoch = trainer.current_epoch
        self._roster = ModelTensors(module)
        self._ranks = ranks_of(trainer)
        header, facts, replicated = self._ranks.together(
            lambda: (
                make_header(trainer, run),
                describe_run(trainer, module),
                find_replicated(trainer, module),
            )
        )
        self._recorder = Recorder(
            self._make_folder(trainer, "fit"),
            replace(header, settings={**header.settings, **self.further_settings}),
            policy=self._policy,
            ranks=self._ranks,
            replicated=replicated,
        )
        resumed, self._resumed = self._resumed, None
        self._recorder.begin(facts, resumed)
        if resumed is None:
            self.record(trainer, module, run, "initial")

    @property
    def standing(self) -> dict[str, str] | None:
        """The ledger's folder, and the check of this rank's last record; None without one."""
        return None if self._recorder is None else self._recorder.standing

    @property
    def pending(self) -> dict[str, Any]:
        """What is kept for the next record, as plain values."""
        return {"loss": self._loss_text(), "evaluations": list(self._evaluations)}

    def resume(self, record: Mapping[str, Json], pending: Mapping[str, Any]) -> None:
        """Continue another ledger with the one that ``begin`` opens next.

        Args:
            record: Fields of the record that says so.
            pending: What was pending in the run that wrote the other one.
        """
        self._resumed = {"kind": "resume", **record}
        loss = pending.get("loss")
        number = None if loss is None else float.fromhex(loss)
        self._loss = None if number is None else torch.tensor(number, dtype=torch.float64)
        self._evaluations[:] = pending.get("evaluations", [])

    def keep_loss(self, outputs: object) -> None:
        """Keep the loss of a step as it is, on its device."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # Lightning has detached the loss of an automatic optimization already.
            self._loss = loss.detach() if loss.requires_grad else loss

    def record(self, trainer: Any, module: Any, run: TrainerSession, moment: RecordKind) -> None:
        """Record one moment, and hold it against the reference and the other ranks.

        Raises:
            DriftError: When it disagrees with one of them, unless that is to be a warning.
            LedgerError: When the ledger cannot be written.
            SettingError: When a switch no longer stands.
        """
        if self._recorder is None:  # no batch was trained
            return
        if moment == "epoch":
            self._epoch = trainer.current_epoch
        digests = self._ranks.together(lambda: self._digests_of(trainer, module, run, moment))
        try:
            differing = self._recorder.record(digests)
        finally:
            self._append_evaluations()
        keep_weights(trainer, module, self._recorder.folder.name, moment, self._epoch)
        if moment == "final" or not trainer.is_global_zero:  # the loggers are closed by then
            return
        log_digest(trainer.loggers, digests.totals["weights"], trainer.global_step)
        if self._recorder.compares:
            log_drift(trainer.loggers, differing, trainer.global_step)

    def append(self, record: Mapping[str, Json]) -> None:
        """Write a record of another part, if a ledger is open."""
        if self._recorder is not None:
            self._recorder.append(record)

    def begin_evaluation(self, trainer: Any, module: Any, run: TrainerSession, stage: str) -> None:
        """Begin to digest what an evaluation returns; one that is no part of a fit gets a ledger.

        Raises:
            LedgerError: When the ledger cannot be made.
        """
        if trainer.sanity_checking:  # it counts for nothing
            return
        self._outputs = OutputDigest()
        if trainer.state.fn == "fit":
            return
        self._ranks = ranks_of(trainer)
        header = self._ranks.together(lambda: make_header(trainer, run))
        folder = self._make_folder(trainer, stage)
        self._recorder = Recorder(folder, header, policy=Policy(), ranks=self._ranks)
        model, parameters = describe_model(module)
        precision = {"precision": str(trainer.precision)}
        self._recorder.begin(
            RunFacts(model=model, parameters=parameters, train=[], trainer=precision)
        )
        self._append_model(trainer, module, "initial")

    def keep_outputs(self, outputs: object, batch: int, loader: int) -> None:
        """Digest what one batch of an evaluation returned."""
        if self._outputs is not None and self._recorder is not None:
            self._outputs.add(outputs, loader=loader, batch=batch)

    def end_evaluation(self, trainer: Any, module: Any, stage: str) -> None:
        """Record an evaluation."""
        outputs, self._outputs = self._outputs, None
        if outputs is None or self._recorder is None:
            return
        self._evaluations.append(
            {
                "kind": "evaluation",
                "name": stage,
                "epoch": trainer.current_epoch,
                "step": trainer.global_step,
                **outputs.as_fields(),
                "scalars": self._scalars_of(trainer),
            }
        )
        if trainer.state.fn != "fit":
            self._append_evaluations()
            self._append_model(trainer, module, "final")

    def _append_evaluations(self) -> None:
        """Write evaluations after the digests of their epoch: if both differ, weights come first.

        An evaluation differs because the weights do, far more often than by itself.
        """
        assert self._recorder is not None, "a recorder is there when an evaluation has been kept"
        for record in self._evaluations:
            self._recorder.append(record)
        self._evaluations.clear()

    def _append_model(self, trainer: Any, module: Any, moment: RecordKind) -> None:
        """Record what is evaluated, so that other weights are told from other arithmetic."""
        assert self._recorder is not None, "begin_evaluation() comes first"
        snapshot = take_snapshot(module)
        digests = Digests(
            moment=moment,
            epoch=trainer.current_epoch,
            step=trainer.global_step,
            totals=snapshot.totals,
            groups=snapshot.groups,
        )
        self._recorder.append(digests.as_record())

    def end(self, status: Literal["finished", "failed"], error: str | None = None) -> None:
        """Close the ledger of the fit, if one is open."""
        if self._recorder is not None:
            self._append_evaluations()
        recorder, self._recorder = self._recorder, None
        self._loss = self._roster = None
        if recorder is not None:
            recorder.end(End(status=status, error=error))

    def _digests_of(
        self, trainer: Any, module: Any, run: TrainerSession, moment: RecordKind
    ) -> Digests:
        if moment != "final":  # other callbacks may have given back their switches by then
            run.verify()
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        snapshot = take_snapshot(self._roster or module, trainer.optimizers, schedulers)
        return Digests(
            moment=moment,
            epoch=self._epoch,
            step=trainer.global_step,
            totals=snapshot.totals,
            groups=snapshot.groups,
            loss=self._loss_text(),
            scalars={} if moment == "initial" else self._scalars_of(trainer),
        )

    def _loss_text(self) -> str | None:
        return None if self._loss is None else float(self._loss).hex()

    def _scalars_of(self, trainer: Any) -> dict[str, str]:
        """Return what was logged; a vector is left out: what training depends on is digested."""
        return {
            name: float(value).hex()
            for name, value in sorted(trainer.callback_metrics.items())
            if torch.numel(value) == 1
            and not any(fnmatchcase(name, pattern) for pattern in self._ignored_metrics)
        }

    def _make_folder(self, trainer: Any, kind: str) -> Path:
        """Make the ledger's folder on rank 0 and tell the other ranks its name."""
        # A collective: every rank asks. Some loggers have no folder of their own.
        log_dir = trainer.log_dir or trainer.default_root_dir
        chosen = os.environ.get(LEDGER_VARIABLE) or self._ledger_dir or Path(log_dir, "d9m")
        made: tuple[str, str | None] = ("", None)
        if trainer.is_global_zero:
            try:
                made = (str(create_ledger_folder(Path(chosen), kind)), None)
            except LedgerError as error:
                made = ("", str(error))
        folder, problem = trainer.strategy.broadcast(made)
        if problem is not None:  # on all ranks together, so that none waits for the others
            raise LedgerError(problem)
        # Several nodes need not share a file system: each keeps the ledgers of its own ranks.
        with suppress(OSError):  # the file in it cannot be made either, and says why
            Path(folder).mkdir(parents=True, exist_ok=True)
        return Path(folder)
