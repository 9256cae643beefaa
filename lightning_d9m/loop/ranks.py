"""The ranks of ``torch.distributed``, as launched by torchrun, Fabric or Accelerate."""

import torch
from torch import distributed

from lightning_d9m.recording.collective import Ranks


def find_ranks() -> tuple[Ranks, int]:
    """Return the ranks of the default process group and their number; one without a group."""
    if not distributed.is_available() or not distributed.is_initialized():
        return Ranks(0), 1
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return (Ranks(rank) if size == 1 else Ranks(rank, _exchange)), size


def _exchange(data: bytes) -> list[bytes]:
    # NCCL gathers only what is on a device.
    kinds = distributed.get_backend_config()
    host = "cpu:" in str(kinds)
    device = torch.device("cpu") if host else torch.device("cuda", torch.cuda.current_device())
    local = torch.frombuffer(bytearray(data), dtype=torch.int64).to(device)
    rows = [torch.empty_like(local) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, local)
    return [row.cpu().numpy().tobytes() for row in rows]
