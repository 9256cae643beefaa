"""What ranks draw for their batches."""

import torch
from torch.utils.data import DataLoader, DistributedSampler
from trainings import NoisyDigits

from lightning_d9m import Settings, digest_value
from lightning_d9m.loop.batches import Batches


def draw(rank, *, parts, part):
    """Return the digest of an epoch's batches, which draw noise, and of a number after them."""
    data = NoisyDigits(16)
    sampler = DistributedSampler(data, num_replicas=parts, rank=part, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    batches = Batches(Settings(seed=1), 0, rank)
    batches.start_epoch(0, loader)
    found = [images for images, _ in batches.iterate(loader, 0, 0, {})]
    number = torch.rand(1)
    batches.release()
    return digest_value([found, number])


def test_ranks_with_the_same_data_draw_the_same_numbers():
    """As the ranks of tensor parallelism."""
    assert draw(0, parts=1, part=0) == draw(1, parts=1, part=0)
    assert draw(0, parts=2, part=0) != draw(1, parts=2, part=1)
