"""Patched ops where the original's answer is not the one that is expected, and derivatives."""

import pytest
import torch
import torch.nn.functional as nnf

from lightning_d9m.patches.registration import patches_applied

NAN = float("nan")


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
def test_half_is_rounded_once() -> None:
    """Losses and products of half precision, which torch rounds after each term."""
    scores, target = torch.randn(2, 5, 4, 3).half(), torch.randint(0, 5, (2, 4, 3))
    low, index = torch.full((1,), 1.1, dtype=torch.half), torch.zeros(6, dtype=torch.int64)
    with patches_applied("CPU"):
        loss = nnf.nll_loss(scores, target)
        products = [
            low.index_reduce(0, index, low.expand(6), "prod"),
            low.scatter_reduce(0, index, low.expand(6), "prod"),
        ]
    reference = nnf.nll_loss(scores.double(), target)
    assert abs(loss.double() - reference) <= torch.finfo(torch.half).eps * abs(reference)
    for product in products:
        assert torch.equal(product, low.float().pow(7).half())


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_median_of_equal_elements_has_one_index(name: str) -> None:
    """The index is that of the first element that equals the median, and the value is there."""
    matrix = torch.randint(0, 3, (50, 9)).float()
    with patches_applied("CPU"):
        values, indices = getattr(torch, name)(matrix, 1)
    assert torch.equal(matrix.gather(1, indices.unsqueeze(1)).squeeze(1), values)
    assert torch.equal(values, matrix.sort(dim=1).values[:, 4])
    assert indices.tolist() == [
        row.tolist().index(value) for row, value in zip(matrix, values, strict=True)
    ]
    every = torch.full((2, 3), NAN)
    with patches_applied("CPU"):
        values, indices = getattr(torch, name)(every, 1)
    assert values.isnan().all()
    assert indices.tolist() == [0, 0]
