"""Ranks combine the digests of shared tensors; each rank is a thread with its own shard."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from lightning_d9m.errors import DigestError
from lightning_d9m.hashing.shards import FlatLayout
from lightning_d9m.hashing.training_state import take_partial_snapshot, take_snapshot
from lightning_d9m.ranks.ranks import Ranks
from lightning_d9m.recording.run_recorder import complete_snapshot


class Whole(nn.Module):
    """Two parameters, of which the second is small."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.large = nn.Parameter(torch.randn(300, 301))
        self.small = nn.Parameter(torch.randn(5))


def train(model):
    """Take a step of Adam with a gradient that each element has for itself."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        if parameter.numel():
            parameter.grad = parameter.detach() * 2
    optimizer.step()
    return optimizer


class Rank:
    """A part of a trained model, as FSDP1 would give it to a rank."""

    def __init__(self, number, count, group=None, change=None):
        whole = Whole()
        self.model = nn.Module()
        self.layouts = {}
        self.number = number
        ranks = group or tuple(range(count))
        share, of = ranks.index(number), len(ranks)
        flat = torch.cat([own.detach().reshape(-1) for own in whole.parameters()])
        length = -(-len(flat) // of)
        begin, end = share * length, min((share + 1) * length, len(flat))
        at = 0
        for name, own in whole.named_parameters():
            first, last = max(begin, at), min(end, at + own.numel())
            part = nn.Parameter(flat[first : max(first, last)].clone())
            if name == change:
                part.data[0] += 1
            self.model.register_parameter(name, part)
            self.layouts[id(part)] = FlatLayout(tuple(own.shape), first - at, part.data, ranks)
            at += own.numel()
        self.optimizer = train(self.model)

    def take(self, ranks):
        partial = take_partial_snapshot(self.model, [self.optimizer], [], self.layouts)
        return complete_snapshot(partial, ranks)


def complete(parts):
    """Return the snapshot of each rank."""
    rows = [[]] * len(parts)
    barrier = threading.Barrier(len(parts), timeout=30)

    def work(part):
        def exchange(data):
            rows[part.number] = data
            barrier.wait()
            found = list(rows)
            barrier.wait()
            return found

        try:
            return part.take(Ranks(part.number, exchange))
        except DigestError as error:
            return str(error)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(work, parts))


@pytest.fixture
def whole():
    model = Whole()
    optimizer = train(model)
    return take_snapshot(model, [optimizer])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_rank_has_the_digests_of_the_whole(whole, count):
    """Of more than one rank, the first ones hold nothing of the small parameter."""
    assert complete([Rank(number, count) for number in range(count)]) == [whole] * count


def test_copies_in_two_groups_are_digested_by_group(whole):
    groups = [(0, 1), (0, 1), (2, 3), (2, 3)]
    parts = [Rank(number, 4, group) for number, group in enumerate(groups)]
    assert complete(parts) == [whole] * 4
    parts[2] = Rank(2, 4, groups[2], change="large")
    first, second, third, fourth = complete(parts)
    assert first == second == whole
    assert third == fourth
    assert third.groups["weights"]["large"] != whole.groups["weights"]["large"]
    assert third.groups["weights"]["small"] == whole.groups["weights"]["small"]


def test_ranks_that_do_not_hold_the_whole_raise_together():
    parts = [Rank(number, 3) for number in range(2)]
    for part in parts:
        for key, layout in part.layouts.items():
            part.layouts[key] = layout._replace(ranks=(0, 1))
    for message in complete(parts):
        assert "All ranks must digest the same training state." in message
