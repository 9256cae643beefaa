"""What ranks draw for their batches."""

import pytest
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


class OwnIteration(DataLoader):
    """Makes its batches without an iterator of torch."""

    def __iter__(self):
        return map(
            self.collate_fn, ([self.dataset[i] for i in part] for part in self.batch_sampler)
        )


@pytest.mark.parametrize("kind", [DataLoader, OwnIteration])
def test_an_epoch_continues_after_the_batches_that_were_trained(kind):
    def load(skipped):
        loader, batches = kind(range(12), 3, shuffle=True), Batches(Settings(seed=1), 0, 0)
        batches.start_epoch(0, loader)
        found = [batch.tolist() for batch in batches.iterate(loader, 0, skipped, {})]
        batches.release()
        return found

    whole = load(0)
    assert [load(skipped) for skipped in (1, 3, 4)] == [whole[1:], whole[3:], []]
