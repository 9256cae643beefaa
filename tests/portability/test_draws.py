"""Random numbers are finite."""

import pytest
import torch

from lightning_d9m import portable
from lightning_d9m.ops.portability import draws


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_greatest_exponential_number_is_finite(dtype, monkeypatch):
    """It comes from the greatest number below 1, which float32 rounds to 1."""
    monkeypatch.setattr(draws, "draw", lambda size, *_: torch.full(size, 1 - 2.0**-53).double())
    with portable():
        assert torch.empty(3, dtype=dtype).exponential_().isfinite().all()
