"""The small gradients of a bucket are packed as they lie in it."""

import torch
from torch import nn

from lightning_d9m.logical_ranks.buckets import SmallGradients, SumOptions, lay_out


def make_bucket(*shapes):
    named = [
        (f"p{number}", nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)
    ]
    (bucket,) = lay_out(named, 2**20)
    return bucket


def set_gradients(bucket):
    for number, slot in enumerate(bucket.slots):
        slot.parameter.grad = torch.full_like(slot.parameter, number + 1)


def test_gradients_lie_where_the_bucket_has_them_with_flags_behind():
    bucket = make_bucket((3, 5), (), (200, 200), (16,), (0, 2))
    small = SmallGradients(bucket, SumOptions(1))
    set_gradients(bucket)
    packed, missing = small.pack((), is_first=True)
    assert missing == set()
    expected = torch.zeros_like(bucket.flat)
    for number, slot in enumerate(bucket.slots):
        expected[slot.start : slot.start + slot.view.numel()] = number + 1
    expected[-5:] = 1.0
    assert small.start == 200 * 200
    assert torch.equal(packed, expected[small.start :])


def test_gradients_are_taken_away():
    bucket = make_bucket((3, 5), (7,))
    small = SmallGradients(bucket, SumOptions(1))
    set_gradients(bucket)
    small.pack((), is_first=True)
    assert all(slot.parameter.grad is None for slot in bucket.slots)


def test_missing_gradients_are_zeros_and_lack_their_flag():
    bucket = make_bucket((200, 200), (3,), (5,))
    small = SmallGradients(bucket, SumOptions(1))
    set_gradients(bucket)
    bucket.slots[2].parameter.grad = None
    packed, missing = small.pack((0,), is_first=True)
    assert missing == {0, 2}
    assert packed.tolist() == [2.0] * 5 + [0.0] * 27 + [0.0, 1.0, 0.0]


def test_a_bucket_without_small_gradients_has_flags():
    bucket = make_bucket((200, 200))
    small = SmallGradients(bucket, SumOptions(1))
    packed, _ = small.pack((), is_first=True)
    assert packed.tolist() == [1.0]
