"""Buckets without processes: a reducer that stands for two ranks with equal gradients."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.gradient_buckets import GradientBuckets
from lightning_d9m.logical_ranks.bucket_layout import lay_out


class Twins:
    """Two ranks with the same gradients; records sums, agreements and waits."""

    size = 2
    polls_peers = False

    def __init__(self):
        self.events = []
        self.items = ()

    def start(self, tensor, name, activity):
        assert tensor.is_contiguous()
        self.events.append(name)
        tensor.add_(tensor.clone())
        return len(self.events)

    def finish(self, pending, activity, agree):
        self.events.append(f"wait {pending}")

    def confirm(self, activity, agree):
        self.events.append("confirm")

    def agree_on(self, fingerprint, activity, items):
        self.events.append("agree")
        self.fingerprint = fingerprint
        self.items = items()


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 1))


def gradients(module):
    return [p.grad.clone() for p in module.parameters()]


def plain_gradients(module, inputs):
    module(inputs).sum().backward()
    found = gradients(module)
    module.zero_grad()
    return found


@pytest.mark.parametrize("size", [0, 1, 64, 4096])
def test_average_of_equal_gradients_is_the_plain_gradient(size):
    """Bit for bit, for any size of the buckets."""
    module, inputs = model(), torch.randn(2, 3)
    expected = plain_gradients(module, inputs)
    buckets = GradientBuckets(module.named_parameters(), Twins(), bucket_bytes=size)
    with buckets.backward():
        module(inputs).sum().backward()
    assert all(map(torch.equal, gradients(module), expected))


def test_sum_doubles_equal_gradients():
    """``op="sum"`` does not scale."""
    module, inputs = model(), torch.randn(2, 3)
    expected = plain_gradients(module, inputs)
    buckets = GradientBuckets(module.named_parameters(), Twins(), op="sum")
    with buckets.backward():
        module(inputs).sum().backward()
    assert all(torch.equal(a, 2 * b) for a, b in zip(gradients(module), expected, strict=True))


def test_reduction_starts_while_the_backward_pass_runs():
    """The bucket of the last layer is started before the first layer has a gradient.

    Not in the first pass: until the ranks have agreed once, their buckets may differ.
    """
    module, reducer = model(), Twins()
    buckets = GradientBuckets(module.named_parameters(), reducer, bucket_bytes=1)
    with buckets.backward():
        module(torch.randn(2, 3)).sum().backward()
    assert reducer.events[0] == "agree"
    reducer.events.clear()
    module[0].weight.register_hook(lambda _: reducer.events.append("first layer"))
    with buckets.backward():
        module(torch.randn(2, 3)).sum().backward()
    assert reducer.events.index("d9m.bucket.0.0-0") < reducer.events.index("first layer")
    assert reducer.events.count("agree") == 1


def test_the_same_gradients_need_no_agreement():
    """With polls, the ranks agree when the gradients are not those of the last pass."""
    module, reducer = model(), Twins()
    reducer.polls_peers = True
    buckets = GradientBuckets(module.named_parameters(), reducer, bucket_bytes=1)
    counts = []
    for part in (module, module, module[:3], module[:3], module, module):
        with buckets.backward():
            part(torch.randn(2, 3)).sum().backward()
        counts.append(reducer.events.count("agree"))
    assert counts == [1, 1, 2, 2, 3, 3]


def test_a_bucket_that_lacked_a_gradient_starts_only_after_an_agreement():
    """Another rank may still lack the gradient, and would sum a part of the bucket."""
    module, reducer = model(), Twins()
    reducer.polls_peers = True
    buckets = GradientBuckets(module.named_parameters(), reducer)
    for part in (module[:3], module):
        reducer.events.clear()
        with buckets.backward():
            part(torch.randn(2, 3)).sum().backward()
        assert reducer.events[0] == "agree"
    reducer.events.clear()
    with buckets.backward():
        module(torch.randn(2, 3)).sum().backward()
    assert reducer.events == ["d9m.bucket.0.0-5", "confirm", "wait 1"]


def test_gradients_are_views_and_are_not_copied_again():
    """A gradient that stays (zeroed in place) is accumulated in its bucket."""
    module = model()
    buckets = GradientBuckets(module.named_parameters(), Twins())
    for _ in range(2):
        module.zero_grad(set_to_none=False)
        with buckets.backward():
            module(torch.ones(2, 3)).sum().backward()
        places = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
        assert len(places) == len(buckets) == 1


def test_blocked_gradients_accumulate_and_are_reduced_with_the_last():
    """With accumulation, the ranks exchange nothing until the last backward pass."""
    module, inputs, reducer = model(), torch.randn(2, 3), Twins()
    once = plain_gradients(module, inputs)
    buckets = GradientBuckets(module.named_parameters(), reducer)
    with buckets.blocked():
        assert buckets.is_blocked
        with buckets.backward():
            module(inputs).sum().backward()
    assert reducer.events == []
    with buckets.backward():
        module(inputs).sum().backward()
    assert all(torch.equal(a, 2 * b) for a, b in zip(gradients(module), once, strict=True))


def test_unused_parameters_keep_their_gradients():
    """None stays None, and an old gradient is neither reduced again nor overwritten."""
    module, reducer = model(), Twins()
    buckets = GradientBuckets(module.named_parameters(), reducer)
    kept = torch.full((1, 5), 3.0)
    module[3].weight.grad = kept
    with buckets.backward():
        module[2](module[1](module[0](torch.ones(2, 3)))).sum().backward()
    assert module[3].bias.grad is None
    assert module[3].weight.grad is kept
    assert kept.eq(3.0).all()
    assert "d9m.bucket.0.2-5" in reducer.events
    assert "3.weight" not in reducer.items
    assert "2.weight" in reducer.items


SHAPES = st.sampled_from([(1,), (3, 5), (16,), (2, 3, 3, 3), (130, 130), (8, 64, 9, 9)])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=8),
    st.sampled_from([0, 300, 2**18]),
)
def test_any_mixture_of_sizes_with_any_gradients_missing(members, limit):
    """In two steps, each parameter has its gradient, and one without a gradient has None."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape, _ in members]
    for parameter in parameters:
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    buckets = GradientBuckets(
        [(str(i), p) for i, p in enumerate(parameters)], Twins(), bucket_bytes=limit
    )
    for flip in (False, True):
        used = [p for p, (_, is_used) in zip(parameters, members, strict=True) if is_used != flip]
        for parameter in parameters:
            parameter.grad = None
        factors = {id(p): torch.randn(p.shape) for p in used}
        with buckets.backward():
            if used:
                sum((factors[id(p)] * p).sum() for p in used).backward()
        for parameter in parameters:
            expected = factors.get(id(parameter))
            assert (parameter.grad is None) == (expected is None)
            assert expected is None or torch.equal(parameter.grad, expected)


def test_fingerprint_tells_which_parameters_have_gradients():
    """Different sets of gradients have different fingerprints; equal sets have equal ones."""
    module, reducer = model(), Twins()
    buckets = GradientBuckets(module.named_parameters(), reducer)
    seen = []
    for part in (module, module[:3], module, module[:1]):
        with buckets.backward():
            part(torch.ones(2, 3)).sum().backward()
        seen.append(reducer.fingerprint)
    assert seen[0] == seen[2]
    assert len(set(seen)) == 3


def test_toggled_parameters_keep_their_slots():
    """A parameter that is frozen for a while needs no new buckets."""
    module, reducer = model(), Twins()
    buckets = GradientBuckets(module.named_parameters(), reducer, bucket_bytes=1)
    module[3].requires_grad_(requires_grad=False)
    with buckets.backward():
        module(torch.ones(2, 3)).sum().backward()
    assert module[3].weight.grad is None
    module[3].requires_grad_(requires_grad=True)
    with buckets.backward():
        module(torch.ones(2, 3)).sum().backward()
    assert module[3].weight.grad is not None
    assert len(buckets) == 6


def test_unfrozen_parameters_join():
    """A parameter that was frozen at the start is reduced once it is trained."""
    module, reducer = model(), Twins()
    module[0].requires_grad_(requires_grad=False)
    buckets = GradientBuckets(module.named_parameters(), reducer)
    with buckets.backward():
        module(torch.ones(2, 3)).sum().backward()
    assert "0.weight" not in reducer.items
    module[0].requires_grad_(requires_grad=True)
    with buckets.backward():
        module(torch.ones(2, 3)).sum().backward()
    assert "0.weight" in reducer.items


def test_shared_parameters_have_one_slot():
    """Two layers with one weight: one slot, one sum of both gradients."""
    module = model()
    module[3] = nn.Linear(5, 5)
    module.append(nn.Linear(5, 5))
    module[4].weight = module[3].weight
    expected = plain_gradients(module, torch.ones(2, 3))
    buckets = GradientBuckets(module.named_parameters(remove_duplicate=False), Twins())
    with buckets.backward():
        module(torch.ones(2, 3)).sum().backward()
    assert all(map(torch.equal, gradients(module), expected))


def test_channels_last_gradients_keep_their_strides():
    """Gradients have the memory layout of their parameters."""
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    inputs = torch.randn(1, 3, 5, 5).to(memory_format=torch.channels_last)
    expected = plain_gradients(module, inputs)
    buckets = GradientBuckets(module.named_parameters(), Twins())
    with buckets.backward():
        module(inputs).sum().backward()
    assert module.weight.grad.stride() == module.weight.stride()
    assert all(map(torch.equal, gradients(module), expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes(dtype):
    """Each dtype has separate buckets, and no gradient changes."""
    parameter = nn.Parameter(torch.randn(5).to(dtype))
    other = nn.Parameter(torch.randn(3))
    buckets = GradientBuckets([("a", parameter), ("b", other)], Twins())
    with buckets.backward():
        ((parameter * 2).abs().float().sum() + other.sum()).backward()
    expected = torch.autograd.grad((parameter * 2).abs().float().sum(), parameter)[0]
    assert torch.equal(parameter.grad, expected)
    assert len(buckets) == 2


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_compression_rounds_once(name, dtype):
    """A rank sends half of its gradient, rounded."""
    module, inputs = model(), torch.randn(2, 3)
    expected = [(g / 2).to(dtype).float() * 2 for g in plain_gradients(module, inputs)]
    buckets = GradientBuckets(module.named_parameters(), Twins(), compression=name)
    with buckets.backward():
        module(inputs).sum().backward()
    assert all(map(torch.equal, gradients(module), expected))


def test_sparse_gradients_are_refused_or_made_dense():
    """Rows that are looked up twice are added in a fixed order."""
    module = nn.Embedding(4, 2, sparse=True)
    buckets = GradientBuckets(module.named_parameters(), Twins())
    with pytest.raises(SettingError, match="sparse_as_dense=True"), buckets.backward():
        module(torch.tensor([1, 1])).sum().backward()
    buckets.close()
    module.weight.grad = None
    buckets = GradientBuckets(module.named_parameters(), Twins(), sparse_as_dense=True)
    with buckets.backward():
        module(torch.tensor([1, 1])).sum().backward()
    assert module.weight.grad.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


def test_gradient_outside_is_reported():
    """Outside `backward`, a gradient calls ``on_stray`` with the parameter's name."""
    stray = []
    module = nn.Linear(2, 1)
    GradientBuckets(module.named_parameters(), Twins(), on_stray=stray.append)
    module(torch.ones(1, 2)).sum().backward()
    assert sorted(stray) == ["bias", "weight"]


def test_gradient_that_was_taken_away_is_an_error():
    """An optimizer inside a backward hook would train one rank alone."""
    module = nn.Linear(2, 1)

    def take(parameter):
        parameter.grad = None

    module.weight.register_post_accumulate_grad_hook(take)
    buckets = GradientBuckets(module.named_parameters(), Twins())
    with pytest.raises(SettingError, match="'weight' was removed"), buckets.backward():
        module(torch.ones(1, 2)).sum().backward()


def test_second_gradient_after_launch_is_an_error():
    """Reentrant checkpointing of a shared layer would change a gradient that was sent."""
    layer = nn.Linear(2, 2)
    buckets = GradientBuckets(layer.named_parameters(), Twins())
    inputs = torch.ones(1, 2, requires_grad=True)

    def run(x):
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)

    with buckets.backward():
        layer(inputs).sum().backward()
    with pytest.raises(SettingError, match="second gradient"), buckets.backward():
        run(run(inputs)).sum().backward()


def test_close_removes_the_hooks():
    """After `close`, a backward pass exchanges nothing."""
    module, reducer = model(), Twins()
    buckets = GradientBuckets(module.named_parameters(), reducer, on_stray=pytest.fail)
    buckets.close()
    module(torch.ones(2, 3)).sum().backward()
    assert reducer.events == []


def test_one_rank_alone_reduces_nothing():
    """With one process, the gradients stay as autograd computes them."""
    module, reducer = model(), Twins()
    reducer.size = 1
    buckets = GradientBuckets(module.named_parameters(), reducer)
    with buckets.backward():
        module(torch.ones(2, 3)).sum().backward()
    assert reducer.events == []


@pytest.mark.parametrize(
    "given",
    [{"op": "mean"}, {"bucket_bytes": -1}, {"bucket_bytes": True}, {"compression": "int8"}],
)
def test_unknown_options_are_refused(given):
    """The message names the value and what is allowed."""
    with pytest.raises(SettingError, match=str(next(iter(given.values())))):
        GradientBuckets([], Twins(), **given)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50) | st.just(2**14), min_size=1, max_size=12), st.integers(0, 400))
def test_layout_holds_every_parameter_once_and_aligned(sizes, limit):
    """Slots do not overlap, begin at multiples of 64 bytes, and go from last to first.

    Within a bucket, the large ones come before the small ones.
    """
    named = [(str(i), nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
    buckets = lay_out(named, limit)
    names = iter(reversed(named))
    for bucket in buckets:
        taken = [next(names) for _ in bucket.slots]
        small = [name for name, parameter in taken if parameter.nbytes < 2**16]
        large = [name for name, parameter in taken if parameter.nbytes >= 2**16]
        assert [slot.name for slot in bucket.slots] == large + small
        assert bucket.large == len(large)
    assert next(names, None) is None
    for bucket in buckets:
        edges = [(slot.start, slot.stop) for slot in bucket.slots]
        assert all(start % 16 == 0 for start, _ in edges)
        assert all(a[1] == b[0] for a, b in pairwise(edges))
        assert all(slot.view.shape == slot.parameter.shape for slot in bucket.slots)
        last = min(bucket.slots, key=lambda slot: int(slot.name))
        held = sum(slot.parameter.numel() * 4 for slot in bucket.slots if slot is not last)
        assert held < max(limit, 1)
