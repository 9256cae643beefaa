"""The first step of DDP adds gradients in the same order as every other step."""

import pytest
import torch
from rank_threads import run_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_d9m.control.ddp_buckets import settle_buckets

ORDER = (3, 0, 5, 1, 7, 2, 6, 4)  # in which layers are used, unlike that of their registration


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(31, 31) for _ in ORDER)
        self.words = nn.Embedding(4, 31, sparse=True)

    def forward(self, inputs):
        for number in ORDER:
            inputs = torch.tanh(self.layers[number](inputs))
        return inputs + self.words(torch.tensor([1]))


def read_gradients(ddp, process):
    """Return the bytes of the gradients of one step, which are the same on all ranks."""
    generator = torch.Generator().manual_seed(process)
    ddp.zero_grad()
    ddp(torch.randn(5, 31, generator=generator)).square().sum().backward()
    return [own.grad.to_dense().numpy().tobytes() for own in ddp.parameters()]


@pytest.mark.parametrize(("settles", "unused"), [(True, False), (False, False), (True, True)])
def test_the_first_step_is_like_the_second(settles, unused):
    """Without it, it is not; with unused parameters torch keeps the buckets."""
    called = []

    def train(process, group):
        ddp = DistributedDataParallel(
            Net(), process_group=group, bucket_cap_mb=0.01, find_unused_parameters=unused
        )
        weight = ddp.module.layers[0].weight
        weight.register_hook(called.append)
        weight.register_post_accumulate_grad_hook(called.append)
        weight.grad = torch.ones_like(weight)
        if settles:
            settle_buckets(nn.ModuleList([ddp]))
        assert not called
        assert torch.equal(weight.grad, torch.ones_like(weight))
        assert ddp.module.words.weight.grad is None
        group.barrier().wait()
        first, second = (read_gradients(ddp, process) for _ in range(2))
        return first == second

    assert run_processes(3, train) == [settles] * 3
