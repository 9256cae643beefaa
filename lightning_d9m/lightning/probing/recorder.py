"""The probes of a Trainer's fits; hooks exist only during the probed batches."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from lightning_d9m.control.method_wrapping import replace_method, wrap_method
from lightning_d9m.hashing.training_state import ModelTensors, plain_name
from lightning_d9m.ledger.format.records import Json
from lightning_d9m.ledger.kinds import VALIDATION, WRITTEN
from lightning_d9m.lightning.probing.batch_state import take_gradients, take_states, take_step
from lightning_d9m.lightning.probing.dispatch_mode import OpMode
from lightning_d9m.lightning.probing.module_hooks import hook_model
from lightning_d9m.lightning.probing.step_replay import Replay
from lightning_d9m.lightning.recording.trainer_recorder import TrainerRecorder
from lightning_d9m.probes.dumps import Dump, StateDump
from lightning_d9m.probes.hook_trace import HookTrace, StateDigest
from lightning_d9m.probes.monitor import monitors_heard
from lightning_d9m.probes.settings import ProbeSettings
from lightning_d9m.probes.trace import ProbeCollector, ProbePoint, StatePoint

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# Attributes that belong to one fit.
_OF_ONE_FIT = (
    *("_probes", "_dump", "_model_tensors", "_hooks", "_ops", "_replay", "_replayed", "_traced"),
)


class ProbeRecorder:
    """Takes the probes that the settings name.

    Variables go before the settings.
    """

    def __init__(self, settings: ProbeSettings, ignored_metrics: Sequence[str] = ()) -> None:
        self._given = settings
        self._ignored_metrics = tuple(ignored_metrics)
        self._settings = settings
        self._kinds: frozenset[str] = frozenset()
        self._probes: ProbeCollector | None = None
        self._dump: Dump | None = None
        self._model_tensors: ModelTensors | None = None
        self._hooks: ExitStack | None = None
        self._ops: OpMode | None = None
        self._replay: Replay | None = None
        self._replayed: ExitStack | None = None
        self._traced: ExitStack | None = None
        self._took_loss = False
        self._validated = 0  # batches of this validation

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | dict.fromkeys(_OF_ONE_FIT)

    def read_variables(self) -> None:
        """Let environment variables override the settings.

        Raises:
            SettingError: When a variable's value is not allowed.
        """
        self._settings = self._given.overridden(os.environ)

    def as_record(self) -> dict[str, str | int]:
        """Return the settings as the ledger's header keeps them."""
        return self._settings.as_record()

    def begin(
        self,
        trainer: "Trainer",
        module: "LightningModule",
        recorder: TrainerRecorder,
        on_drift: str,
    ) -> None:
        """Begin a fit, before or after its ledger is opened.

        Raises:
            SettingError: When a rank is to be probed that the training does not have, or no step
                can be run twice.
        """
        self._kinds = self._settings.kinds
        self._settings.check_ranks(trainer.world_size)
        if self._kinds and self._settings.takes_rank(trainer.global_rank):
            folder, names = self._settings.dump, self._settings.dump_names
            dump = None if folder is None else Dump(folder, trainer.global_rank, names)
            self._dump = dump
            self._probes = ProbeCollector(recorder.append, None if dump is None else dump.save)
            self._model_tensors = ModelTensors(module, self._settings.takes_parameter)
            if dump is not None and self._kinds & WRITTEN:
                self._trace_hooks(trainer, dump.folder)
            _warn_of_idle_patterns(self._settings, module)
        if self._settings.replay_every:
            append = _append_after(self._probes, recorder)
            self._replay = Replay(trainer, module, append, on_drift)

    def start_batch(
        self, trainer: "Trainer", module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Record the state at the start of the batch, and hook the model if it is probed."""
        if self._replayed is not None:
            self._end_replay()
        if self._probes is not None:
            self._start_probes(trainer, module, batch, batch_idx)
        # Last, because it comes off first.
        if self._replay is not None:
            self._start_replay(trainer, self._replay, batch_idx)

    def _start_probes(
        self, trainer: "Trainer", module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        probes, tensors = self._probes, self._model_tensors
        assert probes is not None and tensors is not None, "begin() comes first"  # noqa: PT018
        step = trainer.global_step
        if trainer.validating:  # it belongs to the training batch before it
            step = max(step - 1, 0)
        if step not in self._settings.steps:
            self._unhook()
            return
        probes.begin(ProbePoint(trainer.current_epoch, step, batch_idx))
        self._took_loss = False
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if batch_idx <= VALIDATION:  # no later batch of a validation changes it
            take_states(tensors, trainer.optimizers, self._settings, probes, scaler)
        if "batch" in self._kinds:
            probes.add("batch", "batch", batch)
        if self._hooks is None:
            self._hooks = self._hook(trainer.strategy, module, probes)
        if self._ops is not None:
            self._ops.begin()

    def start_validation_batch(
        self, trainer: "Trainer", module: "LightningModule", batch: Any
    ) -> None:
        """Record a batch of a validation within a fit, which may feed back into the training."""
        if self._probes is not None and not trainer.sanity_checking:
            number = VALIDATION + self._validated
            self._validated += 1
            self._start_probes(trainer, module, batch, number)

    def end_validation_batch(self) -> None:
        """Write the records of a batch of a validation."""
        if self._probes is not None:
            self._probes.end()

    def end_validation(self) -> None:
        """Number the batches of the next validation from the first."""
        self._validated = 0

    def save_state(self, trainer: "Trainer", moment: str) -> None:
        """Save the state that the ledger is about to record, if values are saved at this step."""
        step = trainer.global_step
        if self._dump is None or self._model_tensors is None or step not in self._settings.steps:
            return
        listener = StateDump(self._dump, StatePoint(trainer.current_epoch, step, moment))
        take_states(self._model_tensors, trainer.optimizers, self._settings, listener)

    def take_loss(self, loss: Tensor) -> None:
        """Take the loss that is about to be differentiated."""
        if self._probes is not None and "loss" in self._kinds:
            self._took_loss = True
            self._probes.add("loss", "loss", loss)

    def take_step(self, trainer: "Trainer", optimizer: Any) -> None:
        """Take the gradients and the state that an optimizer is about to use."""
        if self._probes is None or self._model_tensors is None or not self._probes.listens:
            return
        take_step(self._model_tensors, optimizer, trainer.optimizers, self._settings, self._probes)

    def end_batch(self, trainer: "Trainer", outputs: Any) -> None:
        """Record the results of the batch, and write its records."""
        if self._replayed is not None:
            self._end_replay()
        if self._probes is None:
            return
        if not self._took_loss:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if loss is not None:
                self.take_loss(loss)
        if "scalar" in self._kinds:
            for name, value in sorted(trainer.callback_metrics.items()):
                if not any(fnmatchcase(name, pattern) for pattern in self._ignored_metrics):
                    self._probes.add("scalar", name, value)
        self._probes.end()

    def flush(self) -> None:
        """Write the pending records."""
        if self._probes is not None:
            self._probes.close()

    def end(self) -> None:
        """End the fit: write the pending records, and remove every hook."""
        try:
            self.flush()
        finally:
            self._probes = self._dump = self._model_tensors = self._replay = None
            self._end_replay()
            self._unhook()
            if self._traced is not None:
                self._traced.close()
            self._traced = None

    def _trace_hooks(self, trainer: "Trainer", folder: Path) -> None:
        """Trace the state that is saved, around each hook that Lightning calls."""

        def take() -> str | None:
            tensors, step = self._model_tensors, trainer.global_step
            if tensors is None or step not in self._settings.steps:
                return None
            state = StateDigest(self._settings.dump_names)
            take_states(tensors, trainer.optimizers, self._settings, state)
            for optimizer in trainer.optimizers:
                take_gradients(tensors, optimizer, state)
            return state.digest()

        self._traced = ExitStack()
        profiler = cast(Any, trainer).profiler
        traced = HookTrace(folder, take).around(profiler.profile)
        replace_method(self._traced, profiler, "profile", traced)

    def _hook(self, strategy: Any, module: "LightningModule", probes: ProbeCollector) -> ExitStack:
        with ExitStack() as stack:
            if "op" in self._kinds:
                self._ops = ops = OpMode(self._settings, probes)
                stack.enter_context(ops.attach(module))
                for name in ("training_step", "backward", "validation_step"):
                    wrap_method(stack, strategy, name, ops.entered)
            stack.enter_context(hook_model(module, self._settings, self._kinds, probes))
            if "monitor" in self._kinds:
                stack.enter_context(monitors_heard(partial(probes.add, "monitor")))
            return stack.pop_all()

    def _start_replay(self, trainer: "Trainer", replay: Replay, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx % self._settings.replay_every == 0:
            point = ProbePoint(trainer.current_epoch, trainer.global_step, batch_idx)
            silenced = nullcontext if self._probes is None else self._probes.paused
            self._replayed = replay.attach(point, silenced)

    def _end_replay(self) -> None:
        replayed, self._replayed = self._replayed, None
        if replayed is not None:
            replayed.close()

    def _unhook(self) -> None:
        hooks, self._hooks = self._hooks, None
        self._ops = None
        if hooks is not None:
            hooks.close()


def _warn_of_idle_patterns(settings: ProbeSettings, module: "LightningModule") -> None:
    """Say so if nothing will be recorded for a pattern; another model of the program may fit it."""
    modules = [plain_name(name) for name, _ in module.named_modules()]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    idle = settings.idle_patterns([*modules, *(plain_name(name) for name, _ in tensors)])
    if idle:
        some = ", ".join(map(repr, modules[1:6])) or "none"
        warnings.warn(
            f"probe_modules has {', '.join(map(repr, idle))}, and no module, parameter or buffer "
            f"of {type(module).__name__} is called so: nothing is recorded for it. Its modules "
            f"are {some}{', ...' if len(modules) > 6 else ''}.",  # noqa: PLR2004 - as many as are shown
            stacklevel=2,
        )


def _append_after(
    probes: ProbeCollector | None, recorder: TrainerRecorder
) -> Callable[[Mapping[str, Json]], None]:
    """Return a function that writes a record after those of the finished batches."""

    def append(record: Mapping[str, Json]) -> None:
        if probes is not None:
            probes.catch_up()
        recorder.append(record)

    return append
