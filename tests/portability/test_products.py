"""Products, convolutions and sums agree with torch's, and do not depend on strides or batches."""

import math

import pytest
import torch

from lightning_d9m import portable
from lightning_d9m.ops.portability.products import convolve, convolve_backward, multiply


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_special_values_are_torchs(dtype):
    rows = [[math.inf, 1.0], [math.inf, -math.inf], [math.nan, 1.0], [3e38, 3e38], [-0.0, -0.0]]
    left, right = torch.tensor(rows, dtype=dtype), torch.tensor([[1, 2.0], [0, 1]], dtype=dtype)
    torch.testing.assert_close(multiply(left, right), left @ right, equal_nan=True)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_sums_over_dimensions(dtype: torch.dtype) -> None:
    """Shapes as torch's, also without terms; another dtype is rounded to once."""
    values = torch.randn(3, 4, 5, dtype=torch.float64).to(dtype)
    half = torch.tensor([60000.0, 60000.0], dtype=torch.float16)
    for dims in ([0], [1, -1], [0, 1, 2], None):
        for keep in (True, False):
            wanted = values.sum(dims, keepdim=keep)
            with portable():
                actual = values.sum(dims, keepdim=keep)
            assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
            torch.testing.assert_close(actual, wanted)
    with portable():
        assert torch.equal(values[:0].sum([0]), torch.zeros(4, 5, dtype=dtype))
        assert half.sum(dtype=torch.float32) == 120000.0
        assert half.sum() == math.inf


def test_each_running_sum_is_one_of_float64():
    numbers = [1.0, 1e8, 1.0, -1e8, math.inf, 2.0]
    with portable():
        found = torch.tensor(numbers).cumsum(0).tolist()
    assert found == [1.0, 1e8, 1e8, 2.0, math.inf, math.inf]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_agree_with_torch(dims, groups, transposed):
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    generator = torch.Generator().manual_seed(2)
    given = ([2], [1], [2], transposed, [1] if transposed else [0], groups)
    channels = (4, 6 // groups) if transposed else (6, 4 // groups)
    values = torch.randn(3, 4, *[9, 8, 7][:dims], generator=generator, requires_grad=True)
    weight = torch.randn(*channels, *[3, 2, 3][:dims], generator=generator, requires_grad=True)
    options = {"output_padding": 1} if transposed else {}
    function = getattr(torch.nn.functional, name)
    out = function(values, weight, None, 2, 1, groups=groups, dilation=2, **options)
    gradient = torch.randn(out.shape, generator=generator)
    expected = torch.autograd.grad(out, (values, weight), gradient)
    with torch.no_grad():
        torch.testing.assert_close(convolve(values, weight, None, *given), out)
        found = convolve_backward(gradient, values, weight, None, *given, (True, True, False))[:2]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    whole = convolve(values.detach(), weight.detach(), None, *given)
    assert torch.equal(convolve(values.detach()[1:2], weight.detach(), None, *given), whole[1:2])
