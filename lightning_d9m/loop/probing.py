"""The probes of a recorded loop: hooks exist only during the probed batches."""

import os
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from lightning_d9m.control.env_settings import variable_of
from lightning_d9m.errors import SettingError
from lightning_d9m.hashing.training_state import ModelTensors
from lightning_d9m.ledger.kinds import VALIDATION
from lightning_d9m.lightning.probing.batch_state import take_states, take_step
from lightning_d9m.lightning.probing.dispatch_mode import OpMode
from lightning_d9m.lightning.probing.module_hooks import hook_model
from lightning_d9m.probes.dumps import Dump, StateDump
from lightning_d9m.probes.monitor import monitors_heard
from lightning_d9m.probes.settings import ProbeSettings
from lightning_d9m.probes.trace import ProbeCollector, ProbePoint, StatePoint, Write


def read_probe_settings(given: ProbeSettings, world_size: int) -> ProbeSettings:
    """Return the settings of a loop with the values of variables, which take precedence.

    Raises:
        SettingError: If a value is not allowed, or steps are to be run twice.
    """
    settings = given.overridden(os.environ)
    if settings.replay_every:
        raise SettingError(
            f"{variable_of('replay_every')} is {settings.replay_every}, and a Recorder cannot run "
            "a step of your own loop twice. Unset it, or train with a Trainer of Lightning and "
            "DeterminismCallback(replay_every=...)."
        )
    settings.check_ranks(world_size)
    return settings


class LoopProbes:
    """Takes the probes that the settings name; replays need the callback."""

    def __init__(
        self,
        settings: ProbeSettings,
        model: torch.nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        rank: int,
        write: Write,
    ) -> None:
        self._settings = settings
        self._kinds = settings.kinds
        self._model = model
        self._optimizers = optimizers
        dump = None if settings.dump is None else Dump(settings.dump, rank, settings.dump_names)
        self._dump = dump
        self._collector = ProbeCollector(write, None if dump is None else dump.save)
        self._tensors = ModelTensors(model, settings.takes_parameter)
        self._hooks: ExitStack | None = None
        self._ops: OpMode | None = None
        self._ops_entered = ExitStack()

    def start_batch(self, point: ProbePoint, batch: Any) -> None:
        """Record the state and the batch, and hook the model."""
        if point.step not in self._settings.steps:
            self.close()
            return
        self._collector.begin(point)
        if point.batch <= VALIDATION:  # no later batch of a validation changes it
            take_states(self._tensors, self._optimizers, self._settings, self._collector)
        if batch is not None:
            self.take_batch(batch)
        if self._hooks is None:
            self._hooks = self._hook()
        if self._ops is not None:
            self._ops.begin()
        self._enter_ops()

    def take_batch(self, batch: Any) -> None:
        """Record the batch, or what the model is given of it."""
        if "batch" in self._kinds and self._collector.listens:
            self._collector.add("batch", "batch", batch)

    def end_batch(self, loss: torch.Tensor | None, scalars: dict[str, float]) -> None:
        """Record the results of the batch, and write its records."""
        self._leave_ops()
        if loss is not None and "loss" in self._kinds:
            self._collector.add("loss", "loss", loss)
        if "scalar" in self._kinds:
            for name, value in sorted(scalars.items()):
                self._collector.add("scalar", name, value)
        self._collector.end()

    def save_state(self, point: StatePoint) -> None:
        """Save the state that the ledger is about to record, if values are saved at this step."""
        if self._dump is not None and point.step in self._settings.steps:
            listener = StateDump(self._dump, point)
            take_states(self._tensors, self._optimizers, self._settings, listener)

    def flush(self) -> None:
        """Write the pending records."""
        self._collector.close()

    def close(self) -> None:
        """Write the pending records and remove the hooks."""
        self._leave_ops()
        hooks, self._hooks = self._hooks, None
        self._ops = None
        if hooks is not None:
            hooks.close()
        self._collector.close()

    def _hook(self) -> ExitStack:
        with ExitStack() as stack:
            if "op" in self._kinds:
                self._ops = OpMode(self._settings, self._collector)
                stack.enter_context(self._ops.attach(self._model))
            hooks = hook_model(self._model, self._settings, self._kinds, self._collector)
            stack.enter_context(hooks)
            for optimizer in self._optimizers:
                before = optimizer.register_step_pre_hook(self._start_step)
                after = optimizer.register_step_post_hook(self._enter_ops)
                stack.callback(before.remove)
                stack.callback(after.remove)
            if "monitor" in self._kinds:
                heard = monitors_heard(partial(self._collector.add, "monitor"))
                stack.enter_context(heard)
            return stack.pop_all()

    def _enter_ops(self, *_: object) -> None:
        """Record operations until the optimizer's step begins, or the loop's."""
        if self._ops is not None and self._collector.listens:
            self._leave_ops()
            self._ops_entered.enter_context(self._ops.entered())

    def _leave_ops(self) -> None:
        self._ops_entered.close()

    def _start_step(self, optimizer: Any, *_: object) -> None:
        self._leave_ops()
        if self._collector.listens:
            take_step(self._tensors, optimizer, self._optimizers, self._settings, self._collector)
