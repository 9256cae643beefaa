"""A strategy of Lightning for the processes of ``horovodrun``, without logical ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Module

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.errors import RankLostError, SettingError
from lightning_d9m.horovod import sync_batchnorm
from lightning_d9m.horovod.cluster_environment import HorovodEnvironment
from lightning_d9m.horovod.communication.communicator import Communicator
from lightning_d9m.horovod.communication.intents import CollectiveIntent
from lightning_d9m.horovod.communication.reductions import (
    gather_with_gradients,
    reduce_over_ranks,
    refuse_group,
)
from lightning_d9m.horovod.environment import (
    SavedEnvironment,
    check_rank_stacks,
    describe_rank,
    import_horovod,
    set_variables,
)
from lightning_d9m.horovod.gradient_sums import WatchedGradients
from lightning_d9m.horovod.torchmetrics_sync import synchronize_metrics
from lightning_d9m.lightning.packages import combined_base, import_packages
from lightning_d9m.logical_ranks.buckets import check_options
from lightning_d9m.logical_ranks.gradients import BUCKET_BYTES
from lightning_d9m.logical_ranks.malloc import disable_malloc_trim
from lightning_d9m.logical_ranks.tree import Blocks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ParallelStrategy as _ParallelStrategy
else:
    _ParallelStrategy = combined_base("strategies.ParallelStrategy")


class HorovodBaseStrategy(_ParallelStrategy):
    """The processes of Horovod, their collectives, and sums of gradients over the processes.

    The arguments are those of `HorovodDeterministicStrategy`.

    Raises:
        SettingError: A value is not allowed.
    """

    strategy_name = "horovod_d9m"
    logical_ranks: int | None = None

    def __init__(  # noqa: PLR0913 - one keyword for each setting
        self,
        *,
        fusion: Literal["static", "off"] = "static",
        op: Literal["average", "sum"] = "average",
        transport: Literal["horovod", "torch"] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Literal["fp16", "bf16"] | None = None,
        sparse_as_dense: bool = False,
        broadcast_buffers: bool = True,
        stall_seconds: float = 1800.0,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        if fusion not in {"static", "off"}:
            raise SettingError(f"fusion={fusion!r} is not known: pass 'static' or 'off'.")
        if transport not in {None, "horovod", "torch"}:
            raise SettingError(
                f"transport={transport!r} is not known: pass 'torch', 'horovod' or None."
            )
        check_options(op=op, bucket_bytes=bucket_bytes, compression=compression)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=HorovodEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options: dict[str, Any] = {
            "op": op,
            "bucket_bytes": bucket_bytes if fusion == "static" else 0,
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
        }
        self._transport = transport
        self._broadcast_buffers = broadcast_buffers
        self._stall_seconds = stall_seconds
        self._communicator: Communicator | None = None
        self._saved_environment: SavedEnvironment | None = None
        self._sums: WatchedGradients | None = None
        self._is_blocked = False  # whether gradients accumulate on this rank alone
        self._runs_backward = False
        self._buffers: list[dict[str, Tensor | None]] = []
        self._layer_patches = AttributePatches()

    # Processes and devices

    def set_world_ranks(self) -> None:
        """Set the rank of Lightning's rank-zero functions, which do not read ``HOROVOD_RANK``."""
        import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = self.global_rank
        for package in import_packages():
            module = import_module(f"{package}.utilities.rank_zero")
            module.rank_zero_only.rank = self.global_rank

    @property
    def root_device(self) -> torch.device:
        """The CPU, or the CUDA device of the local rank."""
        devices = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type != "cuda":
            return devices[0]
        if len(devices) > 1:
            if self.local_rank >= len(devices):
                raise SettingError(
                    f"Rank {self.global_rank} has local rank {self.local_rank}, but "
                    f"Trainer(devices=...) names {len(devices)} devices: name one per process."
                )
            return devices[self.local_rank]
        visible = torch.cuda.device_count()
        if visible == 1:  # a launcher that makes one device visible to each process
            return torch.device("cuda", 0)
        if self.local_rank >= visible:
            raise SettingError(
                f"Rank {self.global_rank} has local rank {self.local_rank} on a host with only "
                f"{visible} CUDA devices: start at most {visible} processes on it."
            )
        return torch.device("cuda", self.local_rank)

    @property
    def is_distributed(self) -> bool:
        """True: Lightning gives each rank its part of the data, and ``sync_dist`` reduces."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of Lightning's `DistributedSampler`."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def transport(self) -> Literal["horovod", "torch"]:
        """The transport of every collective."""
        return self._transport or "torch"

    @property
    def communicator(self) -> Communicator:
        """The collectives of this run, available from ``setup_environment`` on."""
        if self._communicator is None:
            raise SettingError(
                "Horovod has not started yet: Trainer.fit, validate, test and predict start it, "
                "not the Trainer's constructor."
            )
        return self._communicator

    def setup_environment(self) -> None:
        """Set the environment variables, start Horovod, and compare the ranks."""
        hvd = import_horovod()
        running, stall = hvd.is_initialized(), self._stall_seconds
        self._saved_environment = set_variables(
            initialized=running, stall_seconds=stall, transport=self.transport
        )
        if not running:
            hvd.init()
        if self.root_device.type == "cpu":
            disable_malloc_trim()
        cast(HorovodEnvironment, self.cluster_environment).update(hvd)
        self.set_world_ranks()
        communicator = self._communicator = Communicator(hvd)
        super().setup_environment()
        fabric = _fabric_of(import_packages()[0])
        # As every strategy of Lightning does.
        import_module(f"{fabric}.utilities.seed").reset_seed()
        described = describe_rank(
            {
                **self._options,
                "transport": self.transport,
                "broadcast_buffers": self._broadcast_buffers,
                "logical_ranks": self.logical_ranks,
                "device": self.root_device.type,
                "precision": str(self.precision_plugin.precision),
            }
        )
        communicator.agree(CollectiveIntent("the start of the run"))
        check_rank_stacks(communicator.gather_objects(described))
        if self.transport == "torch":
            communicator.connect(limit_seconds=stall, device=self.root_device.type)
        communicator.watch_ranks()

    def setup(self, trainer: "Trainer") -> None:
        """Run Lightning's setup, and set up the reductions."""
        super().setup(trainer)
        self.set_up_reductions(cast(Module, self.lightning_module))

    def set_up_reductions(self, module: Module) -> None:
        """Let metrics synchronize, and sum gradients if the Trainer has optimizers.

        Each process is then one logical rank.
        """
        synchronize_metrics(self._layer_patches, module, self.gather_list)
        if self.optimizers and self.world_size > 1:
            blocks = Blocks(self.world_size, self.world_size)
            self._sums = self.make_sums(blocks, adds=True, on_stray=self._refuse_stray)
            self._sums.prepare()

    def make_sums(self, blocks: Blocks, **options: Any) -> WatchedGradients:
        """Return the sums of the gradients, over the group of the transport."""
        return WatchedGradients(
            self.communicator,
            cast(Module, self.lightning_module).named_parameters(),
            blocks,
            self.global_rank,
            self.communicator.process_group,
            **self._options,
            **options,
        )

    def _setup_model(self, model: Module) -> Module:
        module = cast(Module, self.lightning_module)
        self._buffers = [m._buffers for m in module.modules() if m._buffers]  # noqa: SLF001 - a module may replace the tensor
        self.communicator.agree(
            CollectiveIntent("the first broadcast of the model", _signature(module))
        )
        tensors = [*module.parameters(), *self._current_buffers()]
        with torch.no_grad():
            self.communicator.broadcast_tensors(tensors, "d9m.model")
        if self._layer_sync is not None:
            if type(self._layer_sync).__name__ == "TorchSyncBatchNorm":
                gather = partial(self.all_gather, sync_grads=True)
                sync_batchnorm.synchronize(self._layer_patches, model, gather)
            else:
                model = self._layer_sync.apply(model)
        return model

    def _current_buffers(self) -> list[Tensor]:
        return [b for buffers in self._buffers for b in buffers.values() if b is not None]

    def model_to_device(self) -> None:
        """Move the model."""
        cast(Module, self.model).to(self.root_device)

    # Gradients

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run Lightning's backward, and reduce the gradients before ``on_after_backward``."""
        module = cast(Any, self.lightning_module)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self._summing():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self._broadcast_buffers and self._buffers and not self._is_blocked:
            with torch.no_grad():
                self.communicator.broadcast_tensors(self._current_buffers(), "d9m.buffers")
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def _summing(self) -> Iterator[None]:
        """Sum the gradients of the backward pass inside, unless they accumulate on this rank."""
        self._runs_backward = True
        try:
            if self._sums is None or self._is_blocked:
                yield
                return
            with self._sums.backward():
                yield
            self.communicator.agree(CollectiveIntent("the backward pass"))
            self._sums.finish(self.global_rank)
        finally:
            self._runs_backward = False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; Lightning enters this for all but the last batch."""
        self._is_blocked = True
        try:
            yield
        finally:
            self._is_blocked = False

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Check that the gradients of all parameters are reduced, and run Lightning's step."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not self.is_reduced(parameter):
                    raise SettingError(
                        f"An optimizer holds a parameter of shape {tuple(parameter.shape)} that "
                        "was not in the LightningModule at setup, so its gradient is not reduced: "
                        "create it in __init__ or configure_model."
                    )
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def is_reduced(self, parameter: Tensor) -> bool:
        """Whether the gradients of this parameter are reduced."""
        return self._sums is None or self._sums.holds(parameter)

    def _refuse_stray(self, name: str) -> None:
        trainer = cast(Any, self.lightning_module).trainer
        if trainer.training and not (self._runs_backward or self._is_blocked):
            raise SettingError(
                f"{name!r} got a gradient outside Lightning's backward, so the ranks would not "
                "reduce it: call self.manual_backward(loss) instead of loss.backward()."
            )

    # Collectives

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in rank order; return other objects unchanged."""
        refuse_group(group)
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        return reduce_over_ranks(tensor, reduce_op, self.communicator)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack every rank's tensor to (world, ...); return it unchanged for a single rank."""
        refuse_group(group)
        if self.world_size == 1:
            return tensor
        if sync_grads and tensor.requires_grad:
            return gather_with_gradients(tensor, self.communicator)
        return self.communicator.gather_equal(tensor, "all_gather")

    def gather_list(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Return every rank's tensor, for torchmetrics; shapes may differ."""
        refuse_group(group)
        self.communicator.agree(CollectiveIntent("the synchronization of a metric"))
        return self.communicator.gather_tensors(tensor)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``, which must be plain data (see `encode_plain`)."""
        if self._communicator is None or self.world_size == 1:
            return obj
        return self._communicator.broadcast_object(obj, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; return at once after an error, as the other ranks would not join."""
        if self._communicator is None or self._communicator.broken is not None:
            return
        try:
            self._communicator.agree(CollectiveIntent(f"the barrier {name!r}"))
        except RankLostError:
            # After the run, other ranks may have exited while a script saves a checkpoint.
            if self._saved_environment is not None:
                raise

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return whether all (or any) of the ranks pass True."""
        votes = self.communicator.gather_equal(torch.tensor(int(decision)), "a decision")
        return bool(votes.all() if all else votes.any())

    # The run

    def on_train_start(self) -> None:
        """Raise at once if the ranks have different numbers of batches."""
        trainer = cast(Any, self.lightning_module).trainer
        self.communicator.agree(
            CollectiveIntent(f"training on {trainer.num_training_batches} batches per epoch")
        )

    def on_train_end(self) -> None:
        """Raise if other ranks still have batches."""
        self.communicator.agree(CollectiveIntent("the end of training"))

    def on_validation_end(self) -> None:
        """Raise if another rank calls a collective in its validation."""
        self.communicator.agree(CollectiveIntent("the end of validation"))

    def on_test_end(self) -> None:
        """Raise if another rank calls a collective in its test."""
        self.communicator.agree(CollectiveIntent("the end of testing"))

    def on_predict_end(self) -> None:
        """Raise if another rank calls a collective in its prediction."""
        self.communicator.agree(CollectiveIntent("the end of prediction"))

    def on_exception(self, exception: BaseException) -> None:
        """Announce the exception to the other ranks, which would wait for this one."""
        if self._sums is not None:
            self._sums.close()
        if self._communicator is not None:
            self._communicator.announce(exception)

    def teardown(self) -> None:
        """Undo `setup` and `setup_environment`. Horovod itself runs until the process ends."""
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        self._layer_patches.undo()
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        self._buffers = []
        if self._communicator is not None:
            self._communicator.disconnect()
        super().teardown()
        if self._saved_environment is not None:
            self._saved_environment.restore()
            self._saved_environment = None


def _signature(module: Module) -> tuple[str, ...]:
    return tuple(
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    )


def _fabric_of(package: str) -> str:
    return "lightning.fabric" if package == "lightning.pytorch" else "lightning_fabric"
