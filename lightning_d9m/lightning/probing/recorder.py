"""The probes of a training's batches; hooks exist only during the probed batches."""

import os
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from lightning_d9m.attribute_patches import replace_method, wrap_method
from lightning_d9m.control.seeding import capture_rng
from lightning_d9m.hashing.training_state import ModelTensors, optimizer_state, plain_name
from lightning_d9m.ledger.format.records import Json
from lightning_d9m.ledger.kinds import VALIDATION, WRITTEN
from lightning_d9m.lightning.probing.dispatch_mode import OpMode
from lightning_d9m.lightning.probing.module_hooks import hook_model
from lightning_d9m.lightning.probing.step_replay import Replay
from lightning_d9m.lightning.recording.trainer_recorder import TrainerRecorder
from lightning_d9m.probes.dumps import Dump, StateDump
from lightning_d9m.probes.hook_trace import HookTrace, StateDigest
from lightning_d9m.probes.monitor import monitors_heard
from lightning_d9m.probes.settings import ProbeSettings
from lightning_d9m.probes.trace import Listener, ProbeCollector, ProbePoint, StatePoint, Write

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class BatchProbes:
    """Takes the probes that the settings name, of the batches of a Trainer or of a loop.

    Without settings it takes none.

    ``write`` takes the records, and ``list_optimizers`` returns the optimizers.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        model: nn.Module,
        rank: int,
        write: Write,
        list_optimizers: Callable[[], Sequence[Any]],
    ) -> None:
        self._settings = settings
        self._kinds = settings.kinds
        self._model = model
        folder, names = settings.dump, settings.dump_names
        self.dump = None if folder is None else Dump(folder, rank, names)
        self.collector = ProbeCollector(write, None if self.dump is None else self.dump.save)
        self._tensors = ModelTensors(model, settings.takes_parameter)
        self._list_optimizers = list_optimizers
        self._hooks: ExitStack | None = None
        self._ops: OpMode | None = None
        self._took_loss = False

    def start(self, point: ProbePoint, scaler: Any = None) -> None:
        """Record the state at the start of a batch, and hook the model, if its step is probed."""
        if not self._kinds or point.step not in self._settings.steps:
            self.unhook()
            self.flush()
            return
        self.collector.begin(point)
        self._took_loss = False
        if point.batch <= VALIDATION:  # no later batch of a validation changes it
            self._take_states(self.collector, scaler)
        if self._hooks is None:
            self._hooks = self._hook()
        if self._ops is not None:
            self._ops.begin()

    def take_batch(self, batch: Any) -> None:
        """Take the batch, or what the model is given of it."""
        if "batch" in self._kinds and self.collector.listens:
            self.collector.add("batch", "batch", batch)

    def take_loss(self, loss: Any) -> None:
        """Take the loss that is about to be differentiated, or was."""
        if "loss" in self._kinds:
            self._took_loss = True
            self.collector.add("loss", "loss", loss)

    def take_step(self, optimizer: Any, *_: object) -> None:
        """Take the gradients and the state that an optimizer is about to use.

        The state was there when the batch began, too. What changed since would look like a change
        of the weights in the next batch.
        """
        if not self.collector.listens:
            return
        if "gradient" in self._kinds:
            self._take_gradients(optimizer, self.collector)
        if "optimizer" in self._kinds:
            self._take_optimizers(self._tensors.look()[2], self.collector)

    def end(self, loss: Any, scalars: Mapping[str, Any]) -> None:
        """Record the results of the batch, and write its records."""
        if loss is not None and not self._took_loss:
            self.take_loss(loss)
        if "scalar" in self._kinds:
            for name, value in sorted(scalars.items()):
                self.collector.add("scalar", name, value)
        self.collector.end()

    def save_state(self, point: StatePoint) -> None:
        """Save the state that the ledger is about to record, if values are saved at this step."""
        if self.dump is not None and point.step in self._settings.steps:
            self._take_states(StateDump(self.dump, point))

    def digest_state(self, step: int) -> str | None:
        """Return the digest of what is saved at a step, with gradients; None if nothing is."""
        if step not in self._settings.steps:
            return None
        state = StateDigest(self._settings.dump_names)
        self._take_states(state)
        for optimizer in self._list_optimizers():
            self._take_gradients(optimizer, state)
        return state.digest()

    def flush(self) -> None:
        """Write the pending records."""
        self.collector.close()

    def unhook(self) -> None:
        """Remove the hooks."""
        hooks, self._hooks = self._hooks, None
        self._ops = None
        if hooks is not None:
            hooks.close()

    def _take_states(self, listener: Listener, scaler: Any = None) -> None:
        """Pass the state of the selected kinds and parameters to a listener.

        ``scaler`` is the ``torch.amp.GradScaler``, where the precision has one.
        """
        kinds = self._kinds
        if "rng" in kinds:
            _take_rng(listener)
        if kinds.isdisjoint({"weight", "buffer", "optimizer"}):
            return
        parameters, buffers, names = self._tensors.look()
        if "weight" in kinds:
            listener.add_tensors("weight", parameters)
        if "buffer" in kinds:
            listener.add_tensors("buffer", buffers)
        if "optimizer" in kinds:
            self._take_optimizers(names, listener)
            if scaler is not None:
                scale = scaler._get_scale_async()  # noqa: SLF001 - get_scale() waits for the device
                scale = scaler.get_scale() if scale is None else scale
                listener.add("optimizer", "scaler.scale", scale)

    def _take_gradients(self, optimizer: Any, listener: Listener) -> None:
        used = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gradients = {
            name: parameter.grad
            for name, parameter in self._tensors.look()[0].items()
            if id(parameter) in used and parameter.grad is not None
        }
        listener.add_tensors("gradient", gradients)

    def _take_optimizers(self, names: Mapping[int, str], listener: Listener) -> None:
        tensors: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self._list_optimizers()):
            for name, value in optimizer_state(optimizer, names):
                key, _, parameter = name.partition(".")
                if key != "group" and not self._settings.takes_parameter(parameter):
                    continue
                if isinstance(value, Tensor):
                    tensors[f"{number}.{name}"] = value
                elif isinstance(value, Mapping):
                    # One value for each setting of a group, so that a difference names it.
                    for setting, own in value.items():
                        listener.add("optimizer", f"{number}.{name}:{setting}", own)
                else:
                    listener.add("optimizer", f"{number}.{name}", value)
        listener.add_tensors("optimizer", tensors)

    def _hook_steps(self, stack: ExitStack, ops: OpMode) -> None:
        """Record operations until the stack is closed, while the training makes a step."""

    def _hook(self) -> ExitStack:
        with ExitStack() as stack:
            if "op" in self._kinds:
                self._ops = OpMode(self._settings, self.collector)
                stack.enter_context(self._ops.attach(self._model))
                self._hook_steps(stack, self._ops)
            hooks = hook_model(self._model, self._settings, self._kinds, self.collector)
            stack.enter_context(hooks)
            if "monitor" in self._kinds:
                stack.enter_context(monitors_heard(partial(self.collector.add, "monitor")))
            return stack.pop_all()


class _TrainerProbes(BatchProbes):
    """The probes of one fit."""

    def __init__(
        self, settings: ProbeSettings, trainer: "Trainer", module: nn.Module, write: Write
    ) -> None:
        super().__init__(settings, module, trainer.global_rank, write, lambda: trainer.optimizers)
        self._strategy = trainer.strategy

    def _hook_steps(self, stack: ExitStack, ops: OpMode) -> None:
        for name in ("training_step", "backward", "validation_step"):
            wrap_method(stack, self._strategy, name, ops.entered)


class ProbeRecorder:
    """Takes the probes of a Trainer's fits.

    Variables go before the settings.
    """

    def __init__(self, settings: ProbeSettings, ignored_metrics: Sequence[str] = ()) -> None:
        self._given = settings
        self._ignored_metrics = tuple(ignored_metrics)
        self._settings = settings
        self._forget()

    def _forget(self) -> None:
        """Forget all that belongs to one fit."""
        self._probes = BatchProbes(ProbeSettings(), nn.Module(), 0, _drop, list)
        self._replay: Replay | None = None
        self._replayed: ExitStack | None = None
        self._traced = ExitStack()
        self._validated = 0  # batches of this validation

    def __getstate__(self) -> dict[str, Any]:
        copied = ProbeRecorder(self._given, self._ignored_metrics)
        return vars(copied) | {"_settings": self._settings}

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
        settings = self._settings
        settings.check_ranks(trainer.world_size)
        if settings.kinds and settings.takes_rank(trainer.global_rank):
            probes = self._probes = _TrainerProbes(settings, trainer, module, recorder.append)
            if probes.dump is not None and settings.kinds & WRITTEN:
                self._trace_hooks(trainer, probes, probes.dump.folder)
            _warn_of_idle_patterns(settings, module)
        if settings.replay_every:
            append = _append_after(self._probes, recorder)
            self._replay = Replay(trainer, module, append, on_drift)

    def start_batch(self, trainer: "Trainer", batch: Any, batch_idx: int) -> None:
        """Record the state at the start of the batch, and hook the model if it is probed."""
        if self._replayed is not None:
            self._end_replay()
        self._start_probes(trainer, batch, trainer.global_step, batch_idx)
        # Last, because it comes off first.
        if self._replay is not None:
            self._start_replay(trainer, self._replay, batch_idx)

    def start_validation_batch(self, trainer: "Trainer", batch: Any) -> None:
        """Record a batch of a validation within a fit, which may feed back into the training."""
        if not trainer.sanity_checking:
            number = VALIDATION + self._validated
            self._validated += 1
            # It belongs to the training batch before it.
            self._start_probes(trainer, batch, max(trainer.global_step - 1, 0), number)

    def _start_probes(self, trainer: "Trainer", batch: Any, step: int, number: int) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._probes.start(ProbePoint(trainer.current_epoch, step, number), scaler)
        self._probes.take_batch(batch)

    def end_validation_batch(self) -> None:
        """Write the records of a batch of a validation."""
        self._probes.collector.end()

    def end_validation(self) -> None:
        """Number the batches of the next validation from the first."""
        self._validated = 0

    def save_state(self, trainer: "Trainer", moment: str) -> None:
        """Save the state that the ledger is about to record, if values are saved at this step."""
        point = StatePoint(trainer.current_epoch, trainer.global_step, moment)
        self._probes.save_state(point)

    def take_loss(self, loss: Tensor) -> None:
        """Take the loss that is about to be differentiated."""
        self._probes.take_loss(loss)

    def take_step(self, optimizer: Any) -> None:
        """Take the gradients and the state that an optimizer is about to use."""
        self._probes.take_step(optimizer)

    def end_batch(self, trainer: "Trainer", outputs: Any) -> None:
        """Record the results of the batch, and write its records."""
        if self._replayed is not None:
            self._end_replay()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        scalars = {}
        if "scalar" in self._settings.kinds:
            scalars = {
                name: value
                for name, value in trainer.callback_metrics.items()
                if not any(fnmatchcase(name, pattern) for pattern in self._ignored_metrics)
            }
        self._probes.end(loss, scalars)

    def flush(self) -> None:
        """Write the pending records."""
        self._probes.flush()

    def end(self) -> None:
        """End the fit: write the pending records, and remove every hook."""
        try:
            self.flush()
        finally:
            self._end_replay()
            self._probes.unhook()
            self._traced.close()
            self._forget()

    def _trace_hooks(self, trainer: "Trainer", probes: BatchProbes, folder: Path) -> None:
        """Trace the state that is saved, around each hook that Lightning calls."""

        def take() -> str | None:
            if self._probes is not probes:
                return None
            return probes.digest_state(trainer.global_step)

        profiler = cast(Any, trainer).profiler
        traced = HookTrace(folder, take).around(profiler.profile)
        replace_method(self._traced, profiler, "profile", traced)

    def _start_replay(self, trainer: "Trainer", replay: Replay, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx % self._settings.replay_every == 0:
            point = ProbePoint(trainer.current_epoch, trainer.global_step, batch_idx)
            self._replayed = replay.attach(point, self._probes.collector.paused)

    def _end_replay(self) -> None:
        replayed, self._replayed = self._replayed, None
        if replayed is not None:
            replayed.close()


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
    probes: BatchProbes, recorder: TrainerRecorder
) -> Callable[[Mapping[str, Json]], None]:
    """Return a function that writes a record after those of the finished batches."""

    def append(record: Mapping[str, Json]) -> None:
        probes.collector.catch_up()
        recorder.append(record)

    return append


def _drop(_: Mapping[str, Json]) -> None:
    """Write nothing."""


def _take_rng(listener: Listener) -> None:
    state = capture_rng()
    version, words, normal = state.python
    listener.add("rng", "python", f"{version} {array('Q', words).tobytes().hex()} {normal}")
    own = state.numpy["state"]
    rest = f"{own['pos']} {state.numpy['has_gauss']} {float(state.numpy['gauss']).hex()}"
    listener.add("rng", "numpy", f"{own['key'].tobytes().hex()} {rest}")
    listener.add("rng", "torch", state.torch_cpu)
    for device, states in state.devices.items():
        listener.add_tensors("rng", {f"{device}:{n}": own for n, own in states.items()})
