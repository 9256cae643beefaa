"""The probes of a training's batches; hooks exist only during the probed batches."""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_d9m.engine.control.seeding import read_generators
from lightning_d9m.engine.hashing.training_state import ModelTensors, optimizer_state, plain_name
from lightning_d9m.engine.ledger.kinds import ROOT, VALIDATION
from lightning_d9m.engine.probes.evidence import Evidence
from lightning_d9m.engine.probes.module_hooks import OpMode, hook_model
from lightning_d9m.engine.probes.settings import ProbeSettings
from lightning_d9m.engine.probes.trace import (
    Leaves,
    ProbeCollector,
    Take,
    Write,
    monitors_heard,
    name_leaves,
)
from lightning_d9m.engine.probes.training import (
    NOTHING,
    ProbePoint,
    Probes,
    StatePoint,
    Training,
    Watched,
)


class BatchProbes(Probes):
    """Takes the probes that the settings name, of the batches of a training.

    ``write`` takes the records.
    """

    @property
    def are_idle(self) -> bool:
        """False: each batch is looked at."""
        return False

    def __init__(
        self, settings: ProbeSettings, training: Training, folder: Path, rank: int, write: Write
    ) -> None:
        super().__init__()
        self._settings, self._kinds = settings, settings.kinds
        self._training, model = training, training.model
        if settings.evidence:
            of = settings.evidence_of
            self.evidence = Evidence(folder, rank, settings.evidence, of)
        save = None if self.evidence is None else self.evidence.save
        self.collector = ProbeCollector(write, save)
        self._tensors = ModelTensors(model, settings.takes_parameter)
        self._hooks: ExitStack | None = None
        self._has_lazy = False  # whether a parameter had no shape when the model was hooked
        self._ops: OpMode | None = None
        self._ops_entered = ExitStack()
        self._took_loss = False
        # Nothing is recorded for a pattern that fits only another model.
        modules = [plain_name(name) for name, _ in model.named_modules()]
        tensors = [*model.named_parameters(), *model.named_buffers()]
        known = [*modules, *(plain_name(name) for name, _ in tensors)]
        patterns = self._settings.probe_modules
        idle = [p for p in patterns if not any(fnmatchcase(n or ROOT, p) for n in known)]
        if idle:
            some = ", ".join(map(repr, modules[1:6])) or "none"
            warnings.warn(
                f"probe_modules has {', '.join(map(repr, idle))}, and no module, parameter or "
                f"buffer of {type(model).__name__} is called so: nothing is recorded for it. Its "
                f"modules are {some}{', ...' if len(modules) > 6 else ''}.",  # noqa: PLR2004 - as many as are shown
                stacklevel=2,
            )

    def start(self, point: ProbePoint, batch: Any = None, scaler: Any = None) -> None:
        """Record the state at the start of a batch, and hook the model, if its step is probed."""
        # With evidence the last batch lasts until here: hooks between two may write to the state.
        self._ops_entered.close()
        super().start(point)
        if point.step not in self._settings.steps:
            self.unhook()
            self.collector.close()
            return
        self.collector.begin(point)
        if self.evidence is not None:
            self.evidence.begin(point)
        self._took_loss = False
        if point.batch <= VALIDATION:  # no later batch of a validation changes it
            self._take_states(self.collector.add_leaves, scaler)
        # A parameter gets its hook when it has a shape, which the first batch may give it.
        if self._has_lazy:
            self.unhook()
        if self._hooks is None:
            self._hooks = self._hook()
            self._has_lazy = any(map(is_lazy, self._training.model.parameters()))
        if self._ops is not None:
            self._ops.begin()
        self._enter_ops()
        self.take_batch(batch)

    def take_batch(self, batch: Any) -> None:
        """Take the batch, or what the model is given of it."""
        if batch is not None and "batch" in self._kinds and self.collector.listens:
            self.collector.add("batch", "batch", batch)
            if Watched.watch is not None:
                Watched.watch.take_samples(batch)

    def take_loss(self, loss: Any) -> None:
        """Take the loss, and the generators before its backward pass."""
        if "loss" in self._kinds:
            self._took_loss = True
            self.collector.add("loss", "loss", loss)
            if "rng" in self._kinds and self.collector.listens:
                # A thread may have drawn from the generators, too.
                self.collector.add_leaves("rng", [*read_generators().items()])

    def take_step(self, optimizer: Any, *_: object) -> None:
        """Take the gradients and the state that an optimizer is about to use."""
        # Before anything is taken: the operations of an optimizer are not those of a module, and
        # its state shows what they did.
        self._leave_ops()
        if not self.collector.listens:
            return
        if "gradient" in self._kinds:
            self._take_gradients(optimizer, self.collector.add_leaves)
        if "optimizer" in self._kinds:
            self._take_optimizers(self._tensors.look()[2], self.collector.add_leaves)

    def end(self, loss: Any = None, scalars: Mapping[str, Any] = NOTHING) -> None:
        """Record the results of the batch, and write its records."""
        self._leave_ops()
        if loss is not None and not self._took_loss:
            self.take_loss(loss)
        if "scalar" in self._kinds:
            for name, value in sorted(scalars.items()):
                self.collector.add("scalar", name, value)
        self.collector.end()

    def save_state(self, point: StatePoint) -> None:
        """Keep the state that the ledger is about to record, if values are kept at this step."""
        if (evidence := self.evidence) is not None and point.step in self._settings.steps:

            def save(kind: str, leaves: Leaves) -> None:
                for name, leaf in leaves:
                    evidence.save(point, (kind, name, 0), leaf)

            # The program did not call the operations that read the state here.
            with self.collector.paused():
                self._take_states(save)

    def unhook(self) -> None:
        """Remove the hooks."""
        hooks, self._hooks, self._ops = self._hooks, None, None
        if hooks is not None:
            hooks.close()

    def flush(self) -> None:
        """End the batch and write all records."""
        self.collector.close()

    def close(self) -> None:
        """Remove the hooks, and write the pending records and the evidence."""
        self._ops_entered.close()
        self.unhook()
        self.flush()
        if self.evidence is not None:
            self.evidence.close()

    def _take_states(self, take: Take, scaler: Any = None) -> None:
        """Pass the state of the selected kinds and parameters to a function."""
        kinds = self._kinds
        if "rng" in kinds:
            take("rng", [*read_generators().items()])
        if kinds.isdisjoint({"weight", "buffer", "optimizer"}):
            return
        parameters, buffers, names = self._tensors.look()
        if "weight" in kinds:
            take("weight", [*parameters.items()])
        if "buffer" in kinds:
            take("buffer", [*buffers.items()])
        if "optimizer" in kinds:
            self._take_optimizers(names, take)
            if scaler is not None:
                scale = scaler._get_scale_async()  # noqa: SLF001 - get_scale() waits for the device
                scale = scaler.get_scale() if scale is None else scale
                take("optimizer", [("scaler.scale", scale)])

    def _take_gradients(self, optimizer: Any, take: Take) -> None:
        used = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gradients = [
            (name, parameter.grad)
            for name, parameter in self._tensors.look()[0].items()
            if id(parameter) in used and parameter.grad is not None
        ]
        take("gradient", gradients)

    def _take_optimizers(self, names: Mapping[int, str], take: Take) -> None:
        values: list[tuple[str, object]] = []
        tensors: list[tuple[str, object]] = []
        for number, optimizer in enumerate(self._training.list_optimizers()):
            for name, value in optimizer_state(optimizer, names):
                key, _, parameter = name.partition(".")
                if key != "group" and not self._settings.takes_parameter(parameter):
                    continue
                if isinstance(value, Tensor):
                    tensors.append((f"{number}.{name}", value))
                elif isinstance(value, Mapping):
                    # One value for each setting of a group, so that a difference names it.
                    for setting, own in value.items():
                        values += name_leaves(f"{number}.{name}:{setting}", own)
                else:
                    values += name_leaves(f"{number}.{name}", value)
        take("optimizer", values + tensors)

    def _hook(self) -> ExitStack:
        with ExitStack() as stack:
            training, collector = self._training, self.collector
            model, settings = training.model, self._settings
            if "op" in self._kinds or settings.evidence_ops:
                self._ops = OpMode(model, settings, collector, self.evidence)
                # Without evidence only those of a step: probes of operations cost much, and their
                # places must be the same on any number of processes.
                if training.wrap_steps is not None:
                    training.wrap_steps(stack, self._ops.entered)
            compiled, kinds, take = training.is_compiled, self._kinds, collector.add_leaves
            stack.enter_context(
                hook_model(model, settings, kinds, take, ops=self._ops, is_compiled=compiled)
            )
            if "monitor" in self._kinds:
                stack.enter_context(monitors_heard(partial(collector.add, "monitor")))
            if training.wrap_steps is None:
                for optimizer in training.list_optimizers():
                    stack.callback(optimizer.register_step_pre_hook(self.take_step).remove)
                    stack.callback(optimizer.register_step_post_hook(self._enter_ops).remove)
            return stack.pop_all()

    def _enter_ops(self, *_: object) -> None:
        if self._ops is None or not self.collector.listens:
            return
        # Evidence has all operations until the next batch begins: any may write to the state.
        if self._training.wrap_steps is None or self.evidence is not None:
            self._ops_entered.close()
            self._ops_entered.enter_context(self._ops.entered())

    def _leave_ops(self) -> None:
        if self.evidence is None:
            self._ops_entered.close()
