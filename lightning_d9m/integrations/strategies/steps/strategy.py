"""``DDPDeterministicStrategy(logical_ranks=8)``: the same bits on any number of processes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.engine.control.environment import read_threads
from lightning_d9m.engine.control.settings import read_variable, variable_of
from lightning_d9m.engine.hashing.shards import has_base
from lightning_d9m.engine.ranks.groups import (
    RankLiveness,
    close_default_group,
    connect_liveness,
    is_default_group_closed,
    lost_ranks_named,
    ranks_of_group,
    reopen_default_group,
)
from lightning_d9m.engine.ranks.ranks import agree
from lightning_d9m.engine.state.plain_data import decode_plain, encode_plain
from lightning_d9m.errors import DriftError, RankLostError, RanksDisagreeError, SettingError
from lightning_d9m.integrations.strategies.steps.loaders import group_loader
from lightning_d9m.integrations.strategies.steps.logged_values import sum_exactly
from lightning_d9m.integrations.strategies.steps.steps import (
    LogicalSteps,
    holds_micro_batches,
    refuse_accumulation,
)
from lightning_d9m.integrations.strategies.strategies import register_strategies
from lightning_d9m.integrations.strategies.sums.collectives import (
    refuse_collective,
    send_tensors,
    watch_collectives,
)
from lightning_d9m.integrations.strategies.sums.gradients import LogicalGradients
from lightning_d9m.integrations.strategies.sums.malloc import disable_malloc_trim
from lightning_d9m.integrations.strategies.sums.tree import Blocks
from lightning_d9m.integrations.trainer.packages import combined_base, loaded_packages
from lightning_d9m.integrations.trainer.trainer_attributes import Trainer

_DDPStrategy: Any = combined_base("strategies.DDPStrategy")
# The options of DDP that go with logical ranks.
_OPTIONS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision_plugin", "process_group_backend", "timeout", "start_method"),
    "find_unused_parameters",  # not needed: logical ranks handle what it is for
)
# Modules, parameters and optimizers that are refused, by the name of a class, and the reason.
_REFUSED = {
    "SyncBatchNorm": "needs the activations of all logical ranks at once: use GroupNorm, LayerNorm "
    "or BatchNorm without sync_batchnorm=True",
    **dict.fromkeys(
        ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"),
        "reduces or divides parameters itself, and logical ranks sum whole gradients: leave it out",
    ),
    "DTensor": "is divided among processes, and logical ranks need whole parameters in each "
    "process: leave out fully_shard and parallelize_module",
    "ZeroRedundancyOptimizer": "divides the work of an optimizer among the processes, and with "
    "logical ranks each process runs the whole optimizer: use the optimizer that it wraps",
}
# Errors that another rank has caused, or all.
_OF_OTHERS = (RankLostError, RanksDisagreeError)


def check_trainer(trainer: Trainer, strategy: Any, session: object) -> None:
    """Refuse what logical ranks do not support, at every number of processes.

    Raises:
        SettingError: With the setting, and what to do.
    """
    if session is None:
        raise SettingError(
            f"The strategy has logical_ranks={strategy.logical_ranks}, and the Trainer has no "
            "DeterminismCallback, which seeds the logical ranks: add "
            "callbacks=[DeterminismCallback()]."
        )
    module: Any = trainer.lightning_module
    optimizers = {f"optimizer {number}": each for number, each in enumerate(trainer.optimizers)}
    parts = dict(module.named_modules()) | dict(module.named_parameters()) | optimizers
    for name, part in parts.items():
        for kind, reason in _REFUSED.items():
            if has_base(part, kind):
                raise SettingError(
                    f"{name!r} is a {kind}, which {reason}, or train without logical_ranks."
                )
    if trainer.state.fn != "fit":
        return
    schedules = (getattr(own, "scheduling", {}) for own in trainer.callbacks)
    planned = [count for own in schedules if isinstance(own, dict) for count in own.values()]
    for count in (trainer.accumulate_grad_batches, *planned):
        refuse_accumulation(count)
    if not module.automatic_optimization:
        raise SettingError(
            f"{type(module).__name__} has automatic_optimization=False, and the steps of logical "
            "ranks are those of Lightning's automatic optimization: leave that attribute out and "
            "let training_step return the loss, or train without logical_ranks."
        )


class DDPDeterministicStrategy(_DDPStrategy):  # type: ignore[misc] # of the package that is loaded
    """Train on any number of processes with the same bits.

    The samples of each step are split among ``logical_ranks``, not among the processes. Each
    process computes some of them, one after the other, and gradients are added in an order that
    only their number decides. So the batch size is that of one logical rank, and one step trains
    ``batch_size * logical_ranks`` samples.

    Args:
        logical_ranks: Their number, at least that of the processes. None takes the variable
            ``LIGHTNING_D9M_LOGICAL_RANKS``; without it this is Lightning's ``DDPStrategy``.
        options: As for Lightning's ``DDPStrategy``.

    Attributes:
        logical_ranks: Their number; None trains as Lightning does.
        logical_threads: The number of CPU threads of each process, if it is not set; None decides
            nothing.
        logical_steps: The steps of a run; None outside one, and without logical ranks.
        sums: The sums of the next backward pass; None if its gradients are not summed here.
        sums_always: Whether gradients are summed here also without logical ranks.

    Raises:
        SettingError: If a value is not allowed.
    """

    strategy_name = "ddp_d9m"
    sums_always = False

    def __init__(self, *, logical_ranks: int | None = None, **options: Any) -> None:
        if logical_ranks is None:
            logical_ranks = read_variable(variable_of("logical_ranks"), os.environ, int)
        if logical_ranks is not None:
            # It checks the number at once; that of the processes is known at setup.
            Blocks(logical_ranks, 1)
            for name in sorted(options.keys() - {*_OPTIONS}):
                raise SettingError(
                    f"{name}={options[name]!r} is an option of DDP, and with logical_ranks "
                    f"gradients are not reduced by DDP: leave out {name}, or logical_ranks."
                )
        super().__init__(**options)
        self.logical_ranks = logical_ranks
        self.logical_steps: LogicalSteps | None = None
        self.sums: Any = None
        # Not torch's number, which Lightning's launcher sets by the number of processes.
        self.logical_threads = None if logical_ranks is None else read_threads() or 1
        self._patches = AttributePatches()
        self._session: Any = None
        self._liveness: RankLiveness | None = None
        self._control: Any = None  # the group of agreements; None is the default group
        self._sum_options: dict[str, Any] = {}  # that Horovod's strategy has
        self._group_options = {"timeout": options["timeout"]} if "timeout" in options else {}

    def setup_distributed(self) -> None:
        """Connect the processes, again if an error has closed their connections."""
        # An error has closed the connections, see `on_exception`, and torch keeps the group:
        # without this a second fit in the process would fail.
        reopen_default_group(**self._group_options)
        super().setup_distributed()
        self._liveness = connect_liveness(ranks_of_group())

    def configure_ddp(self) -> None:
        """Wrap the model; with logical ranks it stays as it is."""
        if self.logical_ranks is None:
            super().configure_ddp()

    def make_logical_gradients(self, blocks: Blocks, **options: Any) -> LogicalGradients:
        """Return sums over the default process group."""
        if self.root_device.type == "cpu":
            disable_malloc_trim()
        return LogicalGradients(
            self._list_parameters, blocks, self.global_rank, **self._sum_options, **options
        )

    def _list_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the parameters of the module, whose gradients are summed.

        Raises:
            SettingError: If an optimizer trains another one.
        """
        named = list(self.lightning_module.named_parameters())
        known = {parameter for _, parameter in named}
        for group in chain.from_iterable(each.param_groups for each in self.optimizers):
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in known:
                    raise SettingError(
                        f"An optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                        "not in the LightningModule, so its gradient is not reduced: make it an "
                        "attribute of the module, in __init__ or configure_model."
                    )
        return named

    def gather_values(self, values: Any) -> list[Any]:
        """Return what each process passes, plain data (see `encode_plain`)."""
        parts = self.gather_bytes(encode_plain(values))
        return [decode_plain(part, self.root_device) for part in parts]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every process."""
        with self.naming_lost("an exchange of values"):
            return ranks_of_group().gather_bytes(data)

    def connect_session(self, session: Any) -> None:
        """Take the seeds of a run from its ``TrainerSession``; None when it ends."""
        self._session = session
        if session is None:
            self._end_run()

    @property
    def blocks(self) -> Blocks:
        """The logical ranks of all processes.

        Raises:
            SettingError: If there are more processes than logical ranks.
        """
        assert self.logical_ranks is not None, "it is read only with logical ranks"
        return Blocks(self.logical_ranks, self.world_size)

    @property
    def block(self) -> range:
        """The logical ranks of this process."""
        return self.blocks.of(self.global_rank)

    def setup(self, trainer: Trainer) -> None:
        """Run Lightning's setup, which moves the model to its device, and begin a run.

        Raises:
            SettingError: If logical ranks do not support a setting of the program.
        """
        super().setup(trainer)
        if self.logical_ranks is None:
            return
        self._end_run()
        blocks = self.blocks
        check_trainer(trainer, self, self._session)
        # Devices of different types round differently.
        self.agree(f"a training on devices of type {self.root_device.type}")
        fitting = trainer.state.fn == "fit"
        if fitting:
            # torch's DDP, which does this otherwise, does not wrap the model.
            self.broadcast_model()
            self.sums = self.make_logical_gradients(blocks)
        to_device = super().batch_to_device
        steps = self.logical_steps = LogicalSteps(trainer, self, self._session, to_device)
        steps.attach(self._patches)
        watch_collectives(self._patches, lambda: steps.step_rank)

    def _end_run(self) -> None:
        # First, so that no hook of the Trainer reaches steps that are closed.
        self._patches.undo()
        if self.logical_steps is not None:
            self.logical_steps.close()
        if self.sums is not None:
            self.sums.close()  # those that are in ``grad`` stay
        self.logical_steps = self.sums = None

    def broadcast_model(self) -> None:
        """Overwrite the parameters and buffers with those of process 0.

        Raises:
            RanksDisagreeError: Another process has other ones.
        """
        named = [*self.lightning_module.named_parameters(), *self.lightning_module.named_buffers()]
        described = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
        self.agree("the first broadcast of the model", described)
        send_tensors([tensor for _, tensor in named], self)

    def agree(self, activity: str, items: Sequence[str] = ()) -> None:
        """Wait until every process announces the same activity and items.

        Raises:
            RanksDisagreeError: They differ; raised on every process.
        """
        try:
            with self.naming_lost(activity):
                agree(ranks_of_group(self._control), activity, items)
        except RanksDisagreeError:
            close_default_group()  # the ranks end at different places, and none may wait there
            raise

    # Collectives. These are methods, because Lightning compares `reduce` of one fit and the next.

    @contextmanager
    def naming_lost(self, activity: str) -> Iterator[None]:
        """Raise a ``RankLostError`` for a collective inside that fails as a process is lost."""
        with lost_ranks_named(activity, self.global_rank, self._liveness):
            yield

    @contextmanager
    def collective(self, name: str, *_: Any) -> Iterator[None]:
        """Refuse a collective inside while a step of a logical rank runs."""
        rank = None if self.logical_steps is None else self.logical_steps.step_rank
        if rank is not None:
            refuse_collective(name, rank)
        with self.naming_lost(name):
            yield

    def _call_between_steps(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a collective of Lightning's strategy; not in a step."""
        with self.collective(name, *args):
            return getattr(super(), name)(*args, **kwargs)

    all_gather = partialmethod(_call_between_steps, "all_gather")
    broadcast = partialmethod(_call_between_steps, "broadcast")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes; not in a step. Return at once after an error."""
        if not is_default_group_closed():
            with self.collective("barrier"):
                super().barrier(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over all processes; not in a step.

        What a hook logs with ``sync_dist=True`` is that of process 0. It counts once for each
        logical rank, as it does in DDP.
        """
        with self.collective("reduce", tensor):
            if self.logical_steps is None or not isinstance(reduce_op, str):
                return super().reduce(tensor, group, reduce_op)
        if self.world_size > 1:
            first = self.gather_values(tensor)[0]
            tensor = first.to(tensor.device) if isinstance(tensor, Tensor) else first
        return tensor * self.logical_ranks if reduce_op.lower() == "sum" else tensor

    # Loaders

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of the sampler: with logical ranks that of all samples, split later."""
        place = (self.world_size, self.global_rank) if self.logical_ranks is None else (1, 0)
        return dict(zip(("num_replicas", "rank"), place, strict=True))

    def process_dataloader(self, dataloader: object) -> object:
        """Load the micro-batches of all logical ranks of this process together."""
        dataloader = super().process_dataloader(dataloader)
        # Lightning hands over an empty list of loaders as if it were a loader.
        if self.logical_ranks is None or dataloader in ([], (), {}):
            return dataloader
        # Lightning's own sampler for predictions repeats no sample either.
        padded = self.lightning_module.trainer.state.fn != "predict"
        return group_loader(dataloader, self.blocks, self.global_rank, padded=padded)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch; micro-batches are moved later, each when it is seeded."""
        if holds_micro_batches(batch):
            return batch
        return super().batch_to_device(batch, *args, **kwargs)

    # Training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` of the module for each logical rank of this process."""
        if self.logical_steps is None:
            return super().training_step(*args, **kwargs)
        return self.logical_steps.train(super().training_step, self.run_backward, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run Lightning's backward, and sum the gradients before ``on_after_backward``."""
        if self.sums is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        loss = self.run_backward(closure_loss, optimizer, *args, **kwargs)
        # Before `post_backward`, which calls `on_after_backward`.
        self.finish_gradients()
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)
        return loss

    def finish_gradients(self) -> None:
        """Sum the gradients, after the last backward pass of a step."""
        assert self.logical_steps is not None, "only then there are sums"
        with self.naming_lost("the sum of gradients"):
            self.logical_steps.take_gradients(self.block[-1])

    def run_backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kw: Any) -> Tensor:
        """Run the backward pass of a loss, which overlaps the sums, without the hooks after it."""
        self.pre_backward(loss)
        loss = self.precision_plugin.pre_backward(loss, self.lightning_module)
        with self.sums.backward():
            self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kw)
        return loss

    def block_backward_sync(self) -> Any:
        """Return Lightning's context for batches that are accumulated; logical ranks need none."""
        return nullcontext() if self.logical_steps is not None else super().block_backward_sync()

    # Evaluation

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module for each logical rank of this process."""
        step = getattr(super(), name)
        if self.logical_steps is None:
            return step(*args, **kwargs)
        stage = name.removesuffix("_step").replace("validation", "validate")
        number = self._session.evaluation
        return self.logical_steps.evaluate(stage, number, step, *args, **kwargs)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    # Records

    def reduce_loss(self) -> float | None:
        """Return the mean of the losses of the last step, over all logical ranks."""
        if self.logical_steps is None:
            return None
        own_losses = [float(loss) for loss in self.logical_steps.losses]
        losses = [loss for part in self.gather_values(own_losses) for loss in part]
        return sum_exactly(losses) / len(losses) if losses else None

    # Errors

    def on_exception(self, exception: BaseException) -> None:
        """Let no other process wait for this one, and forget the step."""
        # A drift is raised on all ranks together, so none waits, and they may train again.
        closes = self.sums_always or self.logical_ranks is not None
        if closes and not isinstance(exception, DriftError):
            # Only the rank that failed first reports its error; the others name it.
            if self._liveness is not None and not isinstance(exception, _OF_OTHERS):
                self._liveness.report_error(exception)
            if self.world_size > 1:
                close_default_group()
        if self.logical_steps is not None:
            self.logical_steps.logical_rank = None
        if self.sums is not None:
            self.sums.close()
        super().on_exception(exception)

    def teardown(self) -> None:
        """End the run."""
        self._end_run()
        super().teardown()


for _package in loaded_packages():
    register_strategies(_package)  # a Trainer takes the names after this import
