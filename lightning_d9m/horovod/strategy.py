"""``Trainer(strategy="horovod_d9m")``: bit-exact training in the processes of ``horovodrun``."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Module

from lightning_d9m.errors import RankLostError, SettingError
from lightning_d9m.horovod import sync_batchnorm
from lightning_d9m.horovod.cluster_environment import HorovodEnvironment
from lightning_d9m.horovod.communicator import CollectiveIntent, Communicator
from lightning_d9m.horovod.environment import (
    SavedEnvironment,
    check_ranks,
    describe_rank,
    import_horovod,
    switch_on,
)
from lightning_d9m.horovod.gradient_buckets import BUCKET_BYTES, GradientBuckets, check_options
from lightning_d9m.horovod.malloc import disable_malloc_trim
from lightning_d9m.horovod.reductions import (
    gather_with_gradients,
    reduce_over_ranks,
    refuse_group,
)
from lightning_d9m.horovod.torchmetrics_sync import Metrics
from lightning_d9m.lightning.packages import combined_base, import_packages

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _ParallelStrategy
else:
    _ParallelStrategy = combined_base("strategies.ParallelStrategy")


class HorovodDeterministicStrategy(_ParallelStrategy):
    """Trains one copy of the model per process, bit for bit the same in every run.

    Start it with ``horovodrun -np N python train.py`` or under MPI. The learning rate is taken as
    it is given, whatever the number of processes.

    Args:
        fusion: ``"static"`` reduces gradients in fixed buckets while the backward pass runs,
            ``"off"`` each by itself. Both give the same bits in every run.
        op: ``"average"`` or ``"sum"`` of the ranks' gradients.
        transport: ``"torch"`` lets all travel by torch's Gloo, ``"horovod"`` by Horovod itself.
            Torch's costs less where ranks compute on the cores that it needs: the default on a CPU.
        bucket_bytes: Size at which a bucket is closed; the first at 1 MiB, to start early.
        compression: ``"fp16"`` or ``"bf16"`` rounds gradients before they travel.
        sparse_as_dense: Reduce sparse gradients as dense ones; without it they are an error.
        broadcast_buffers: After each reduced backward pass, take rank 0's buffers (the running
            statistics of batch normalisation, for example), as DDP does before a forward pass.
        stall_seconds: After this long without a sign of a rank, Horovod gives up waiting.
        accelerator: Lightning's, as for any strategy.
        parallel_devices: Lightning's, as for any strategy.
        checkpoint_io: Lightning's, as for any strategy.
        precision_plugin: Lightning's, as for any strategy.

    Raises:
        SettingError: A value is not allowed.
    """

    strategy_name = "horovod_d9m"
    is_distributed = True  # read by Lightning: samplers, self.log(sync_dist=True)

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
        self._wire: Communicator | None = None
        self._switched: SavedEnvironment | None = None
        self._buckets: GradientBuckets | None = None
        self._buffers: list[dict[str, Tensor | None]] = []
        self._metrics: Metrics | None = None

    # Processes and devices

    def set_world_ranks(self) -> None:
        """Tell Lightning's rank-zero functions the rank; they do not know ``HOROVOD_RANK``."""
        import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = self.global_rank
        for package in import_packages():
            module = import_module(f"{package}.utilities.rank_zero")
            module.rank_zero_only.rank = self.global_rank

    @property
    def root_device(self) -> torch.device:
        """The CPU; or the device of this rank on its host, where the launcher hides none."""
        devices = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type != "cuda":
            return devices[0]
        if len(devices) > 1:
            if self.local_rank >= len(devices):
                raise SettingError(
                    f"Rank {self.global_rank} is number {self.local_rank} on its host, but "
                    f"Trainer(devices=...) names {len(devices)} devices: give one for each process."
                )
            return devices[self.local_rank]
        visible = torch.cuda.device_count()
        if visible == 1:  # a launcher that shows each process its own device
            return torch.device("cuda", 0)
        if self.local_rank >= visible:
            raise SettingError(
                f"Rank {self.global_rank} is number {self.local_rank} on its host, which has only "
                f"{visible} CUDA devices: start at most {visible} processes on it."
            )
        return torch.device("cuda", self.local_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How Lightning shares a dataset out."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def transport(self) -> Literal["horovod", "torch"]:
        """By what tensors travel between the ranks."""
        on_cpu = self.root_device.type == "cpu"
        if self._transport == "torch" and not on_cpu:
            raise SettingError(
                f"transport='torch' sums on the CPU, but this rank trains on {self.root_device}: "
                "leave transport away, and Horovod's NCCL sums there."
            )
        return self._transport or ("torch" if on_cpu else "horovod")

    @property
    def wire(self) -> Communicator:
        """The collectives of this run, from ``setup_environment`` on."""
        if self._wire is None:
            raise SettingError(
                "Horovod has not started yet: it does so in Trainer.fit, validate, test and "
                "predict, not in the Trainer's constructor."
            )
        return self._wire

    def setup_environment(self) -> None:
        """Set the variables, start Horovod, and compare the ranks."""
        hvd = import_horovod()
        running, stall = hvd.is_initialized(), self._stall_seconds
        self._switched = switch_on(
            initialized=running, stall_seconds=stall, transport=self.transport
        )
        if not running:
            hvd.init()
        if self.root_device.type == "cpu":
            disable_malloc_trim()
        cast(HorovodEnvironment, self.cluster_environment).adopt(hvd)
        self.set_world_ranks()
        self._wire = Communicator(hvd)
        super().setup_environment()
        fabric = _fabric_of(import_packages()[0])
        import_module(f"{fabric}.utilities.seed").reset_seed()  # as every strategy of Lightning
        described = describe_rank(
            {
                **self._options,
                "transport": self.transport,
                "broadcast_buffers": self._broadcast_buffers,
                "device": self.root_device.type,
                "precision": str(self.precision_plugin.precision),
            }
        )
        self._wire.agree(CollectiveIntent("the start of the run"))
        check_ranks(self._wire.gather_objects(described))
        if self.transport == "torch":
            self._wire.connect(limit_seconds=stall)

    def setup(self, trainer: Any) -> None:
        """Lightning's setup; then the buckets, when there will be gradients."""
        super().setup(trainer)
        module = cast(Module, self.lightning_module)
        self._metrics = Metrics(module, self.gather_list)
        if self.optimizers:
            self._buckets = GradientBuckets(
                module.named_parameters(), self.wire, on_stray=self._refuse_stray, **self._options
            )

    def _setup_model(self, model: Module) -> Module:
        module = cast(Module, self.lightning_module)
        self._buffers = [m._buffers for m in module.modules() if m._buffers]  # noqa: SLF001
        self.wire.agree(CollectiveIntent("the first broadcast of the model", _signature(module)))
        tensors = [*module.parameters(), *self._current_buffers()]
        with torch.no_grad():
            self.wire.broadcast_tensors(tensors, "d9m.model")
        if self._layer_sync is not None:
            if type(self._layer_sync).__name__ == "TorchSyncBatchNorm":
                gather = partial(self.all_gather, sync_grads=True)
                sync_batchnorm.synchronize(model, gather)
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
        """Lightning's backward; the gradients are reduced before ``on_after_backward`` fires."""
        module = cast(Any, self.lightning_module)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        buckets = cast(GradientBuckets, self._buckets)
        with buckets.backward():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self._broadcast_buffers and self._buffers and not buckets.is_blocked:
            with torch.no_grad():
                self.wire.broadcast_tensors(self._current_buffers(), "d9m.buffers")
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients accumulate on this rank; Lightning enters it for all but the last batch."""
        with cast(GradientBuckets, self._buckets).blocked():
            yield

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Lightning's step, for parameters whose gradients are reduced."""
        buckets = cast(GradientBuckets, self._buckets)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not buckets.holds(parameter):
                    raise SettingError(
                        f"An optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                        "no parameter of the LightningModule at setup, so that its gradient is not "
                        "reduced: create it in __init__ or configure_model."
                    )
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _refuse_stray(self, name: str) -> None:
        trainer = cast(Any, self.lightning_module).trainer
        if trainer.training:
            raise SettingError(
                f"{name!r} got a gradient outside Lightning's backward, which the other ranks "
                "would not see: call self.manual_backward(loss) instead of loss.backward()."
            )

    # Collectives

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in rank order; anything else comes back as it is."""
        refuse_group(group)
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        return reduce_over_ranks(tensor, reduce_op, self.wire)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack every rank's tensor to (world, ...); one process alone gets its own back."""
        refuse_group(group)
        if self.world_size == 1:
            return tensor
        if sync_grads and tensor.requires_grad:
            return gather_with_gradients(tensor, self.wire)
        return self.wire.gather_equal(tensor, "all_gather")

    def gather_list(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Every rank's tensor, whose shapes may differ; what torchmetrics asks for."""
        refuse_group(group)
        self.wire.agree(CollectiveIntent("the synchronisation of a metric"))
        return self.wire.gather_tensors(tensor)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the picklable object of rank ``src``."""
        if self._wire is None or self.world_size == 1:
            return obj
        self.wire.agree(CollectiveIntent(f"a broadcast from rank {src}"))
        return self.wire.broadcast_object(obj, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks are here; while an error ends the run, nobody would come."""
        if self._wire is None or self._wire.broken is not None:
            return
        try:
            self._wire.agree(CollectiveIntent(f"the barrier {name!r}"))
        except RankLostError:
            # After the run (a script that saves a checkpoint at its end) a rank may have left.
            if self._switched is not None:
                raise

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Whether all (or any) of the ranks decide so."""
        votes = self.wire.gather_equal(torch.tensor(int(decision)), "a decision")
        return bool(votes.all() if all else votes.any())

    # The run

    def on_train_start(self) -> None:
        """Ranks with different numbers of batches would wait for each other: say so at once."""
        trainer = cast(Any, self.lightning_module).trainer
        self.wire.agree(
            CollectiveIntent(f"training on {trainer.num_training_batches} batches per epoch")
        )

    def on_train_end(self) -> None:
        """A rank that has run out of batches meets here those that have not."""
        self.wire.agree(CollectiveIntent("the end of training"))

    def on_validation_end(self) -> None:
        """The same for a collective that only some ranks called while validating."""
        self.wire.agree(CollectiveIntent("the end of validation"))

    def on_test_end(self) -> None:
        """The same while testing."""
        self.wire.agree(CollectiveIntent("the end of testing"))

    def on_predict_end(self) -> None:
        """The same while predicting."""
        self.wire.agree(CollectiveIntent("the end of prediction"))

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, which would wait for this one."""
        if self._wire is not None:
            self._wire.announce(exception)

    def teardown(self) -> None:
        """Undo what `setup` and `setup_environment` did. Horovod itself runs on until the end."""
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None
        if self._metrics is not None:
            self._metrics.release()
            self._metrics = None
        if self._layer_sync is not None and self.model is not None:
            sync_batchnorm.unsynchronize(self.model)
            self.model = self._layer_sync.revert(self.model)
        self._buffers = []
        if self._wire is not None:
            self._wire.disconnect()
        super().teardown()
        if self._switched is not None:
            self._switched.restore()
            self._switched = None


def _signature(module: Module) -> tuple[str, ...]:
    return tuple(
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    )


def _fabric_of(package: str) -> str:
    return "lightning.fabric" if package == "lightning.pytorch" else "lightning_fabric"
