"""Which rank this process is, before and after Horovod starts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_d9m.lightning.packages import combined_base

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.cluster_environment import (
        ClusterEnvironment as _ClusterEnvironment,
    )
else:
    _ClusterEnvironment = combined_base("plugins.environments.ClusterEnvironment")

# horovodrun, Open MPI, MPICH and Intel MPI: rank, size, rank on the host, number of the host.
_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_NODE_RANK",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_NODE_RANK"),
)


@dataclass(frozen=True)
class RankInfo:
    """The place of this process among all."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node_rank: int = 0


def read_layout(environment: Mapping[str, str]) -> RankInfo:
    """Read the place from what the launcher set; a single process when there was no launcher."""
    for names in _VARIABLES:
        if names[0] in environment:
            rank, size, local_rank, node_rank = (int(environment.get(n, "0")) for n in names)
            return RankInfo(rank, max(1, size), local_rank, node_rank)
    return RankInfo()


class HorovodEnvironment(_ClusterEnvironment):
    """The cluster as ``horovodrun`` or ``mpirun`` laid it out.

    Given to Lightning, so that it does not look for SLURM, MPI or torchrun by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layout = read_layout(os.environ)

    def adopt(self, hvd: Any) -> None:
        """Take over what Horovod says, once it is initialised."""
        self._layout = RankInfo(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank())

    @property
    def creates_processes_externally(self) -> bool:
        """The launcher starts all processes."""
        return True

    @property
    def main_address(self) -> str:
        """The launcher's address where it gives one; Lightning does not connect to it."""
        return os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The launcher's port where it gives one; Lightning does not connect to it."""
        return int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Whether a launcher that this class reads has started the process."""
        return any(names[0] in os.environ for names in _VARIABLES)

    def world_size(self) -> int:
        """The number of processes."""
        return self._layout.size

    def set_world_size(self, size: int) -> None:
        """The launcher decides."""

    def global_rank(self) -> int:
        """This process among all."""
        return self._layout.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher decides."""

    def local_rank(self) -> int:
        """This process among those of its host."""
        return self._layout.local_rank

    def node_rank(self) -> int:
        """The host of this process."""
        return self._layout.node_rank
