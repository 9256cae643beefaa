"""``DDPDeterministicStrategy(logical_ranks=8)``: the same bits on any number of processes."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from lightning_d9m.errors import RankLostError, SettingError
from lightning_d9m.lightning.logical_ranks.strategy import LogicalRanksMixin
from lightning_d9m.lightning.packages import combined_base
from lightning_d9m.lightning.strategies import register_in_loaded_packages
from lightning_d9m.logical_ranks.gradients import LogicalGradients
from lightning_d9m.logical_ranks.tree import Blocks
from lightning_d9m.ranks.connections import (
    close_default_group,
    is_default_group_closed,
    reopen_default_group,
)
from lightning_d9m.ranks.groups import broadcast_tensors, ranks_of_group
from lightning_d9m.ranks.liveness import connect_liveness

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = combined_base("strategies.DDPStrategy")

# Options of DDP that logical ranks do not need: they handle what each of them is for.
_NEEDLESS = ("find_unused_parameters",)


class DDPDeterministicStrategy(LogicalRanksMixin, _DDPStrategy):
    """Train on any number of processes with the same bits.

    The samples of each step are split among ``logical_ranks``, not among the processes. Each
    process computes some of them, one after the other, and gradients are added in an order that
    only their number decides. So the batch size is that of one logical rank, and one step trains
    ``batch_size * logical_ranks`` samples.

    Args:
        logical_ranks: Their number, at least that of the processes. None takes the variable
            ``LIGHTNING_D9M_LOGICAL_RANKS``; without it this is Lightning's ``DDPStrategy``.
        sparse_as_dense: Sum sparse gradients as dense ones; otherwise they are an error.
        options: As for Lightning's ``DDPStrategy``.

    Raises:
        SettingError: If a value is not allowed.
    """

    strategy_name = "ddp_d9m"

    def __init__(
        self,
        *,
        logical_ranks: int | None = None,
        sparse_as_dense: bool = False,
        **options: Any,
    ) -> None:
        self.set_logical_ranks(logical_ranks)
        if self.logical_ranks is not None:
            _check_options(options)
        super().__init__(**options)
        self._sparse_as_dense = sparse_as_dense
        self._group_options = {"timeout": options["timeout"]} if "timeout" in options else {}

    def setup_distributed(self) -> None:
        """Connect the processes, again if an error has closed their connections."""
        reopen_default_group(**self._group_options)
        super().setup_distributed()
        self._liveness = connect_liveness(ranks_of_group())

    def configure_ddp(self) -> None:
        """Wrap the model; with logical ranks it stays as it is."""
        if self.logical_ranks is None:
            super().configure_ddp()

    def make_logical_gradients(self, blocks: Blocks, **options: Any) -> LogicalGradients:
        """Return sums over the default process group."""
        module: Any = self.lightning_module
        return LogicalGradients(
            module.named_parameters(),
            blocks,
            self.global_rank,
            sparse_as_dense=self._sparse_as_dense,
            **options,
        )

    def close_connections(self, exception: BaseException) -> None:
        """Publish the error, and close the connections of torch's default group."""
        if self._liveness is not None and not isinstance(exception, RankLostError):
            self._liveness.report_error(exception)
        if self.world_size > 1:
            close_default_group()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes; return at once after an error, as no other would join."""
        if not is_default_group_closed():
            super().barrier(*args, **kwargs)

    def broadcast_tensors(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with those of process 0."""
        if self.world_size > 1:
            with torch.no_grad():
                broadcast_tensors(tensors, lambda flat: distributed.broadcast(flat, src=0))


def _check_options(options: dict[str, Any]) -> None:
    allowed = {
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "process_group_backend",
        "timeout",
        "start_method",
        *_NEEDLESS,
    }
    for name in sorted(options.keys() - allowed):
        raise SettingError(
            f"{name}={options[name]!r} is an option of DDP, and with logical_ranks gradients are "
            f"not reduced by DDP: leave out {name}, or logical_ranks."
        )


register_in_loaded_packages()  # a Trainer takes the name after this import
