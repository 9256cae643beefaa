"""The kernel of separable ops, under Triton's interpreter: the bits of the torch ops."""

import pytest
import torch
from patches.cases import GRADIENT_CASES, compute_gradient, make_inputs
from patches.triton.interpreted import interpreted, kernels_on_cpu

from lightning_d9m.errors import D9mError
from lightning_d9m.patches.kernels import separable

DTYPES = (torch.float32, torch.float64, torch.float16)
WORDS = ("avg_pool", "linear", "cubic", "flection", "cation")


@interpreted
def test_every_op_has_the_bits_of_the_torch_ops() -> None:
    """Also of infinities, NaN and -0.0, strided and channels_last gradients."""
    cases = [case for case in GRADIENT_CASES if any(word in case.label for word in WORDS)]
    assert len(cases) > 20
    for number, case in enumerate(cases):
        dtype = DTYPES[number % 3 if "aa" not in case.label else number % 2]
        image, gradient = (part.to(dtype) for part in make_inputs(case))
        places = torch.arange(gradient.numel()).view(gradient.shape)
        for place, value in ((1, torch.inf), (5, torch.nan), (9, -0.0)):
            gradient = torch.where(places % 40 == place, value, gradient)
        if case.has_channels_last and number % 2:
            form = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
            image, gradient = (part.contiguous(memory_format=form) for part in (image, gradient))
        try:
            expected = compute_gradient(case, image, gradient, patched=True)
        except (NotImplementedError, RuntimeError):
            continue  # torch's CPU kernel does not take half
        with kernels_on_cpu("kernels:add_taps"):
            actual = compute_gradient(case, image, gradient, patched=True)
        assert actual.stride() == expected.stride()
        left, right = (
            torch.where(part.isnan(), torch.nan, part).contiguous() for part in (actual, expected)
        )
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), case.label


def test_taps_are_not_made_while_a_graph_is_captured(monkeypatch) -> None:
    monkeypatch.setattr(separable, "is_capturing", lambda: True)
    with pytest.raises(D9mError, match=r"has to copy a table for sides of \[7\] to cuda:0 first"):
        separable.cached_taps(torch.device("cuda:0"), torch.float32, (7, "avg_pool2d"))
