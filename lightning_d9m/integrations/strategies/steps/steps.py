"""The steps of a Trainer: each runs the micro-batches of all logical ranks of the process."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_d9m.attribute_patches import AttributePatches, Replacement
from lightning_d9m.engine.control.data.resumable_sampler import MicroBatches
from lightning_d9m.engine.control.seeding import derive_seed, seed_micro_batch
from lightning_d9m.engine.state.parts import (
    ATTRIBUTES,
    GENERATOR,
    OPAQUE,
    find_kind,
    is_of_lightning,
    is_of_program,
)
from lightning_d9m.engine.state.plain_data import encode_plain
from lightning_d9m.engine.state.state import find_generators
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.strategies.steps.logged_values import LoggedValues
from lightning_d9m.integrations.strategies.sums.collectives import move_tensors
from lightning_d9m.integrations.strategies.sums.metric_states import MetricStates
from lightning_d9m.integrations.strategies.sums.sandbox import Sandbox
from lightning_d9m.integrations.trainer.lightning_private import (
    BEFORE_BATCH_TRANSFER,
    is_validation_due,
    set_logged_batch,
    skips_backward,
)
from lightning_d9m.integrations.trainer.trainer_attributes import (
    OPTIMIZERS,
    Trainer,
    find_metrics,
    list_stored,
    name_callbacks,
    name_program,
)

Step = Callable[..., Any]
_OUTSIDE = ("callbacks.", "datamodule.", "schedulers[", "trainer.")
_LOADING = (DataLoader, Dataset, Sampler)
_EVALUATED = ("on_validation_batch_end", "on_test_batch_end")
# The draws between two steps, such as those of callbacks, are of no logical rank.
_BETWEEN_STEPS = -1
_TRAINED = ("on_train_batch_start", "on_train_batch_end")


class LogicalSteps:
    """Runs the steps of one process in a Trainer's run.

    ``processes`` is the strategy, whose ``sums`` get the gradients, and ``session`` has the seed
    of the run. ``to_device`` moves a batch to the device; it is that of Lightning's strategy.

    Attributes:
        logical_rank: The logical rank whose micro-batch is computed now, or None.
        step_rank: The same, while code of the user runs.
        block: The logical ranks of this process.
        metrics: The states of metrics by logical rank.
        logged: The values that logical ranks log.
        hooks: The hooks of the program that get a batch.
        losses: The losses of the last training step, one for each logical rank of this process.
    """

    def __init__(
        self, trainer: Trainer, processes: Any, session: Any, to_device: Callable[..., Any]
    ) -> None:
        self.logical_rank: int | None = None
        self.step_rank: int | None = None
        self.block: range = processes.block
        current = lambda: self.logical_rank  # noqa: E731 - given to two objects
        self.metrics = MetricStates(find_metrics(trainer), processes, current)
        self.logged = LoggedValues(trainer, processes, current)
        self.hooks = BatchHooks(trainer, processes.gather_values)
        self._trainer, self._processes = trainer, processes
        self._seeds = MicroBatchSeeds(session.settings.seed, session.fit, trainer)
        self._to_device = to_device
        self._module: Any = trainer.lightning_module
        self._entered: set[int] = set()
        self._before_transfer: Callable[..., Any] = getattr(self._module, BEFORE_BATCH_TRANSFER)
        self._sandbox = Sandbox(
            self._module, processes, self._leave_out, self._hide, self._name_owners
        )
        self._ends_steps = any(map(_may_stop, (self._module, *trainer.callbacks)))
        # Whether all processes stop, as of the last exchange, and whether this one wants to.
        self._stops = self._waits = False
        self._place = ("", 0, 0)  # of the last step: stage, epoch and batch
        self.losses: list[Tensor] = []
        self._output: Any = None
        self._loader = 0

    def _name_owners(self) -> dict[str, Any]:
        """Return what a step may change: what a resume restores, and an optimizer's settings."""
        owners = name_program(self._trainer)
        for name, callback in name_callbacks(self._trainer.callbacks).items():
            if is_of_lightning(type(callback)):  # a thread may draw its bar
                owners.pop(name, None)
        # States of optimizers are as large as the weights, and no step changes them: only their
        # groups are watched, whose learning rates a step may set.
        for name in [name for name in owners if name.startswith(OPTIMIZERS)]:
            groups = enumerate(owners.pop(name).param_groups)
            owners |= {f"{name}.param_groups[{n}]": group for n, group in groups}
        self._entered = set(map(id, owners.values()))
        return owners

    def _leave_out(self, path: str, value: Any) -> bool:
        """Return whether others keep an object for each logical rank, or no step changes it."""
        if id(value) in self._entered:
            return False
        # A metric is kept, or a generator seeded, for each logical rank.
        if self.metrics.add(path, value) or self._seeds.add(path, value):
            return True
        # Outside the module and its files a step changes no object of a library; of the Trainer
        # only data are the program's, and others control the loaders of datamodules.
        kinds = (OPAQUE, ATTRIBUTES) if path.startswith("trainer.") else (OPAQUE,)
        outside = path.startswith(_OUTSIDE) and find_kind(value) in kinds
        loads = path.startswith("datamodule.") and isinstance(value, _LOADING)
        return outside or loads or isinstance(value, Optimizer)

    def _hide(self, owner: object) -> Collection[str]:
        """Return the attributes that Lightning sets in an object, besides those of schedulers."""
        kind: Any = type(owner)
        if owner is self._trainer:
            return list_stored(kind) | {name for name in vars(owner) if name[:1] == "_"}
        return list_stored(kind) if any(map(is_of_lightning, kind.__mro__)) else ()

    def attach(self, patches: AttributePatches) -> None:
        """Take part in the Trainer's run, until the patches are undone."""
        # Lightning calls the hook for a whole batch. It may draw, so it must run when the
        # generators have the seed of a micro-batch.
        later = Replacement(self._before_transfer, self._before_transfer_later)
        patches.replace(self._module, BEFORE_BATCH_TRANSFER, later)
        optimization = self._trainer.fit_loop.epoch_loop.automatic_optimization
        patches.replace(optimization, "run", partial(self._run_batch, optimization.run))
        for part in (self.logged, self.metrics, self.hooks):
            part.attach(patches)
        for loop in (self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop):
            end = partial(self._end_advance, loop, loop.on_advance_end)
            patches.replace(loop, "on_advance_end", end)

    def _end_advance(self, loop: Any, end: Callable[..., None], *args: Any) -> None:
        """Run the end of a batch or an epoch, after which a loop may stop, on all processes alike.

        A hook of the program may have set ``should_stop`` on its process alone.
        """
        # An exchange takes about a millisecond, which most programs need not spend on each batch.
        if self._ends_steps:
            self._agree_to_stop()
        # Without one, what other hooks of this process, a logger or the handler of a signal have
        # set since the step waits for the exchange of the next step.
        elif self._trainer.should_stop and not self._stops:
            self._waits, self._trainer.should_stop = True, False
        is_rare = loop is self._trainer.fit_loop or is_validation_due(self._trainer)
        end(*args)
        if is_rare:
            self._agree_to_stop()

    def _agree_to_stop(self) -> None:
        self._stop_if(self._processes.gather_values(self._wants_to_stop()))

    def _wants_to_stop(self) -> bool:
        return self._waits or bool(self._trainer.should_stop)

    def _stop_if(self, wishes: Iterable[bool]) -> None:
        self._trainer.should_stop = self._stops = any(wishes)
        self._waits = False

    def _before_transfer_later(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Run the module's hook, for micro-batches later, when each is seeded."""
        self._loader = dataloader_idx
        if holds_micro_batches(batch):
            return batch
        return self._before_transfer(batch, dataloader_idx=dataloader_idx)

    def train(self, step: Step, backward: Step, batches: Any, *args: Any) -> Any:
        """Run the micro-batches of a training step, and the backward passes of all but the last.

        ``step`` runs ``training_step`` for one micro-batch, and ``backward`` the backward
        pass of a loss, without the hooks after it. ``StochasticWeightAveraging`` trains its last
        epoch without backward passes, for the statistics of batch normalization.

        Returns:
            The output for the last micro-batch, whose backward pass Lightning starts.

        Raises:
            SettingError: If the optimizer runs its closure twice, or there is no loss.
        """
        trainer, output = self._trainer, None
        forward = skips_backward(trainer)
        # In each step, too, since a callback may change the number between epochs.
        if not forward:
            refuse_accumulation(trainer.accumulate_grad_batches)
        self._begin_training_step()
        for rank, batch in self._pair(batches):
            self._clear_gradients()
            output = self._run(step, rank, batch, args)
            loss = _find_loss(output)
            self.losses.append(loss.detach())
            if rank == self.block.start != self.block[-1]:
                detached = loss.detach()
                self._output = (
                    {**output, "loss": detached} if isinstance(output, Mapping) else detached
                )
            self._sandbox.start_backward()
            if forward:
                self._end_rank(rank)
                continue
            if rank == self.block[-1]:
                break
            self._clear_gradients()  # of a backward pass in the step, as Lightning does
            backward(loss)
            self.take_gradients(rank)
        return output

    def _begin_training_step(self) -> None:
        # All that the seeds depend on besides the logical rank. It is the same in a resumed run.
        batch = self._trainer.fit_loop.epoch_loop.batch_idx
        before, self._place = self._place, ("train", self._trainer.current_epoch, batch)
        # The second run would begin from the gradients and buffers that the first one has left.
        if self._place == before:
            raise SettingError(
                "The optimizer ran the training step twice for one batch, as LBFGS does, which "
                "logical ranks do not support: use an optimizer that runs its closure once, or "
                "train without logical_ranks."
            )
        self._clear_gradients()
        self._sandbox.begin()
        self._output = None
        self.losses = []

    def take_gradients(self, rank: int) -> None:
        """Add the gradients of a logical rank to the sums."""
        if rank == self.block[-1]:
            self._processes.sums.finish(rank)
        else:
            self._processes.sums.set_aside(rank)
        self._end_rank(rank)

    def _end_rank(self, rank: int) -> None:
        self._sandbox.end(rank, last=rank == self.block[-1])
        if rank == self.block[-1]:
            self._end("train")

    def _clear_gradients(self) -> None:
        # Not the `zero_grad` of an optimizer: parameters of other optimizers get gradients, too,
        # and None tells that there is none.
        for parameter in self._module.parameters():
            parameter.grad = None

    def _run_batch(self, run: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Run Lightning's optimization of a batch, and return what ``on_train_batch_end`` gets.

        That is the output of the process's first logical rank: on process 0 of logical rank 0,
        whatever the number of processes.
        """
        # The fit after a search for a learning rate begins at the same place as the search.
        self._place = ("", 0, 0)
        outputs = run(*args)
        if self._output is None:
            return outputs
        output, self._output = self._output, None
        trainer = self._trainer
        kind = trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls
        # As Lightning makes the output of the last micro-batch, so that hooks find a dict. In the
        # last epoch of StochasticWeightAveraging it divides the loss.
        result = kind.from_training_step_output(output, trainer.accumulate_grad_batches)
        return dict(result.asdict())

    def evaluate(self, stage: str, epoch: int, step: Step, batches: Any, *args: Any) -> Any:
        """Run the micro-batches of an evaluation, and return their outputs.

        ``epoch`` is the number of the evaluation. ``step`` runs ``validation_step`` or the
        like for one micro-batch.

        Raises:
            SettingError: If the evaluation changes what depends on the micro-batch.
        """
        fitting = self._trainer.state.fn == "fit"
        owner = self._trainer.fit_loop.epoch_loop if fitting else self._trainer
        loop = getattr(owner, "val_loop" if fitting else f"{stage}_loop")
        # The number of the batch in its loader, from 1. Draws of each loader are separate, as of
        # predictions some processes have fewer batches.
        number = int(loop.batch_progress.current.ready - sum(loop.max_batches[: self._loader]))
        self._place = (f"{stage} {self._loader}" if self._loader else stage, epoch, number)
        self._sandbox.begin()
        # A class, so that hooks after the batch can tell the outputs of logical ranks from a list
        # that the program returns.
        outputs = MicroBatches()
        for rank, batch in self._pair(batches):
            outputs.append(self._run(step, rank, batch, args))
            self._sandbox.end(rank)
        self._end(stage)
        return outputs

    def close(self) -> None:
        """Leave the states of all logical ranks in the metrics."""
        self.metrics.close(alone=self._trainer.state.status == "interrupted")

    def _pair(self, batches: Any) -> Iterator[tuple[int, Any]]:
        # A batch of several loaders is a collection of their micro-batches; a loader that has ended
        # may give None.
        parts = [part for part in tree_leaves(batches) if isinstance(part, MicroBatches)]
        if not parts:
            raise SettingError(
                "A step has the argument dataloader_iter and takes its batches itself, so logical "
                "ranks cannot split them: take batch and batch_idx, or train without logical_ranks."
            )
        for place, rank in enumerate(self.block[: len(parts[0])]):  # predictions may end earlier
            yield rank, _select_all(batches, place)

    def _run(self, step: Step, rank: int, batch: Any, args: tuple[Any, ...]) -> Any:
        self._leave()
        self.logical_rank = rank
        self.metrics.enter(rank)
        # Directly before code of the program runs, so that what this class does draws nothing of
        # the micro-batch.
        self._seeds.start(*self._place, rank)
        # Until now collectives are those of this class.
        self.step_rank = rank
        try:
            batch = self._before_transfer(batch, dataloader_idx=self._loader)
            batch = self._to_device(batch, dataloader_idx=self._loader)
            set_logged_batch(self._trainer, batch)
            return step(batch, *args)
        finally:
            self.step_rank = None

    def _leave(self) -> None:
        if self.logical_rank is not None:
            self.metrics.leave(self.logical_rank)
        self.logical_rank = None

    def _end(self, stage: str) -> None:
        self._leave()
        # The logged values travel with the changes, so that a step needs one exchange of values.
        # If a step ends the training, such as at a NaN, all processes must leave the loop together.
        extra = self.logged.take(), self._wants_to_stop()
        logged, wishes = zip(*self._sandbox.finish(stage, extra), strict=True)
        self._stop_if(wishes)
        self.logged.add(list(logged))
        # Otherwise a hook would continue the stream of the last logical rank of this process, which
        # depends on the number of processes.
        self._seeds.start(*self._place, _BETWEEN_STEPS)


class BatchHooks:
    """Wraps the hooks of the module and of callbacks that the program itself defines.

    - After a batch of a validation or test they get the outputs and the micro-batches of all
      logical ranks, so that a list of them has them all, as the processes of DDP have together.
    - In training they get the micro-batch of the process's first logical rank, as its output: on
      process 0 those of logical rank 0.

    ``gather`` returns the plain values of every process.
    """

    def __init__(self, trainer: Trainer, gather: Callable[[Any], list[Any]]) -> None:
        self._trainer = trainer
        self._gather = gather
        self._last: tuple[Any, list[Any]] = (None, [])

    def attach(self, patches: AttributePatches) -> None:
        """Wrap the hooks."""
        for owner in (self._trainer.lightning_module, *self._trainer.callbacks):
            for names, call in ((_EVALUATED, self._call_evaluated), (_TRAINED, self._call_trained)):
                for name in names:
                    hook = getattr(owner, name, None)
                    # Hooks of Lightning's own classes do not look at outputs; to gather for them
                    # would cost an exchange in each batch.
                    if hook is not None and not is_of_lightning(hook):
                        patches.replace(owner, name, Replacement(hook, partial(call, hook)))

    def _call_evaluated(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook, which gets outputs and batch, and maybe Trainer and module before."""
        place = next((n for n, arg in enumerate(args) if isinstance(arg, MicroBatches)), None)
        if place is not None:
            outputs, batch = args[place : place + 2]
            if self._last[0] is not outputs:  # once for all hooks of a batch
                self._last = (outputs, self._gather_all(outputs, batch))
            args = (*args[:place], *self._last[1], *args[place + 2 :])
        return hook(*args, **kwargs)

    def _call_trained(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        *own, batch, number = args
        if holds_micro_batches(batch):
            batch = move_tensors(_select_all(batch, 0), self._trainer.lightning_module)
        return hook(*own, batch, number, **kwargs)

    def _gather_all(self, outputs: MicroBatches, batch: Any) -> list[Any]:
        plain = [list(outputs), [_select_all(batch, place) for place in range(len(outputs))]]
        try:
            # Tensors can always be sent, and to encode them would copy them only to find that out.
            encode_plain(tree_map_only(Tensor, lambda _: None, plain))
        except SettingError as error:
            raise SettingError(
                "A hook after each batch of an evaluation gets the outputs and batches of all "
                f"logical ranks, and these cannot be sent: {error}"
            ) from error
        parts = self._gather(plain) if self._trainer.world_size > 1 else [plain]
        moved = move_tensors(parts, self._trainer.lightning_module)
        return [MicroBatches(own for part in moved for own in part[place]) for place in (0, 1)]


def _may_stop(owner: object) -> bool:
    """Return whether the hook after a batch may set ``should_stop``, besides Lightning's timer."""
    hook: Any = getattr(owner, "on_train_batch_end", None)
    if hook is None or not is_of_lightning(hook):
        return hook is not None
    # The search for a learning rate does so, and would take another step without an exchange.
    return "should_stop" in hook.__code__.co_names


def holds_micro_batches(batch: Any) -> bool:
    """Return whether a batch of one or several loaders has a part for each logical rank."""
    return any(isinstance(part, MicroBatches) for part in tree_leaves(batch))


def _select_all(batch: Any, place: int) -> Any:
    """Return the micro-batch of one logical rank, of one or several loaders."""
    return tree_map(lambda part: part[place] if isinstance(part, MicroBatches) else part, batch)


def refuse_accumulation(count: int) -> None:
    """Refuse to add the gradients of several batches.

    Raises:
        SettingError: If the number of batches is not 1.
    """
    if count != 1:
        raise SettingError(
            f"accumulate_grad_batches is {count}, and a step of logical ranks already adds the "
            f"gradients of several micro-batches: multiply logical_ranks by {count}, and leave "
            "accumulate_grad_batches out."
        )


def _find_loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise SettingError(
            f"training_step returned {type(output).__name__} without a loss, and every logical "
            "rank needs one: return a loss for each batch, for example one multiplied by zero."
        )
    return loss


class MicroBatchSeeds:
    """Seeds all generators for each micro-batch.

    What a logical rank draws then depends neither on the process that computes it nor on what that
    process has computed before.
    """

    def __init__(self, seed: int, fit: int, trainer: Trainer) -> None:
        self._seed = seed
        self._fit = fit
        # Those that the user's objects hold are seeded, too.
        owners: dict[str, object] = {"datamodule": trainer.datamodule}
        for name, module in trainer.lightning_module.named_modules():
            owners[f"model.{name}"] = module
            if is_of_program(module.__class__) or module is trainer.lightning_module:
                # A generator may also be a global of the module that defines the class.
                source = type(module).__module__
                # A file that the program has loaded itself need not be among the modules.
                variables = getattr(sys.modules.get(source), "__dict__", {}).items()
                owners[source] = {n: own for n, own in variables if find_kind(own) is GENERATOR}
        owners |= name_callbacks(trainer.callbacks)
        self._generators: dict[str, Any] = find_generators(owners)

    def add(self, path: str, value: Any) -> bool:
        """Add a generator of the module, unless it is known; return whether it is one."""
        is_generator = find_kind(value) is GENERATOR
        if is_generator and all(value is not known for known in self._generators.values()):
            self._generators[f"model.{path}"] = value
        return is_generator

    def start(self, stage: str, epoch: int, batch: int, logical_rank: int) -> None:
        """Seed for a micro-batch of a stage."""
        base = self._seed if stage == "train" else derive_seed(self._seed, f"{stage} step")
        seed_micro_batch(base, fit=self._fit, epoch=epoch, logical_rank=logical_rank, batch=batch)
        for path, generator in self._generators.items():
            seed = derive_seed(
                base,
                f"generator {path}",
                fit=self._fit,
                rank=logical_rank,
                epoch=epoch,
                index=batch,
            )
            if isinstance(generator, np.random.Generator):
                kind: Any = type(generator.bit_generator)
                # A new bit generator of the same kind gives the state; the object itself stays, as
                # the program refers to it.
                generator.bit_generator.state = kind(seed).state
            elif isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.RandomState):
                # A RandomState takes seeds of 32 bits only.
                generator.seed(seed & 0xFFFFFFFF)
            else:
                generator.seed(seed)
