"""The probes of a recorded loop: hooks exist only during the probed batches."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from lightning_d9m.control.env_settings import variable_of
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.probing.recorder import BatchProbes
from lightning_d9m.probes.settings import ProbeSettings
from lightning_d9m.probes.trace import ProbePoint, Write


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


class LoopProbes(BatchProbes):
    """The probes of a loop; replays need the callback.

    Operations are recorded from the start of a batch on, but for those of an optimizer.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        model: torch.nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        rank: int,
        write: Write,
    ) -> None:
        super().__init__(settings, model, rank, write, lambda: optimizers)
        self._optimizers = optimizers
        self._ops_entered = ExitStack()

    def start(self, point: ProbePoint, scaler: Any = None) -> None:
        """Record the state at the start of a batch, and hook the model, if its step is probed."""
        self._ops_entered.close()
        super().start(point, scaler)
        self._enter_ops()

    def end(self, loss: Any, scalars: Mapping[str, Any]) -> None:
        """Record the results of the batch, and write its records."""
        self._ops_entered.close()
        super().end(loss, scalars)

    def take_step(self, optimizer: Any, *_: object) -> None:
        """Take the gradients and the state that an optimizer is about to use."""
        self._ops_entered.close()
        super().take_step(optimizer)

    def close(self) -> None:
        """Write the pending records and remove the hooks."""
        self._ops_entered.close()
        self.unhook()
        self.flush()

    def _hook(self) -> ExitStack:
        with super()._hook() as stack:
            for optimizer in self._optimizers:
                before = optimizer.register_step_pre_hook(self.take_step)
                after = optimizer.register_step_post_hook(self._enter_ops)
                stack.callback(before.remove)
                stack.callback(after.remove)
            return stack.pop_all()

    def _enter_ops(self, *_: object) -> None:
        if self._ops is not None and self.collector.listens:
            self._ops_entered.close()
            self._ops_entered.enter_context(self._ops.entered())
