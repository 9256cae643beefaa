"""The lost ranks, in the error that a failed collective of ``torch.distributed`` raises."""

import re
from itertools import count
from typing import TYPE_CHECKING

import torch.distributed

from lightning_d9m.errors import D9mError
from lightning_d9m.lightning.ranks.process_group import close_default_group
from lightning_d9m.lightning.ranks.trainer_ranks import ranks_of
from lightning_d9m.ranks.liveness import RankLiveness, identify_process

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Words of the errors that Gloo and NCCL raise; torch has no type for them.
_FAILURE = re.compile(r"gloo|nccl|(closed|reset) by peer|pair closure|timed out", re.IGNORECASE)
_runs = count()  # separates the runs of a process in the store, and is equal on every rank


def connect_liveness(trainer: "Trainer") -> RankLiveness | None:
    """Connect the ranks of a Trainer; every rank must call this.

    Returns:
        None without a process group of torch's. The Horovod strategy names lost ranks itself.
    """
    gather = ranks_of(trainer).gather
    if gather is None or not torch.distributed.is_available():
        return None
    if not torch.distributed.is_initialized():
        return None
    store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
    processes = gather(identify_process())
    return RankLiveness(store, trainer.global_rank, processes, prefix=str(next(_runs)))


def add_lost_ranks(error: BaseException, liveness: RankLiveness | None) -> None:
    """Append the lost ranks to the error of a failed collective; publish any other error."""
    if liveness is None:
        return
    is_failure = isinstance(error, RuntimeError) and not isinstance(error, D9mError)
    if not (is_failure and _FAILURE.search(str(error))):
        liveness.report_error(error)
        return
    close_default_group()  # a rank that waits for this one would seem to hang
    if lost := liveness.find_lost():
        error.args = ("\n".join([str(error), *lost.values()]),)
