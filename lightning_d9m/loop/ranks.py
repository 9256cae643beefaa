"""The ranks of ``torch.distributed``, as launched by torchrun, Fabric or Accelerate."""

from torch import distributed

from lightning_d9m.ranks.groups import ranks_of_group
from lightning_d9m.ranks.ranks import Ranks


def find_ranks() -> tuple[Ranks, int]:
    """Return the ranks of the default process group and their number; one without a group."""
    if not distributed.is_available() or not distributed.is_initialized():
        return ranks_of_group(), 1
    return ranks_of_group(), distributed.get_world_size()
