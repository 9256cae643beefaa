"""``Trainer(callbacks=[DeterminismCallback()])``: bit-exact training that writes a ledger.

Each hook calls one function of :mod:`lightning_d9m.integrations.lightning` or of a lower layer.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet, finalize

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.engine.control.environment import EarlyVariables, control_is_on
from lightning_d9m.engine.control.session import (
    InheritedSession,
    capture_session,
    note_seeds,
    session_inherited,
    set_fits,
)
from lightning_d9m.engine.control.settings import (
    CONTROL_VARIABLES,
    INTERRUPTING,
    Settings,
    build_from_variables,
    describe_hash_seed_problem,
    read_names,
    read_path,
    read_settings,
    validate_choice,
    variable_of,
)
from lightning_d9m.engine.ledger.format.records import End
from lightning_d9m.engine.recording.run import RunOptions
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.lightning.resume.resumable_fit import ResumableFit
from lightning_d9m.integrations.lightning.saved_state import record_saves
from lightning_d9m.integrations.lightning.trainer_recorder import TrainerRecorder, describe_end
from lightning_d9m.integrations.lightning.trainer_session import (
    TrainerSession,
    resolve_settings,
    select_given,
)
from lightning_d9m.integrations.strategies.strategies import (
    check_strategy,
    refuse_unread_variable,
    register_strategies,
)
from lightning_d9m.integrations.trainer.lightning_private import wrap_launches
from lightning_d9m.integrations.trainer.packages import (
    combined_base,
    extend_base,
    import_packages,
    loaded_packages,
    rank_zero,
)
from lightning_d9m.integrations.trainer.trainer_attributes import KEY, Trainer, ranks_of

_Callback: Any = combined_base("callbacks.Callback")


class DeterminismCallback(_Callback):  # type: ignore[misc] # of the package that is loaded
    """Makes a Trainer's runs deterministic, and writes and checks the ledger of each fit.

    It works without arguments. Everything that it switches is restored when the run ends.

    Args:
        seed: Base of every seed, from 0 to 4294967295. None takes the seed of an active
            ``lightning_d9m.enable()``, else that of ``seed_everything`` (``PL_GLOBAL_SEED``),
            else 0.
        reference: Ledger of an earlier run to compare this run with: the folder of a fit, or a
            folder that holds exactly one.
        on_drift: ``"raise"`` stops the training with a ``DriftError``; ``"warn"`` warns and
            continues.
        on_stack_difference: What to do if driver, versions, devices or variables differ from the
            reference's: ``"raise"``, ``"warn"``, or ``"ignore"`` (the ledger still records it).
        ledger_dir: Folder in which each fit makes a new folder for its ledger. None takes ``d9m``
            under the Trainer's log directory. The variable ``LIGHTNING_D9M_LEDGER_DIR``, which
            ``d9m repeat`` sets, takes precedence over both.
        per_sample_rng: Seed the random generators for every sample, so that what it draws does
            not depend on its batch. If False, they are seeded for every batch. None inherits.
        threads: Number of intra-op CPU threads to pin; CPU results depend on it. None inherits,
            or keeps the present number.
        fill_uninitialized_memory: Fill new tensors, so that a program that reads uninitialized
            memory is exact too. It costs time, and does not change the results of a correct
            program. None inherits; the default is True.
        patch_ops: On a CUDA machine, replace the operations that torch leaves nondeterministic
            (``d9m ops`` lists them). If False, torch raises where it has no deterministic kernel.
            None inherits; the default is True.
        unpatched_ops: Names of operations that ``patch_ops`` does not replace. None inherits.
        varying_ops: Operations that run although they may vary, where torch would raise: names of
            ``d9m ops``, or of torch's dispatcher such as ``"torchvision::_roi_pool_backward"``.
            The ledger and each verdict name them. None inherits.
        portable: Compute the same bits on every machine, up to twice as slow. Initial weights are
            the same only if the model is built with it on: with ``LIGHTNING_D9M=1`` and
            ``LIGHTNING_D9M_PORTABLE=1``, or after ``enable(portable=True)``. None inherits; the
            default is False.
        ignored_metrics: Names, or patterns such as ``"time/*"``, of logged scalars that are not
            recorded because they always differ, such as measured times.
        on_inexact_resume: What to do if a fit resumes from a checkpoint and cannot end at the same
            bits as an uninterrupted run: ``"raise"``, or ``"warn"``, which records the break.
        accepted_unknown: Paths of objects that nothing can read, such as an open database, and that
            the training does not depend on; patterns, too. A fit that resumes is else refused if
            it cannot be compared with the steps after the checkpoint.
        provable: Record SHA-256 of the data, the state and the program, which ``d9m prove`` needs.
        probes: Kinds of values whose digests are recorded in every batch, such as ``"weight"``,
            ``"loss"`` or ``"output"``; ``"all"`` for all of them.
        probe_modules: Patterns of the names of modules that are probed.
        probe_steps: Global steps that are probed, ``"a:b"`` from a up to but without b.
        summary: Log one line when a fit ends: epochs, digest of the weights, and ledger.

    Arguments that "inherit" take the value of an active ``lightning_d9m.enable()`` if they are
    None; any other value takes precedence over it.

    Raises:
        SettingError: If a value is not allowed.
    """

    _auto_added = False
    """True if ``LIGHTNING_D9M=1`` added it; it then yields to a callback of the program."""

    def __init__(  # noqa: PLR0913 - one keyword for each setting
        self,
        seed: int | None = None,
        *,
        reference: str | Path | None = None,
        on_drift: Literal["raise", "warn"] = "raise",
        on_stack_difference: Literal["raise", "warn", "ignore"] = "raise",
        ledger_dir: str | Path | None = None,
        per_sample_rng: bool | None = None,
        threads: int | None = None,
        fill_uninitialized_memory: bool | None = None,
        patch_ops: bool | None = None,
        unpatched_ops: Sequence[str] | None = None,
        varying_ops: Sequence[str] | None = None,
        portable: bool | None = None,
        ignored_metrics: Sequence[str] = (),
        on_inexact_resume: Literal["raise", "warn"] = "raise",
        accepted_unknown: str | Sequence[str] = (),
        provable: bool = False,
        probes: str | Sequence[str] = (),
        probe_modules: str | Sequence[str] = "*",
        probe_steps: str | None = None,
        summary: bool = True,
    ) -> None:
        arguments = dict(locals())
        _serve_packages()
        _serve_launches(self)
        # In the constructor: whether two fits draw the same numbers depends on the seeds that the
        # program sets between them.
        note_seeds()
        super().__init__()
        read_path("ledger_dir", ledger_dir)  # a URL passes, too
        validate_choice("summary", summary, (True, False))
        self._given = select_given(arguments)
        names = [field.name for field in fields(RunOptions) if field.name in arguments]
        options = RunOptions(**{name: arguments[name] for name in names})
        ignored = read_names("ignored_metrics", ignored_metrics)
        self._recorder = TrainerRecorder(options, ledger_dir, ignored, spare_cwd=self._auto_added)
        self._shows_summary = summary
        self._accepted = read_names("accepted_unknown", accepted_unknown)
        self._fit: Any = None  # the `ResumableFit` that runs, or has ended
        self._session: TrainerSession | None = None
        self._saves = AttributePatches()
        self._liveness: Any = None  # of a process group; its module is loaded for one
        # The launcher and NCCL start before `setup` is called and read these variables then.
        self.early_variables = EarlyVariables()
        self.early_variables.set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _serve_launches(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy (in a spawned process, or of the list of callbacks) has no open session. Lightning
        # attaches the module's methods for logging in each run; with them a copy would have the
        # module, whose class may be local.
        state = self.__dict__ | {"_session": None, "_liveness": None, "_fit": None}
        state["_saves"] = AttributePatches()
        return {name: part for name, part in state.items() if name not in ("log", "log_dict")}

    def __repr__(self) -> str:
        ledger = None if self.ledger is None else str(self.ledger)
        return f"{type(self).__name__}(ledger={ledger!r}, digest={self.digest!r})"

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint, the same for each subclass."""
        return KEY

    @property
    def ledger(self) -> Path | None:
        """The folder of the last fit's ledger, or of the last evaluation's if there was no fit."""
        return self._recorder.run.folder or self._recorder.evaluation.folder

    @property
    def digest(self) -> str | None:
        """The digest of the weights in that ledger's last record, 32 hex digits; None before."""
        return self._recorder.run.digest or self._recorder.evaluation.digest

    # Lightning passes the module and more, of which each hook names what it uses.

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Open the session, before the model is configured and any loader is made."""
        if self._session is not None:  # the error of another callback skipped our teardown
            given_up = "The run was given up without a call of on_exception."
            self._close(End(status="failed", error=given_up))
        has_group = distributed.is_available() and distributed.is_initialized()
        if has_group:
            from lightning_d9m.engine.ranks.groups import close_group_at_exit, connect_liveness

            close_group_at_exit()
        # An error of one rank alone would let the others wait for it in the first collective.
        ranks_of(trainer).raise_on_all(lambda: self._open(trainer, stage))
        self._liveness = connect_liveness(ranks_of(trainer)) if has_group else None

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Restore everything."""
        module = find_interruption()
        for callback in trainer.callbacks if module is not None and stage == "fit" else ():
            # A segment ends its process here, because the program would next write files that the
            # earlier run has written.
            if isinstance(callback, module.InterruptingCallback):
                callback.interruption.stop()
        self._close(End(status="finished", reason=describe_end(trainer, stage)))

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Record in the ledger that the run failed, and restore everything."""
        if self._liveness is not None:
            self._liveness.add_lost_ranks(exception)
        if self._session is not None:
            with suppress(Exception):  # do not hide the error that is being raised
                self._recorder.run.probes.flush()
                if self._fit is not None:
                    self._fit.keep(ended=False)
            # Without a comparison of ranks, as some may be lost.
            self._recorder.record_exception(trainer)
            if isinstance(exception, Exception):  # not Ctrl-C
                with suppress(Exception):
                    self._recorder.log_return(trainer)
        self._close(End.failed(exception))

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Verify the switches, open the ledger and record the initial weights."""
        self._open_session.has_trained = True
        # It continues the ledger of an interrupted run, which `begin` of the recorder would
        # otherwise make.
        self._fit.begin()
        self._recorder.begin(trainer, self._open_session)

    def on_train_batch_start(
        self, trainer: Trainer, _: Any, batch: Any, batch_idx: int, *__: Any
    ) -> None:
        """Probe the state that the batch starts from."""
        self._recorder.start_batch(trainer, batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, _: Any, loss: Tensor) -> None:
        """Probe the loss."""
        self._recorder.run.probes.take_loss(loss)

    def on_before_optimizer_step(self, _trainer: Trainer, _: Any, optimizer: Optimizer) -> None:
        """Probe gradients and optimizer."""
        self._recorder.run.probes.take_step(optimizer)

    def on_train_batch_end(self, trainer: Trainer, _: Any, outputs: Any, *__: Any) -> None:
        """Keep the loss on its device, and write the probes of the batch."""
        self._recorder.end_batch(trainer, outputs)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Record the epoch; compare it with the reference and across ranks."""
        self._fit.end_epoch()
        self._recorder.record(trainer, self._open_session, "epoch")

    def on_fit_end(self, trainer: Trainer, *_: Any) -> None:
        """Record the final weights, after averaging callbacks have rewritten them."""
        self._recorder.record(trainer, self._open_session, "final")
        # After the last record, because rank 0 gathers the state now: other ranks may have exited
        # by the next save.
        self._fit.keep(ended=True)
        if self._shows_summary:
            self._recorder.log_summary(trainer, self._open_session)

    def on_save_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        """Add the state that an exact resume needs, even after the fit has ended."""
        self._recorder.run.probes.flush()
        if self._fit is not None:
            self._fit.save(checkpoint)

    def on_load_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        """Resume the run that saved the checkpoint; outside a run there is nothing to resume."""
        if self._fit is not None:
            self._fit.load(checkpoint)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        """Set the RNG aside; within a fit, TrainerSession does so around the whole validation."""
        session = self._open_session
        if session.stage != "fit":
            session.start_evaluation()
        self._recorder.begin_evaluation(trainer, session)

    def on_validation_batch_start(self, trainer: Trainer, _: Any, batch: Any, *__: Any) -> None:
        """Probe a validation within a fit."""
        self._recorder.start_validation_batch(trainer, batch)

    def on_validation_batch_end(
        self,
        trainer: Any,
        _: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Digest the outputs of the batch."""
        self._recorder.end_evaluation_batch(outputs, batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Record the evaluation and restore the RNG."""
        session = self._open_session
        self._recorder.end_evaluation(trainer, session.evaluated)
        if session.stage != "fit":
            session.end_evaluation()

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    @property
    def _open_session(self) -> TrainerSession:
        assert self._session is not None, "Lightning calls `setup` before any other hook"
        return self._session

    def _open(self, trainer: Trainer, stage: str) -> None:
        if (count := len(list_program_callbacks(trainer))) > 1:
            raise SettingError(
                f"This Trainer has {count} DeterminismCallbacks; a run has one seed and "
                "one ledger, so one is allowed. Remove the others from Trainer(callbacks=...)."
            )
        check_benchmark(trainer, overrides=self._auto_added)
        check_strategy(trainer.strategy)
        if stage == "fit":
            refuse_unread_variable(trainer.strategy)
        self.early_variables.set()
        # With logical ranks the number of threads must not depend on that of the processes.
        threads = getattr(trainer.strategy, "logical_threads", None)
        self._session = TrainerSession(trainer, resolve_settings(self._given, threads), stage)
        if self._fit is not None:
            self._fit.close()
        self._fit = None
        run = self._recorder.run
        if (module := find_interruption()) is not None:
            module.apply_interrupt_variables(trainer, stage, run, self._recorder.end)
        # Before a manifest is added, so that a segment makes none.
        self._saves = record_saves(trainer, run)
        if trainer.is_global_zero:
            report_hash_seed()
        if stage == "fit":
            self._fit = ResumableFit(trainer, self._session, self._recorder, self._accepted)
            run.prepare()

    def _close(self, end: End) -> None:
        session, self._session = self._session, None
        with ExitStack() as opened:
            opened.callback(self.early_variables.restore)
            # A segment that failed ends, and what saves then must not write either.
            if self._recorder.run.stop is None or end.status != "failed":
                opened.callback(self._saves.undo)
            if session is not None:
                opened.callback(session.close)
            # The ledger is closed while the session is still open, and its errors do not keep the
            # session from closing.
            self._recorder.end(end)


def _run_launched(
    trainer: Trainer,
    callback: DeterminismCallback,
    session: InheritedSession,
    run: Callable[..., object],
    *args: Any,
    **kwargs: Any,
) -> tuple[object, int, TrainerRecorder]:
    """Run in a process that Lightning forks or spawns, as under ``ddp_spawn``.

    The process takes over the session and the number of fits of the one that started it.

    Returns:
        The result, the number of fits, and what the process knows of its ledgers.
    """
    with session_inherited(session):
        try:
            result = run(*args, **kwargs)
        except BaseException as error:
            # Lightning calls `on_exception` only in the process that started this one.
            callback.on_exception(trainer, trainer.lightning_module, error)
            raise
        return result, capture_session().fits, callback._recorder  # noqa: SLF001 - our own class


def _launch(
    trainer: Trainer, run: Callable[..., object], start: Callable[[Callable[..., object]], Any]
) -> object:
    """Launch a run in new processes, which a callback of this package may serve.

    ``run`` is the method of the Trainer that runs. ``start`` starts processes that call its
    argument, and returns what it returned on rank 0.
    """
    # Lightning calls no hook in the process that starts the others, and these end with the run.
    callbacks = [c for c in trainer.callbacks if isinstance(c, DeterminismCallback)]
    if not callbacks:
        return start(run)
    # That of the program, to which the added one yields.
    first = min(callbacks, key=lambda callback: callback._auto_added)  # noqa: SLF001 - our own class
    session = capture_session()
    fits = session.fits + (trainer.state.fn == "fit")  # a fit that fails counts
    with ExitStack() as stack:
        for callback in callbacks:
            stack.callback(callback.early_variables.restore)
        first.early_variables.set()  # the processes must find them
        try:
            launched = start(partial(_run_launched, trainer, first, session, run))
            result, fits, first._recorder = launched  # noqa: SLF001 - our own class
        finally:
            # The number of fits grew in the other processes only, and a second fit must not draw
            # the numbers of the first.
            set_fits(fits)
    return result


def _serve_packages() -> None:
    """Serve the packages that are loaded, also one that was imported after this module."""
    for package in import_packages():
        register_strategies(package)
    extend_base(DeterminismCallback, "callbacks.Callback")


_launches = AttributePatches()
_alive: WeakSet[DeterminismCallback] = WeakSet()


def _serve_launches(callback: DeterminismCallback) -> None:
    """Wrap the launchers of the packages as long as a callback is alive."""
    _alive.add(callback)
    for package in import_packages():
        wrap_launches(package, _launch, _launches)
    finalize(callback, _restore_launches)


def _restore_launches() -> None:
    # Iterating skips a callback that is being freed; the length of the set still counts it.
    if not [*_alive]:
        _launches.undo()


_serve_packages()


def find_interruption() -> Any:
    """Return the module that interrupts fits, if variables ask for one or it served one before."""
    name = "lightning_d9m.integrations.lightning.interruption"
    is_asked_for = any(map(os.environ.get, INTERRUPTING))
    return import_module(name) if is_asked_for or name in sys.modules else None


def list_program_callbacks(trainer: Trainer) -> list[DeterminismCallback]:
    """Return the DeterminismCallbacks of a Trainer that the program itself has passed."""
    callbacks = [c for c in trainer.callbacks if isinstance(c, DeterminismCallback)]
    return [callback for callback in callbacks if not callback._auto_added]  # noqa: SLF001 - our own class


def check_benchmark(trainer: Trainer, *, overrides: bool) -> None:
    """Refuse cuDNN's benchmark mode, or say that the run switches it off, if it overrides it.

    Raises:
        SettingError: If it is on, unless the run overrides it.
    """
    if not torch.backends.cudnn.benchmark:
        return
    problem = (
        "cuDNN's benchmark mode is on, as benchmark=True of this or of an earlier Trainer leaves "
        "it: it chooses algorithms by timing them, so runs differ."
    )
    if not overrides:
        raise SettingError(
            f"{problem} Remove benchmark=True from that Trainer, or set "
            "torch.backends.cudnn.benchmark = False before this run."
        )
    if trainer.is_global_zero and control_is_on():
        rank_zero().rank_zero_info(
            f"{problem} LIGHTNING_D9M=1 switches it off during this run and records that."
        )


@cache
def report_hash_seed() -> None:
    """Log once per process that the hash seed is not fixed; it cannot be set any more."""
    problem = describe_hash_seed_problem()
    if problem is not None:
        rank_zero().rank_zero_info(problem)


class AddedCallback(DeterminismCallback):
    """The callback that ``LIGHTNING_D9M=1`` adds to each Trainer.

    It yields to one that the program passes. If the program passes one list of callbacks to two
    Trainers, the second Trainer adds its own callback to a list that holds the first's; the first
    callback then serves both Trainers.
    """

    _auto_added = True

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Open the session, unless another callback does."""
        callbacks = trainer.callbacks
        in_program = list_program_callbacks(trainer)
        first = next(c for c in callbacks if isinstance(c, DeterminismCallback))
        if not in_program and first is self:
            super().setup(trainer, pl_module, stage)
            return
        # A new list: Lightning iterates over the old one, and the program may hold it too.
        trainer.callbacks = [c for c in callbacks if c is not self]
        self.early_variables.restore()
        if not in_program:
            return
        given = [variable_of(name) for name in read_settings(DeterminismCallback, os.environ)]
        names = (variable_of(name) for name in Settings.__dataclass_fields__)
        if unused := set(given).difference(CONTROL_VARIABLES, names):
            rank_zero().rank_zero_warn(
                "Your program passes its own DeterminismCallback, so these variables are ignored: "
                f"{', '.join(sorted(unused))}. Unset them, or remove the callback."
            )


def make_callback(package: str) -> AddedCallback:
    """Return a callback with the settings that variables give.

    The package is that of the Trainer that is being built.

    Raises:
        SettingError: If a variable is unknown or has a value that is not allowed, or the class was
            made for Lightning's other package.
    """
    if not issubclass(AddedCallback, import_module(package).Callback):
        raise SettingError(
            f"{package} was imported after a Trainer of {loaded_packages()[0]} was built. Import "
            "both packages at the top of the program, or use one of them."
        )
    fabric = {"lightning.pytorch": "lightning.fabric"}.get(package, "lightning_fabric")
    logging.getLogger(f"{fabric}.utilities.registry").addFilter(
        # Lightning logs for each Trainer that it adds our callback.
        lambda record: "entry point 'lightning_d9m'" not in record.getMessage()
    )
    settings = read_settings(DeterminismCallback, os.environ)
    return build_from_variables(AddedCallback, settings)
