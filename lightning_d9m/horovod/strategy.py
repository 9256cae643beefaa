"""``Trainer(strategy="horovod_d9m")``: bit-exact training in the processes of ``horovodrun``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.base_strategy import HorovodBaseStrategy
from lightning_d9m.horovod.environment import import_horovod
from lightning_d9m.lightning.logical_ranks.collectives import watch_functions
from lightning_d9m.lightning.logical_ranks.strategy import LogicalRanksMixin
from lightning_d9m.lightning.strategies import register_in_loaded_packages
from lightning_d9m.logical_ranks.gradients import LogicalGradients
from lightning_d9m.logical_ranks.tree import Blocks

_OPERATIONS = ("allgather", "allreduce", "alltoall", "broadcast", "reducescatter")
_COLLECTIVES = {
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_parameters",
    *_OPERATIONS,
    *(f"{name}_" for name in _OPERATIONS),
    *(f"{name}_async" for name in _OPERATIONS),
    *(f"{name}_async_" for name in _OPERATIONS),
    *(f"grouped_{name}" for name in _OPERATIONS),
}


class HorovodDeterministicStrategy(LogicalRanksMixin, HorovodBaseStrategy):
    """Train one copy of the model per process, bit for bit the same in every run.

    Start it with ``horovodrun -np N python train.py`` or under MPI. The learning rate is not scaled
    by the number of processes.

    Args:
        logical_ranks: With this number, the same bits on any number of processes up to it: the
            samples of a step are split among logical ranks, and each process computes some of them.
            None takes the variable ``LIGHTNING_D9M_LOGICAL_RANKS``; without it, the bits depend on
            the number of processes.
        fusion: ``"static"`` reduces gradients in fixed buckets while the backward pass runs,
            ``"off"`` reduces each gradient alone. Both give the same bits in every run.
        op: ``"average"`` or ``"sum"`` of the ranks' gradients.
        transport: ``"torch"``, the default, uses torch's Gloo for every collective, and its NCCL
            for tensors on CUDA; ``"horovod"`` uses Horovod. Gloo is faster if ranks compute on the
            cores that a collective needs. With torch's NCCL streams wait, and not the host.
        bucket_bytes: Size at which a bucket is closed, in bytes; the first one at 1 MiB, to start
            early.
        compression: ``"fp16"`` or ``"bf16"`` rounds gradients before they are sent.
        sparse_as_dense: Reduce sparse gradients as dense ones; otherwise they are an error.
        broadcast_buffers: After each reduced backward pass, copy the buffers of rank 0 (such as the
            running statistics of batch normalization) to all ranks, as DDP does before a forward
            pass.
        stall_seconds: Time after which a collective that some rank does not join fails.
        options: Further ones, as for any strategy of Lightning: ``accelerator``,
            ``parallel_devices``, ``checkpoint_io``, ``precision_plugin``.

    Raises:
        SettingError: A value is not allowed.
    """

    def __init__(self, *, logical_ranks: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.set_logical_ranks(logical_ranks)
        if self.logical_ranks is not None:
            self._check_options()

    def _check_options(self) -> None:
        refused = {
            "compression": (self._options["compression"], None),
            "transport": (self._transport, "torch"),
            "broadcast_buffers": (self._broadcast_buffers, True),
        }
        for name, (value, allowed) in refused.items():
            if value not in {None, allowed}:
                raise SettingError(
                    f"{name}={value!r} does not go with logical_ranks, whose sums are exact for "
                    f"any number of processes and travel by torch: leave out {name}, or "
                    "logical_ranks."
                )

    def watch_collectives(
        self, patches: AttributePatches, current: Callable[[], int | None]
    ) -> None:
        """Refuse collectives of torch and of Horovod while a step of a logical rank runs."""
        super().watch_collectives(patches, current)
        watch_functions(patches, current, import_horovod(), _COLLECTIVES, "horovod.torch.")

    def set_up_reductions(self, module: Module) -> None:
        """Lay out the buckets, unless logical ranks sum the gradients."""
        if self.logical_ranks is None:
            super().set_up_reductions(module)

    def make_logical_gradients(self, blocks: Blocks) -> LogicalGradients:
        """Return sums over the process group that torch has between Horovod's processes."""
        return self.make_sums(blocks)

    def is_reduced(self, parameter: Tensor) -> bool:
        """Whether the gradients of this parameter are reduced."""
        if self.logical_steps is None:
            return super().is_reduced(parameter)
        return self.logical_steps.sums.holds(parameter)

    def close_connections(self, exception: BaseException) -> None:
        """Publish the exception, and close the connections."""
        if self._communicator is not None:
            self._communicator.leave(exception)

    def broadcast_tensors(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with those of process 0."""
        with torch.no_grad():
            self.communicator.broadcast_tensors(tensors, "d9m.logical")

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every process."""
        return self.communicator.gather_objects(data)


register_in_loaded_packages()  # a Trainer takes the name after this import
