"""``Trainer(callbacks=[DeterminismCallback()])``: bit-exact training that leaves a ledger.

The hooks are thin: what they do lives in :mod:`lightning_d9m.control` and
:mod:`lightning_d9m.recording`.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_d9m.control.environment import EarlyVariables
from lightning_d9m.control.seeding import describe_hash_seed_problem
from lightning_d9m.control.settings import Settings
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.fault_injection import apply_interrupt_variables
from lightning_d9m.lightning.lost_ranks import add_lost_ranks, connect_liveness
from lightning_d9m.lightning.packages import combined_base, import_packages, rank_zero
from lightning_d9m.lightning.probing.recorder import ProbeRecorder
from lightning_d9m.lightning.process_group import close_group_at_exit
from lightning_d9m.lightning.ranks import ranks_of
from lightning_d9m.lightning.resolved_settings import inherit_settings, resolve_seed
from lightning_d9m.lightning.resume.checkpoint_state import CheckpointState
from lightning_d9m.lightning.strategies import register_strategies
from lightning_d9m.lightning.trainer_recorder import TrainerRecorder
from lightning_d9m.lightning.trainer_session import TrainerSession
from lightning_d9m.probes.settings import make_settings
from lightning_d9m.recording.rank_liveness import RankLiveness
from lightning_d9m.recording.recorder import Policy

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
else:
    _Callback = combined_base("callbacks.Callback")

for _package in import_packages():
    register_strategies(_package)


class DeterminismCallback(_Callback):
    """Makes a Trainer's runs deterministic, and writes and checks the ledger of each fit.

    It works without arguments. Whatever it switches is restored when the run ends.

    Args:
        seed: Base of every seed, from 0 to 4294967295. None takes that of an active
            ``lightning_d9m.enable``, of an earlier ``seed_everything`` (``PL_GLOBAL_SEED``), or 0.
        reference: Ledger of an earlier run that this one is held against: the folder of a fit, or a
            folder that holds exactly one.
        on_drift: ``"raise"`` stops the training with a ``DriftError``; ``"warn"`` says the same in
            a warning and goes on.
        on_stack_difference: What to do when driver, versions, devices or variables differ from the
            reference's: ``"raise"``, ``"warn"``, or ``"ignore"`` (it stays in the ledger).
        ledger_dir: Folder in which each fit makes a new folder for its ledger. None takes ``d9m``
            under the Trainer's log directory. The variable ``LIGHTNING_D9M_LEDGER_DIR``, which
            ``d9m repeat`` sets, goes before both.
        per_sample_rng: Seed the random generators for every sample, so that what it draws
            does not depend on the batch that it is in; else they are seeded for every batch.
        threads: Number of intra-op CPU threads to pin; None keeps what is set. CPU results differ
            between numbers of threads.
        fill_uninitialized_memory: Fill new tensors, so that a program that reads uninitialised
            memory is exact too. It costs time, and changes no bit of a correct program.
        patch_ops: On a CUDA machine, replace the operations that torch leaves nondeterministic
            (``d9m ops`` lists them). Without it, torch raises where it has no deterministic kernel.
        unpatched_ops: Names of operations to leave to torch all the same.
        ignored_metrics: Names, or patterns such as ``"time/*"``, of logged scalars that are not
            recorded, because they differ by nature: measured times, say.
        on_inexact_resume: What to do when a fit goes on from a checkpoint and cannot end at the
            bits of an uninterrupted one: ``"raise"``, or ``"warn"``, and record the break.
            ``"raise_early"`` also stops a fit that begins anew, if checkpoints that it would save
            within an epoch could not be resumed exactly.
        probes: Kinds of values whose digests are recorded in every batch, such as ``"weight"``,
            ``"loss"`` or ``"output"``; ``"all"`` for all of them.
        probe_modules: Patterns of the names of modules that are probed.
        probe_steps: Global steps that are probed, ``"a:b"`` from a up to but without b.
        probe_ranks: Ranks that record probes; None means all.
        replay_every: Run the forward and backward pass of every N-th batch a second time and
            compare all values; 0 for never.

    What is left at its default is taken from an active ``lightning_d9m.enable``.

    Raises:
        SettingError: When a value is not allowed.
    """

    added = False
    """Whether ``LIGHTNING_D9M=1`` added it, so that it gives way to one of the program's own."""

    def __init__(  # noqa: PLR0913 - one keyword for each setting
        self,
        seed: int | None = None,
        *,
        reference: str | Path | None = None,
        on_drift: Literal["raise", "warn"] = "raise",
        on_stack_difference: Literal["raise", "warn", "ignore"] = "raise",
        ledger_dir: str | Path | None = None,
        per_sample_rng: bool = False,
        threads: int | None = None,
        fill_uninitialized_memory: bool = True,
        patch_ops: bool = False,
        unpatched_ops: Sequence[str] = (),
        ignored_metrics: Sequence[str] = (),
        on_inexact_resume: Literal["raise", "warn", "raise_early"] = "raise",
        probes: str | Sequence[str] = (),
        probe_modules: str | Sequence[str] = "*",
        probe_steps: str | None = None,
        probe_ranks: int | Sequence[int] | None = None,
        replay_every: int = 0,
    ) -> None:
        super().__init__()
        _check_choice("on_inexact_resume", on_inexact_resume, ("raise", "warn", "raise_early"))
        _check_choice("on_drift", on_drift, ("raise", "warn"))
        _check_choice("on_stack_difference", on_stack_difference, ("raise", "warn", "ignore"))
        self._seed = seed
        self._settings = Settings(
            seed=0 if seed is None else seed,
            per_sample_rng=per_sample_rng,
            threads=threads,
            fill_uninitialized_memory=fill_uninitialized_memory,
            patch_ops=patch_ops,
            unpatched_ops=_listed(unpatched_ops),
        )
        self._policy = policy = Policy(
            reference=None if reference is None else Path(reference),
            on_drift=on_drift,
            on_stack_difference=on_stack_difference,
        )
        self._testimony = TrainerRecorder(
            policy, None if ledger_dir is None else Path(ledger_dir), _listed(ignored_metrics)
        )
        self._resumption = CheckpointState(on_inexact_resume)
        probe_settings = make_settings(
            probes=probes,
            probe_modules=probe_modules,
            probe_steps=probe_steps,
            probe_ranks=probe_ranks,
            replay_every=replay_every,
        )
        self._probing = ProbeRecorder(probe_settings, _listed(ignored_metrics))
        self._takeover: TrainerSession | None = None
        self._liveness: RankLiveness | None = None
        # The launcher and NCCL start before `setup` is called: what they read is set here, and
        # restored when a run ends.
        self._early = EarlyVariables()
        self._early.set()

    def __getstate__(self) -> dict[str, Any]:
        # A copy (in a spawned process, or of the list of callbacks) has no run of its own.
        return self.__dict__ | {"_takeover": None, "_liveness": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the run over, before the model is configured and any loader is made."""
        if self._takeover is not None:  # another callback's error kept it from being given back
            self._close("failed", "The run was given up without a call of on_exception.")
        close_group_at_exit()
        ranks_of(trainer).together(lambda: self._take_over(trainer, stage))
        self._liveness = connect_liveness(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give everything back."""
        self._close("finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say in the ledger that the run failed, and give everything back."""
        add_lost_ranks(exception, self._liveness)
        if self._takeover is not None:
            with suppress(Exception):  # the error that is being raised is the one to be seen
                self._probing.flush()
                self._resumption.keep(trainer, self._run, self._testimony, ended=False)
        self._close("failed", f"{type(exception).__name__}: {exception}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that the switches still stand, open the ledger and record the initial weights."""
        self._resumption.begin(trainer, self._testimony)
        self._testimony.further_settings = self._probing.as_record()
        self._testimony.begin(trainer, pl_module, self._run)
        self._probing.begin(trainer, pl_module, self._testimony, self._policy.on_drift)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take what the batch starts from."""
        self._probing.start_batch(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Take the loss."""
        self._probing.take_loss(loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Take the gradients."""
        self._probing.take_gradients(optimizer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Seed the epoch."""
        self._run.start_epoch(trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss, without waiting for the device."""
        self._testimony.keep_loss(outputs)
        self._probing.end_batch(trainer, outputs)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the epoch and hold it against the reference and the other ranks."""
        self._probing.flush()
        self._testimony.record(trainer, pl_module, self._run, "epoch")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the final weights: by now averaging callbacks have rewritten them."""
        self._probing.end()
        self._testimony.record(trainer, pl_module, self._run, "final")
        self._resumption.keep(trainer, self._run, self._testimony, ended=True)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add what an exact resume needs; also when the fit is over."""
        self._probing.flush()
        self._resumption.save(trainer, self._takeover, self._testimony, checkpoint)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take over from the run that saved it."""
        self._resumption.load(trainer, self._run, checkpoint)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the RNG aside; within a fit this is done around the whole validation."""
        if trainer.state.fn != "fit":
            self._run.start_evaluation("validate")
        self._testimony.begin_evaluation(trainer, pl_module, self._run, "validate")

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Digest what the batch returned."""
        self._testimony.keep_outputs(outputs, batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the validation, and give the RNG back."""
        self._testimony.end_evaluation(trainer, pl_module, "validate")
        if trainer.state.fn != "fit":
            self._run.end_evaluation("validate")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Seed what the test draws."""
        self._run.start_evaluation("test")
        self._testimony.begin_evaluation(trainer, pl_module, self._run, "test")

    # What a batch of a test or of a prediction returned is digested in the same way.
    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the test, and give the RNG back."""
        self._testimony.end_evaluation(trainer, pl_module, "test")
        self._run.end_evaluation("test")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Seed what the prediction draws."""
        self._run.start_evaluation("predict")
        self._testimony.begin_evaluation(trainer, pl_module, self._run, "predict")

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the prediction, and give the RNG back."""
        self._testimony.end_evaluation(trainer, pl_module, "predict")
        self._run.end_evaluation("predict")

    @property
    def _run(self) -> TrainerSession:
        assert self._takeover is not None, "Lightning calls `setup` before any other hook"
        return self._takeover

    def _take_over(self, trainer: Any, stage: str) -> None:
        self._check_trainer(trainer)
        self._early.set()
        settings = inherit_settings(replace(self._settings, seed=resolve_seed(self._seed)))
        self._takeover = TrainerSession(trainer, settings, stage)
        self._resumption.attach(trainer, self._takeover)
        apply_interrupt_variables(trainer, stage)
        if trainer.is_global_zero:
            _report_hash_seed()
        if stage == "fit":
            self._probing.read_variables()
            self._testimony.check_reference()

    def _check_trainer(self, trainer: Any) -> None:
        callbacks = [
            c for c in trainer.callbacks if isinstance(c, DeterminismCallback) and not c.added
        ]
        if len(callbacks) > 1:
            raise SettingError(
                f"This Trainer has {len(callbacks)} DeterminismCallbacks; a run has one seed and "
                "one ledger, so one is allowed. Remove the others from Trainer(callbacks=...)."
            )
        if torch.backends.cudnn.benchmark:
            raise SettingError(
                "cuDNN's benchmark mode is on: it chooses algorithms by timing them, so runs "
                "differ. With DeterminismCallback it must be off. Remove Trainer(benchmark=True) "
                "or set torch.backends.cudnn.benchmark = False."
            )

    def _close(self, status: Literal["finished", "failed"], error: str | None = None) -> None:
        try:
            self._probing.end()
            self._testimony.end(status, error)
        finally:
            takeover, self._takeover = self._takeover, None
            if takeover is not None:
                takeover.close()
            self._early.restore()


@cache
def _report_hash_seed() -> None:
    """Say once in a process what cannot be mended once it runs."""
    problem = describe_hash_seed_problem()
    if problem is not None:
        rank_zero().rank_zero_info(problem)


def _listed(names: Sequence[str]) -> tuple[str, ...]:
    """Return names as a tuple; a single one need not be in a list."""
    return (names,) if isinstance(names, str) else tuple(names)


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = " or ".join(repr(choice) for choice in allowed)
        raise SettingError(f"{name} is {value!r}; allowed: {choices}.")
