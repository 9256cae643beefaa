"""``Trainer(strategy="horovod_d9m")``: bit-exact training in the processes of ``horovodrun``."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partialmethod
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from lightning_d9m.engine.control.environment import EarlyVariables
from lightning_d9m.engine.ranks.groups import (
    close_group_at_exit,
    is_default_group_closed,
    open_control_group,
)
from lightning_d9m.engine.state.plain_data import decode_plain, encode_plain
from lightning_d9m.errors import RankLostError, SettingError
from lightning_d9m.integrations.strategies.horovod.environment import (
    compare_stacks,
    connect_store,
    import_horovod,
    list_variables,
)
from lightning_d9m.integrations.strategies.steps.strategy import DDPDeterministicStrategy
from lightning_d9m.integrations.strategies.sums.collectives import send_tensors, watch_function
from lightning_d9m.integrations.strategies.sums.gradients import BUCKET_BYTES, SENT_AS
from lightning_d9m.integrations.strategies.sums.tree import Blocks
from lightning_d9m.integrations.trainer.lightning_private import BROADCAST_SIGTERM
from lightning_d9m.integrations.trainer.packages import combined_base

# The collectives of horovod.torch, whose names begin so.
_MOST_SECONDS = 10**9
_COLLECTIVES = ("all", "barrier", "broadcast", "grouped_", "reducescatter")


_Environment: Any = combined_base("plugins.environments.LightningEnvironment")
# horovodrun, Open MPI, MPICH and Intel MPI: rank, size, local rank, node rank.
_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK"),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "NODE_RANK")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_NODE_RANK"),
)


class HorovodEnvironment(_Environment):  # type: ignore[misc] # of what is loaded
    """The processes that ``horovodrun`` or ``mpirun`` started."""

    # The strategy passes it to Lightning, which would otherwise detect SLURM, MPI or torchrun.

    creates_processes_externally = True

    def __init__(self) -> None:
        super().__init__()
        self._ranks: tuple[int, ...] = (0, 1, 0, 0)  # without a launcher
        # The first of the table that is set wins, because one launcher may start another, which
        # then sets its variables, too.
        for names in reversed(_VARIABLES):
            if names[0] in os.environ:
                rank, size, *places = (int(os.environ.get(name, "0")) for name in names)
                self._ranks = (rank, max(1, size), *places)

    def update(self, hvd: Any) -> None:
        """Read the ranks from Horovod, once it is initialized."""
        self._ranks = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank())

    def teardown(self) -> None:
        """Leave the launcher's variables as they are."""

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._ranks[1]

    def global_rank(self) -> int:
        """Return the rank of this process."""
        return self._ranks[0]

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher sets it."""

    set_world_size = set_global_rank

    def local_rank(self) -> int:
        """Return the rank of this process on its host."""
        return self._ranks[2]

    def node_rank(self) -> int:
        """Return the number of this process's host."""
        return self._ranks[3]


class HorovodDeterministicStrategy(DDPDeterministicStrategy):
    """Train one copy of the model per process, bit for bit the same in every run.

    Start it with ``horovodrun -np N python train.py`` or under MPI. Horovod connects the processes;
    their collectives are those of ``torch.distributed``, whose default process group this sets up.
    The learning rate is not scaled by the number of processes.

    Args:
        logical_ranks: With this number, the same bits on any number of processes up to it: the
            samples of a step are split among logical ranks, and each process computes some of them.
            None takes the variable ``LIGHTNING_D9M_LOGICAL_RANKS``; without it, the bits depend on
            the number of processes.
        op: ``"average"`` or ``"sum"`` of the ranks' gradients.
        bucket_bytes: Size at which a bucket of gradients is closed, in bytes; the first one at
            1 MiB, to start early. It changes no bit.
        compression: ``"fp16"`` or ``"bf16"`` rounds gradients before they are sent.
        stall_seconds: Time after which a collective that some rank does not join fails.
        accelerator: As for any strategy of Lightning.
        parallel_devices: The same.
        checkpoint_io: The same.
        precision_plugin: The same.

    Raises:
        SettingError: A value is not allowed.
    """

    strategy_name = "horovod_d9m"
    sums_always = True

    def __init__(  # noqa: PLR0913 - one keyword for each setting
        self,
        *,
        logical_ranks: int | None = None,
        op: Literal["average", "sum"] = "average",
        bucket_bytes: int = BUCKET_BYTES,
        compression: Literal["fp16", "bf16"] | None = None,
        stall_seconds: float = 1800.0,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        if op not in ("average", "sum"):
            raise SettingError(f"op={op!r} is not known: pass 'average' or 'sum'.")
        if type(bucket_bytes) is not int or bucket_bytes < 0:
            raise SettingError(
                f"bucket_bytes={bucket_bytes!r} is not allowed: pass a whole number, 0 or more."
            )
        if compression not in [*SENT_AS]:
            raise SettingError(
                f"compression={compression!r} is not known: pass 'fp16', 'bf16' or None."
            )
        # Gloo counts milliseconds in an integer.
        if type(stall_seconds) not in (int, float) or not 1 <= stall_seconds <= _MOST_SECONDS:
            raise SettingError(
                f"stall_seconds={stall_seconds!r} is not allowed: pass a number of seconds, from 1 "
                f"to {_MOST_SECONDS}."
            )
        super().__init__(
            logical_ranks=logical_ranks,
            cluster_environment=HorovodEnvironment(),
            timeout=timedelta(seconds=stall_seconds),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._sum_options = {"op": op, "bucket_bytes": bucket_bytes, "compression": compression}
        if self.logical_ranks is not None and compression is not None:
            raise SettingError(
                f"compression={compression!r} does not go with logical_ranks, whose sums are exact "
                "for any number of processes: leave out compression, or logical_ranks."
            )
        self._stall_seconds = stall_seconds
        self._variables: EarlyVariables | None = None  # from `setup_environment` to `teardown`

    # Processes and devices

    def _configure_launcher(self) -> None:
        """Do nothing: ``horovodrun`` has started the processes."""

    @property
    def root_device(self) -> torch.device:
        """The CPU, or the CUDA device of the local rank."""
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type != "cuda":
            return devices[0]
        if len(devices) == 1:
            # Lightning chooses one device for one process, and each rank is one; the local rank
            # decides which.
            devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        if len(devices) == 1:  # a launcher that makes one device visible to each process
            return devices[0]
        if self.local_rank >= len(devices):
            raise SettingError(
                f"Rank {self.global_rank} has local rank {self.local_rank}, and there are only "
                f"{len(devices)} CUDA devices for the processes of its host: start at most "
                f"{len(devices)} there, and name one device for each in Trainer(devices=...), or "
                "none."
            )
        return devices[self.local_rank]

    def setup_environment(self) -> None:
        """Set the environment variables, start Horovod, and compare the ranks."""
        hvd = import_horovod()
        self._variables = EarlyVariables(list_variables(self._stall_seconds))
        self._variables.set()
        if not hvd.is_initialized():
            hvd.init()
        environment: Any = self.cluster_environment
        environment.update(hvd)
        super().setup_environment()
        options = {
            **self._sum_options,
            "logical_ranks": self.logical_ranks,
            "device": self.root_device.type,
            "precision": str(self.precision_plugin.precision),
        }
        # Before the model is set up: what differs would otherwise show only as a drift after an
        # epoch.
        compare_stacks(options, self.gather_values)

    def setup_distributed(self) -> None:
        """Connect the processes by torch, over a store whose address Horovod sends."""
        limit = timedelta(seconds=self._stall_seconds)
        if not distributed.is_initialized():
            close_group_at_exit()
            distributed.init_process_group(
                # Agreements are of the host, also while sums are on the device.
                "gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=connect_store(import_horovod(), limit),
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=limit,
            )
        super().setup_distributed()
        self._control = open_control_group(timeout=limit)

    def configure_ddp(self) -> None:
        """Send the model of rank 0 to all ranks; torch's DDP does not wrap it."""
        if self.logical_ranks is None:
            self.broadcast_model()

    def setup(self, trainer: Any) -> None:
        """Run Lightning's setup, and sum gradients in a fit; each process is a logical rank."""
        super().setup(trainer)
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, BROADCAST_SIGTERM):
            # It would wait for a rank that has no more batches, before the ranks agree.
            self._patches.replace(loop, BROADCAST_SIGTERM, lambda: None)
        if (steps := self.logical_steps) is not None:
            hvd, current = import_horovod(), lambda: steps.step_rank
            for name in [name for name in vars(hvd) if name.startswith(_COLLECTIVES)]:
                watch_function(self._patches, current, hvd, name, f"horovod.torch.{name}")
        if self.logical_ranks is None and self.optimizers and self.world_size > 1:
            blocks = Blocks(self.world_size, self.world_size)
            self.sums = self.make_logical_gradients(blocks, on_stray=self._refuse_stray)
            # The hooks must exist before the first backward pass, so that a gradient outside
            # Lightning's backward is refused from the start.
            self.sums.prepare()

    # Gradients

    def finish_gradients(self) -> None:
        """Sum the gradients of all ranks, and send the buffers of rank 0."""
        if self.logical_ranks is not None:
            super().finish_gradients()
            return
        # A rank with fewer batches is elsewhere by now, and is named here instead of hanging in the
        # sum.
        self.agree("the backward pass")
        with self.naming_lost("the sum of gradients"):
            self.sums.finish(self.global_rank)
        # As DDP does before a forward pass: running statistics of batch normalization.
        send_tensors([*self.lightning_module.buffers()], self)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; Lightning enters this for all but the last batch."""
        sums, self.sums = self.sums, None
        try:
            yield
        finally:
            self.sums = sums

    def _refuse_stray(self, name: str) -> None:
        if self.lightning_module.trainer.training and self.sums is not None:
            raise SettingError(
                f"{name!r} got a gradient outside Lightning's backward, so the ranks would not "
                "reduce it: call self.manual_backward(loss) instead of loss.backward()."
            )

    # Collectives

    @contextmanager
    def collective(self, name: str, *args: Any) -> Iterator[None]:
        """Agree on a collective before it starts."""
        with super().collective(name):
            value = args[0] if args else None
            if isinstance(value, Tensor):
                name = f"{name} of a tensor {tuple(value.shape)}, {value.dtype}"
            self.agree(name)
            yield

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``, which must be plain data (see `encode_plain`)."""
        if not distributed.is_initialized() or self.world_size == 1:
            return obj
        # Not torch's `broadcast_object_list`, which unpickles what it receives.
        data = encode_plain(obj) if self.global_rank == src else b""
        with self.collective(f"a broadcast from rank {src}"):
            return decode_plain(self.gather_bytes(data)[src])

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; return at once after an error, as the other ranks would not join."""
        if not distributed.is_initialized() or is_default_group_closed():
            return
        try:
            with self.collective(f"the barrier {name!r}"):
                return
        except RankLostError:
            # After the run, other ranks may have exited while a script saves a checkpoint.
            if self._variables is not None:
                raise

    # The run

    def on_train_start(self) -> None:
        """Raise at once if the ranks have different numbers of batches."""
        number = self.lightning_module.trainer.num_training_batches
        self.agree(f"training on {number} batches per epoch")

    def _agree_on_end(self, name: str) -> None:
        """Raise if another rank still has batches, or calls a collective there."""
        self.agree(f"the end of {name}")

    on_train_end = partialmethod(_agree_on_end, "training")
    on_validation_end = partialmethod(_agree_on_end, "validation")
    on_test_end = partialmethod(_agree_on_end, "testing")
    on_predict_end = partialmethod(_agree_on_end, "prediction")

    def teardown(self) -> None:
        """End the run. Horovod and torch's process group stay until the process ends."""
        super().teardown()
        if self._variables is not None:
            self._variables.restore()  # a running Horovod has read them
        self._variables = None
