"""Updates of targets, and by indices, in any memory layout."""

import pytest
import torch

from lightning_d9m.patches.registration import patches_applied

LAYOUTS = {
    "permuted": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], dim=2)[..., : x.shape[2]],
    "outermost": lambda x: x.movedim(0, 2).contiguous().movedim(2, 0),
}


CALLS = {
    "amax": lambda x, i, v: x.index_reduce_(0, i, v, "amax"),
    "mean": lambda x, i, v: x.index_reduce_(0, i, v, "mean"),
    "index_add": lambda x, i, v: x.index_add_(0, i, v),
    "index_put": lambda x, i, v: x.index_put_((i,), v, accumulate=True),
    "scatter_mean": lambda x, i, v: x.scatter_reduce_(
        0, i.view(-1, 1, 1).expand_as(v), v, "mean", include_self=False
    ),
    "scatter_add": lambda x, i, v: x.scatter_add_(0, i.view(-1, 1, 1).expand_as(v), v),
}


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_target_of_any_layout_is_updated_as_by_torch(layout: str, call: object) -> None:
    """In place, with few values and many; a second call is one with tensors alike."""
    for count in (2, 40, 2, 40):
        target = LAYOUTS[layout](torch.randn(5, 6, 20))
        values, index = torch.randn(count, 6, 20), torch.randint(5, (count,))
        expected = call(target.contiguous(), index, values)
        with patches_applied("CPU"):
            assert call(target, index, values) is target
        torch.testing.assert_close(target, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_indices_of_any_layout_choose_what_torch_chooses(layout: str) -> None:
    index, values = torch.randint(5, (4, 6, 20)), torch.randn(4, 6, 20)
    pooled = (values, torch.randn(4, 9, 20), index)
    backward = torch.ops.aten.adaptive_max_pool2d_backward
    expected = torch.zeros(5, 6, 20).scatter_add(0, index, values), backward(*pooled)
    with patches_applied("CPU"):
        index, values = LAYOUTS[layout](index), LAYOUTS[layout](values)
        actual = torch.zeros(5, 6, 20).scatter_add(0, index, values)
        torch.testing.assert_close(actual, expected[0])
        torch.testing.assert_close(backward(values, pooled[1], index), expected[1])
