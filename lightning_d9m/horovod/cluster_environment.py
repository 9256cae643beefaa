"""The rank of this process, before and after Horovod starts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_d9m.lightning.packages import combined_base

_Environment: Any = combined_base("plugins.environments.LightningEnvironment")
# horovodrun, Open MPI, MPICH and Intel MPI: rank, size, local rank, node rank.
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
    """The ranks of this process, and the number of processes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node_rank: int = 0


def read_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """Read the launcher's variables; without a launcher, return a single process."""
    for names in _VARIABLES:
        if names[0] in environment:
            rank, size, local_rank, node_rank = (int(environment.get(n, "0")) for n in names)
            return RankInfo(rank, max(1, size), local_rank, node_rank)
    return RankInfo()


class HorovodEnvironment(_Environment):  # type: ignore[misc] # of what is loaded
    """The processes that ``horovodrun`` or ``mpirun`` started.

    The strategy passes it to Lightning, which would otherwise detect SLURM, MPI or torchrun.
    """

    def __init__(self) -> None:
        super().__init__()
        self._info = read_rank_info(os.environ)

    def update(self, hvd: Any) -> None:
        """Read the ranks from Horovod, once it is initialized."""
        self._info = RankInfo(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank())

    @property
    def creates_processes_externally(self) -> bool:
        """Always True: the launcher starts all processes."""
        return True

    def teardown(self) -> None:
        """Leave the launcher's variables as they are."""

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._info.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher sets it."""

    def global_rank(self) -> int:
        """Return the rank of this process."""
        return self._info.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher sets it."""

    def local_rank(self) -> int:
        """Return the rank of this process on its host."""
        return self._info.local_rank

    def node_rank(self) -> int:
        """Return the number of this process's host."""
        return self._info.node_rank
