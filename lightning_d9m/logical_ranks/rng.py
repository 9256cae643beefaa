"""The seed of each micro-batch."""

import torch

from lightning_d9m.control.seeding import derive_seed, seed_host


def seed_micro_batch(base: int, *, fit: int, epoch: int, logical_rank: int, batch: int) -> None:
    """Seed Python's, NumPy's and torch's generators for one micro-batch of a logical rank.

    Nothing carries over from one micro-batch to the next, so it does not matter which process
    computes them, nor in which order, and a checkpoint needs no state of these generators.

    Args:
        base: The seed of the run.
        fit: The number of the fit in this process.
        epoch: The epoch, counted from 0.
        logical_rank: The logical rank.
        batch: The index of the batch within the epoch.
    """
    seed = derive_seed(base, "micro-batch", fit=fit, rank=logical_rank, epoch=epoch, index=batch)
    seed_host(seed)
    device = torch.accelerator.current_accelerator()
    if device is None:
        return
    module = getattr(torch, device.type)
    if module.is_initialized():
        module.manual_seed(seed)  # of the current device, the only one that a process computes on
    else:
        torch.manual_seed(seed)  # takes effect when the device is initialized
