"""The recorder of a Trainer: reads facts and state from it and writes them to the ledger."""

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from fsspec.core import strip_protocol
from fsspec.utils import get_protocol

from lightning_d9m.attribute_patches import wrap_method
from lightning_d9m.engine.control.environment import control_is_on
from lightning_d9m.engine.hashing.output_digest import (
    LogicalOutputDigest,
    OutputDigest,
    merge_fields,
)
from lightning_d9m.engine.ledger.folder import LEDGER_VARIABLE, create_ledger_folder, state_folder
from lightning_d9m.engine.ledger.format.records import (
    End,
    Evaluation,
    Header,
    RunFacts,
    Scalar,
)
from lightning_d9m.engine.ledger.stack import LOGICAL_RANKS, capture_compiler
from lightning_d9m.engine.probes.training import ProbePoint, Recorded, Training
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.description import describe_training
from lightning_d9m.engine.recording.run import (
    Run,
    RunOptions,
    share_new_folder,
    shorten_path,
)
from lightning_d9m.errors import LedgerError
from lightning_d9m.integrations.lightning.trainer_session import TrainerSession
from lightning_d9m.integrations.trainer.lightning_private import is_compiled, list_loaders
from lightning_d9m.integrations.trainer.packages import rank_zero
from lightning_d9m.integrations.trainer.trainer_attributes import (
    Trainer,
    find_attributes,
    get_logical_ranks,
    list_schedulers,
    ranks_of,
)
from lightning_d9m.text import cut_digests, escape, pluralize

_NAME = "d9m"
_LOCAL = ("file", "local")
_LONGEST = 4096
# What a program may not expect that starts its second fit like the first.
_SECOND_FIT = (
    ". This second fit drew other numbers than the first; to repeat a fit, call seed_everything() "
    "with the same number before each, or train within `with "
    "lightning_d9m.deterministic(seed={seed}):`."
)


RecordKind = Literal["initial", "epoch", "final"]


class TrainerRecorder:
    """Records the fits and evaluations of one Trainer, one after the other.

    See ``make_ledger_folder`` for ``spare_cwd``.

    Attributes:
        run: What writes the ledgers of fits.
        evaluation: What writes those of evaluations outside a fit.
    """

    def __init__(
        self,
        options: RunOptions,
        ledger_dir: str | Path | None,
        ignored_metrics: Sequence[str] = (),
        *,
        spare_cwd: bool = False,
    ) -> None:
        self.run, self.evaluation = Run(options), Run(RunOptions())
        self._make_folder = partial(make_ledger_folder, ledger_dir=ledger_dir, spare_cwd=spare_cwd)
        self._ignored_metrics = tuple(ignored_metrics)
        self._outputs: OutputDigest | LogicalOutputDigest | None = None
        self._epoch = self._epochs = 0  # the last one, and the number that were recorded
        self._step: int | None = None  # of the batch that began last

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_outputs": None}

    @property
    def _open_run(self) -> Run:
        """The evaluation, if it has the open ledger; else the run of fits."""
        return self.evaluation if self.evaluation.is_open else self.run

    def begin(self, trainer: Trainer, session: TrainerSession) -> None:
        """Open the ledger of a fit and record the state that training starts from.

        Raises:
            SettingError: If a switch has been changed since the run began.
        """
        self._epoch, self._epochs, self._step = trainer.current_epoch, 0, None

        def wrap_steps(stack: ExitStack, recorded: Recorded) -> None:
            # The methods of the strategy: within them, operations are those of the program and not
            # of callbacks or loggers.
            for name in ("training_step", "backward", "validation_step"):
                wrap_method(stack, trainer.strategy, name, recorded)

        training = Training(
            trainer.lightning_module,
            trainer.model,
            lambda: trainer.optimizers,
            partial(list_schedulers, trainer),
            wrap_steps,
            is_compiled=is_compiled(trainer.lightning_module),
        )
        settings = self.run.options.as_record()
        is_new = self.run.begin(
            ranks_of(trainer),
            training,
            lambda: _describe_run(trainer, training, session, settings),
            lambda: self._make_folder(trainer, kind="fit"),
        )
        # A resumed run continues its ledger, in which the state is recorded already.
        if is_new:
            self.record(trainer, session, "initial")

    def start_batch(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """Probe the state at the start of a batch."""
        self._step = trainer.global_step
        self.run.take_data(batch)
        # This runs before every batch of every training, most of which record no probes.
        if self.run.probes.are_idle:
            return
        point = ProbePoint(trainer.current_epoch, trainer.global_step, batch_idx)
        self.run.probes.start(point, batch, getattr(trainer.precision_plugin, "scaler", None))

    def end_batch(self, trainer: Trainer, outputs: object) -> None:
        """Keep the loss on its device, without waiting for it, and write the probes of a batch."""
        # Lightning gives a dict. In each batch, `Mapping` would ask an abstract class.
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # Lightning has detached the loss of an automatic optimization already.
            self.run.loss = loss.detach() if loss.requires_grad else loss
        if not self.run.probes.are_idle:
            scalars = trainer.callback_metrics if "scalar" in self.run.options.kinds else {}
            taken = {name: v for name, v in scalars.items() if self._takes(name)}
            self.run.probes.end(loss, taken)
        # After the probes, so that records have the order of the training.
        if self.run.digests_steps:
            self.run.end_step(trainer.current_epoch, trainer.global_step)

    def start_validation_batch(self, trainer: Trainer, batch: Any) -> None:
        """Probe a batch of a validation within a fit, which may feed back into the training."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            step = trainer.global_step
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self.run.probes.start_validation(trainer.current_epoch, step, batch, scaler)

    def reduce_loss(self, trainer: Trainer) -> None:
        """With logical ranks, replace the loss by the mean of all; every rank must call this."""
        reduce = getattr(trainer.strategy, "reduce_loss", None)
        number = None if reduce is None else reduce()
        if number is not None:
            self.run.loss = torch.tensor(number, dtype=torch.float64, device="cpu")

    def record(self, trainer: Trainer, session: TrainerSession, moment: RecordKind) -> None:
        """Record one moment, and compare it with the reference and across ranks.

        Raises:
            DriftError: If it differs from either and ``on_drift`` is ``"raise"``.
            LedgerError: If the ledger cannot be written.
            SettingError: If a switch has been changed since the run began.
        """
        if not self.run.is_open:  # no batch has been trained
            return
        if moment == "epoch":
            self._epoch = trainer.current_epoch
        self.reduce_loss(trainer)
        run = self.run
        differing = run.record(
            moment,
            epoch=self._epoch,
            step=trainer.global_step,
            scalars={} if moment == "initial" else self._logged_scalars(trainer),
            # Other callbacks may have restored their switches at the end.
            verify=None if moment == "final" else session.verify,
        )
        self._epochs += moment == "epoch"
        if moment == "final" or not trainer.is_global_zero:  # the loggers are closed by then
            return
        log_digest(trainer.loggers, str(run.digest), trainer.global_step)
        if run.compares:  # the entries that differ from the reference or across ranks
            for logger in trainer.loggers:
                logger.log_metrics({_DRIFT: float(differing)}, step=trainer.global_step)

    def record_exception(self, trainer: Trainer) -> None:
        """Record the state of this rank where an exception ends a run."""
        place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        self._open_run.record_exception(**place)

    def log_summary(self, trainer: Trainer, session: TrainerSession) -> None:
        """Log one line on rank 0: epochs, digest of the weights, and ledger of the last fit."""
        folder, digest = self.run.folder, self.run.digest
        if folder is None or digest is None or not trainer.is_global_zero:
            return
        second = _SECOND_FIT.format(seed=session.settings.seed) if session.fit == 1 else ""
        rank_zero().rank_zero_info(
            f"d9m: {pluralize(self._epochs, 'epoch')} recorded, weights "
            f"{cut_digests([digest])[0]}, ledger {escape(shorten_path(folder), _LONGEST)}{second}"
        )

    def log_return(self, trainer: Trainer) -> None:
        """Log the command that returns to the step in which a fit failed, on rank 0."""
        if trainer.state.fn == "fit" and self._step is not None:
            self.run.log_return(self._step)

    def begin_evaluation(self, trainer: Trainer, session: TrainerSession) -> None:
        """Begin to digest the outputs of an evaluation; outside a fit, open a ledger for it.

        Raises:
            LedgerError: If the ledger cannot be made.
        """
        if trainer.sanity_checking:  # its outputs are not recorded
            return
        logical = get_logical_ranks(trainer) is not None
        block = trainer.strategy.block if logical else None
        self._outputs = OutputDigest() if block is None else LogicalOutputDigest(block)
        if trainer.state.fn == "fit":
            return
        training = Training(trainer.lightning_module, trainer.model)
        self.evaluation.begin(
            ranks_of(trainer),
            training,
            lambda: _describe_run(trainer, training, session, {}, trains=False),
            lambda: self._make_folder(trainer, kind=session.evaluated),
        )
        # The evaluated weights, to tell different weights from different arithmetic.
        self.evaluation.record("initial", epoch=trainer.current_epoch, step=trainer.global_step)

    def end_evaluation_batch(self, outputs: object, batch: int, loader: int) -> None:
        """Write the probes of a batch of an evaluation, and digest its outputs."""
        self.run.probes.end()
        if self._outputs is not None and self._open_run.is_open:
            self._outputs.add(outputs, loader=loader, batch=batch)

    def end_evaluation(self, trainer: Trainer, stage: str) -> None:
        """Record an evaluation."""
        outputs, self._outputs, run = self._outputs, None, self._open_run
        if outputs is None or not run.is_open:
            return
        if isinstance(outputs, LogicalOutputDigest):
            fields = merge_fields(trainer.strategy.gather_values(outputs.as_plain()))
        else:
            fields = outputs.as_fields()
        record = Evaluation(
            name=stage,
            epoch=trainer.current_epoch,
            step=trainer.global_step,
            scalars=self._logged_scalars(trainer),
            **fields,
        )
        run.probes.flush()  # the probes of the batches before come first
        run.append(record)
        if run is self.evaluation:
            run.record("final", epoch=trainer.current_epoch, step=trainer.global_step)

    def end(self, end: End) -> None:
        """Close the ledger that is open, if there is one, and remove every hook."""
        self._open_run.end(end)

    def _takes(self, metric: str) -> bool:
        return not any(fnmatchcase(metric, pattern) for pattern in self._ignored_metrics)

    def _logged_scalars(self, trainer: Trainer) -> dict[str, str]:
        """Return the logged scalars; vectors are left out.

        With logical ranks they are those of rank 0, where the first logical rank is, whatever the
        number of processes. Every rank must call this.
        """
        scalars = {
            # Hexadecimal, because a decimal text may round.
            name: float(value).hex()
            for name, value in sorted(trainer.callback_metrics.items())
            if torch.numel(value) == 1 and self._takes(name)
        }
        if get_logical_ranks(trainer) is None:
            return scalars
        first: dict[str, str] = trainer.strategy.gather_values(scalars)[0]
        return first


def _describe_run(
    trainer: Trainer,
    training: Training,
    session: TrainerSession,
    further: Mapping[str, Scalar],
    *,
    trains: bool = True,
) -> tuple[Header, RunFacts, Any]:
    """Return header and facts of a ledger, and what ranks must have in common if it trains."""
    layout: dict[str, Scalar] = {
        "world.size": trainer.world_size,
        "world.nodes": trainer.num_nodes,
        "world.devices_per_node": trainer.num_devices,
        "world.strategy": type(trainer.strategy).__name__,
        "world.accelerator": type(trainer.accelerator).__name__,
    }
    model = trainer.lightning_module
    if is_compiled(model) or any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None  # noqa: SLF001 - module.compile() leaves no other trace
        for module in model.modules()
    ):
        # Compiled code depends on the compiler and its settings, which other trainings need not
        # agree on.
        layout |= capture_compiler()
    if (logical_ranks := get_logical_ranks(trainer)) is not None:
        layout[LOGICAL_RANKS] = logical_ranks
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
        layout,
        training,
        fit=session.fit,
        further={**({"overridden": overridden} if overridden else {}), **further},
        loaders=list_loaders(trainer.fit_loop) if trains else (),
        trainer=shared,
    )
    return header, facts, replicated if trains else None


def describe_end(trainer: Trainer, stage: str) -> str | None:
    """Return what ended a fit that finished; None of another run."""
    if stage != "fit":
        return None
    if not trainer.should_stop:
        is_cut = trainer.max_steps == trainer.global_step
        limit = ("max_steps", trainer.max_steps) if is_cut else ("max_epochs", trainer.max_epochs)
        return "=".join(map(str, limit))
    hooked = (*trainer.callbacks, trainer.lightning_module)
    names = [
        type(owner).__name__
        for owner in hooked
        if any(
            "should_stop" in find_attributes(each, "STORE_ATTR")
            for kind in type(owner).__mro__
            for each in vars(kind).values()
            if inspect.isfunction(each)
        )
    ]
    return f"trainer.should_stop, which {' or '.join(names) or 'the program'} sets"


_WEIGHTS = "d9m/weights"
_DRIFT = "d9m/drift"


def log_digest(loggers: Iterable[Any], digest: str, step: int) -> None:
    """Log the digest of the weights as text with each logger.

    TensorBoard keeps one text for each epoch. MLflow (a tag of the run), W&B (the summary of the
    run) and CSV (a hyperparameter in hparams.yaml) keep the last. A logger of another class gets
    none: it may keep only what its last call of ``log_hyperparams`` had.
    """
    for logger in loggers:
        # By what the object can do, because importing the loggers would load packages that the
        # program does not use.
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_text"):
            experiment.add_text(_WEIGHTS, digest, step)
        elif hasattr(experiment, "set_tag"):
            experiment.set_tag(logger.run_id, _WEIGHTS, digest)
        elif hasattr(getattr(experiment, "summary", None), "__setitem__"):
            experiment.summary[_WEIGHTS] = digest
        elif hasattr(experiment, "log_hparams"):
            logger.log_hyperparams({_WEIGHTS: digest})


def make_ledger_folder(
    trainer: Trainer, ledger_dir: str | Path | None, kind: str, *, spare_cwd: bool = False
) -> Path:
    """Make the folder of a ledger on rank 0, and return its path on all ranks.

    ``kind`` is the first part of its name, such as ``"fit"``. With ``spare_cwd`` nothing is
    written into the working folder if the Trainer does not write there either, because the
    program has not asked for a ledger.

    Raises:
        LedgerError: On all ranks, if no folder can be made.
    """
    log_dir = trainer.log_dir  # a collective: every rank calls it

    def create() -> Path:
        parent = _choose_parent(trainer, log_dir, ledger_dir, spare_cwd=spare_cwd)
        return create_ledger_folder(parent, kind)

    # A program that overrides `is_global_zero` may leave a single process without a rank 0.
    creates = trainer.is_global_zero or trainer.world_size == 1
    advice = (
        f"Set ledger_dir, or the variable {LEDGER_VARIABLE}, to a local folder that this process "
        "may write to."
    )
    # Not the strategy's broadcast, which pickles.
    return share_new_folder(ranks_of(trainer), create if creates else None, advice)


def _choose_parent(
    trainer: Trainer, log_dir: str | None, ledger_dir: str | Path | None, *, spare_cwd: bool
) -> Path:
    # The variable comes first: commands that run the program set it to find the ledger.
    if chosen := os.environ.get(LEDGER_VARIABLE) or ledger_dir:
        if (local := _find_local(chosen)) is None:
            raise LedgerError(
                f"The folder for ledgers is {str(chosen)!r}; allowed: a local folder, because a "
                "ledger is a file that grows by one record at a time."
            )
        return local
    preferred = log_dir or trainer.default_root_dir
    # Programs list these folders, and expect nothing else there.
    saved = _list_local(getattr(c, "dirpath", None) for c in trainer.checkpoint_callbacks)
    excluded = dict.fromkeys(saved, "is the folder of the checkpoints")
    if spare_cwd:
        # Where a logger or a checkpoint callback writes.
        saves = trainer.state.fn == "fit" and not trainer.fast_dev_run
        written = _list_local(logger.save_dir for logger in trainer.loggers)
        written |= saved if saves else set()
        if not any(folder.is_relative_to(Path.cwd()) for folder in written):
            unused = "is the working folder, and this Trainer writes no files into it"
            excluded.setdefault(Path.cwd(), unused)
    for folder in (preferred, trainer.default_root_dir, Path.cwd()):
        local = _find_local(folder)
        if local is not None and local.absolute() not in excluded:
            parent = local / _NAME
            break
    else:
        parent = state_folder() if spare_cwd else Path.cwd() / "lightning_logs" / _NAME
    if parent != Path(preferred, _NAME) and not str(preferred).startswith("file:"):
        local = _find_local(preferred)
        reason = excluded.get(local.absolute(), "") if local is not None else ""
        rank_zero().rank_zero_info(
            f"The ledger is written to {parent}, because {preferred} "
            f"{reason or 'is not a local folder'}. Set "
            f"{LEDGER_VARIABLE} to choose another folder."
        )
    return parent


def _list_local(folders: Iterable[str | Path | None]) -> set[Path]:
    paths = [_find_local(folder) for folder in folders if folder is not None]
    return {folder.absolute() for folder in paths if folder is not None}


def _find_local(folder: str | Path) -> Path | None:
    """Return the path of a folder, even of a URL such as ``file:///logs``; None if not local."""
    if "://" not in str(folder):
        return Path(folder)
    return Path(strip_protocol(str(folder))) if get_protocol(str(folder)) in _LOCAL else None
