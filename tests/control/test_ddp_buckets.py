"""The first step of DDP adds gradients in the same order as every other step."""

import itertools

import torch
from rank_processes import call_on_ranks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_d9m.engine.control.ddp_buckets import settle_buckets

ORDER = (3, 0, 5, 1, 7, 2, 6, 4)  # in which layers are used, unlike that of their registration


class Net(nn.Module):
    """Layers in another order than that of their registration, and a sparse gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(31, 31) for _ in ORDER)
        self.words = nn.Embedding(4, 31, sparse=True)

    def forward(self, inputs):
        for number in ORDER:
            inputs = torch.tanh(self.layers[number](inputs))
        return inputs + self.words(torch.tensor([1]))


def read_gradients(ddp):
    ddp.zero_grad()
    generator = torch.Generator().manual_seed(distributed.get_rank())
    ddp(torch.randn(5, 31, generator=generator)).square().sum().backward()
    return [own.grad.to_dense().numpy().tobytes() for own in ddp.parameters()]


def compare_steps(*, settles, unused):
    """Return whether the first step has the gradients of the second."""
    called = []
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.01, find_unused_parameters=unused)
    weight = ddp.module.layers[0].weight
    handles = [weight.register_hook(called.append)]
    handles.append(weight.register_post_accumulate_grad_hook(called.append))
    weight.grad = torch.ones_like(weight)
    if settles:
        settle_buckets(nn.ModuleList([ddp]))
    assert not called
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert ddp.module.words.weight.grad is None
    equal = read_gradients(ddp) == read_gradients(ddp)
    assert called  # the hooks of the program are there again
    for handle in handles:
        handle.remove()
    return equal


def compare_all():
    """Return the results, by whether the buckets are settled and parameters may be unused."""
    distributed.init_process_group("gloo")
    pairs = itertools.product((False, True), repeat=2)
    found = [compare_steps(settles=settles, unused=unused) for settles, unused in pairs]
    distributed.destroy_process_group()
    return found


def test_the_first_step_of_three_processes_is_like_the_second():
    """Without a change it is not, unless parameters may be unused, which keeps the buckets."""
    assert call_on_ranks(compare_all, 3) == [[False, True, True, True]] * 3
